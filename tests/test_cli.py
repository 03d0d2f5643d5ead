"""Test the command line from outside: exit codes, standard output, and the files that it writes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from meshkit import console
from meshkit.cli import main
from meshkit.config.experiment import load
from meshkit.report.schema import Report
from meshkit.report.summarize import check_invariants
from meshkit.verbs.arguments import complete_experiment

ROOT = Path(__file__).parent.parent
DEBUG = str(ROOT / "configs/experiments/llama_debug_cpu.toml")
PERCEPTRON = str(ROOT / "configs/experiments/mlp.toml")
ON_H100S = ["--set", "cluster={name='dgx_h100',hosts=2}", "--set", "mesh.data={infiniband=2}", "--set", "mesh.fsdp=4"]


def test_help_of_each_verb_shows_an_example(capsys):
    for verb in ("plan", "train", "profile", "compare", "explain", "new", "schema"):
        assert main([verb, "-h"]) == 0
        assert f"Example: meshkit {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["nope"], ["plan"], ["plan", "a.toml", "--nope"], ["schema", "nope"], ["compare", "x", "y"]]
)
def test_wrong_usage_is_2_and_no_traceback(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("name", ["report", "compare", "explain", "experiment"])
def test_schemas_are_json(name, capsys):
    assert main(["schema", name]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]


def test_explain_json_is_alone_on_stdout(capsys):
    assert main(["explain", DEBUG, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "meshkit.explain/1"
    query = next(p for p in found["parameters"] if p["path"] == "layers/attention/query/kernel")
    assert (query["spec"], query["shards"]) == ([[], ["fsdp"], ["tensor"], []], 4)
    assert query["bytes_per_gpu"] * 4 == query["bytes"]


def test_explain_strict_is_3_on_a_finding(capsys):
    assert main(["explain", DEBUG, "--set", "rules.preset='data'", "--strict"]) == 3
    assert "idle_axis" in capsys.readouterr().out


def test_new_writes_a_file_that_explains_and_overwrites_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "mine.toml"
    assert main(["new", "--out", str(file)]) == 0
    assert main(["explain", str(file)]) == 0
    assert main(["new", "--out", str(file)]) == 2
    assert "overwrites nothing" in capsys.readouterr().err


FOREIGN = """
from flax import nnx
raise SystemExit("imported")
class Net(nnx.Module):
    def __init__(self, width: int, *, depth=2, rngs): ...
"""


@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [
        (["--model", "mine:Net"], ["# width = ", "needed: int"], ['preset = "llama', "depth", "rngs"]),
        (["--model", "models.mlp:MLP"], ["embed = 64", 'source = "models.mlp:random_examples"'], ["tensor ="]),
        (["--model", "models.moe:Moe"], ['preset = "moe_debug"', "expert = 2", 'loss = "models.moe:'], ["tensor ="]),
        (["--model", "models.gpt:GPT"], ['preset = "gpt_debug"'], []),
        (
            ["--preset", "llama3_8b", "--cluster", "dgx_h100"],
            ["sequence_length = 8192", "\nremat ="],
            ["--set cluster"],
        ),
    ],
)
def test_new_writes_no_option_that_the_model_does_not_take(words, has, lacks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FOREIGN)
    assert main(["new", *words, "--out", "e.toml"]) == 0
    text = Path("e.toml").read_text().split("# [pipeline]")[0]
    assert [word for word in has if word not in text] == []
    assert [word for word in lacks if word in text.replace("# act_residual", "")] == []
    assert load("e.toml").name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "llama3_8B"], "try 'llama3_8b'"),
        (["--model", "models.mlp:MLP", "--preset", "small"], "models.mlp:MLP takes no preset"),
        (["--model", "a:B", "--copy-model", "llama"], "names the model"),
    ],
)
def test_new_refuses_what_the_model_has_not(words, said, tmp_path, capsys):
    assert main(["new", *words, "--out", str(tmp_path / "e.toml")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "e.toml").exists()


def test_the_shell_completes_files_folders_and_shipped_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("llama_mine.toml", "llama.txt"):
        Path(name).touch()
    Path("llamas").mkdir()
    found = complete_experiment("llama")
    assert found[:2] == ["llama_mine.toml", "llamas/"]
    assert {"llama3_8b", "llama_debug_cpu"} <= set(found)


def test_plan_for_a_cpu_cluster_says_what_to_do(capsys):
    assert main(["plan", DEBUG]) == 2
    assert "--set cluster=dgx_h100" in capsys.readouterr().err


@pytest.mark.deviceless
def test_plan_writes_one_report_everywhere(tmp_path, capsys):
    assert main(["plan", DEBUG, *ON_H100S, "--failures", "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "report.json").read_text())
    assert (printed["schema"], printed["source"]) == ("meshkit.report/1", "plan")
    assert [(a["axis"], a["nvlink"], a["infiniband"]) for a in printed["mesh"]] == [
        ("data", 1, 2), ("fsdp", 4, 1), ("tensor", 2, 1),
    ]  # fmt: skip
    assert all(row["axes"] for row in printed["communication"])
    assert {row["link"] for row in printed["communication"] if row["axes"] == ["tensor"]} == {"nvlink"}
    assert printed["step"]["mfu"] > 0
    check_invariants(Report.model_validate(printed))
    assert 0 < printed["failures"]["goodput"] < 1
    page = (tmp_path / "report.html").read_text()
    assert "Goodput under failures" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.deviceless
def test_require_fit_is_3_when_it_does_not_fit(capsys):
    """Two weights of 65536 x 262144 x 4 bytes on each GPU, 128 GiB, are more than an H100 has."""
    sizes = ["--set", "model.embed=65536", "--set", "model.mlp=262144", "--set", "rules.preset='data'"]
    where = ["--set", "cluster=dgx_h100", "--set", "mesh.fsdp=", "--set", "mesh.data=8"]
    assert main(["plan", PERCEPTRON, *sizes, *where, "--require-fit", "--no-remedies"]) == 3
    captured = capsys.readouterr()
    assert "does not fit" in captured.out
    assert "--require-fit" in captured.err


def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} -m meshkit schema report | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


NO_SPACE = "standard output or a file cannot be written or read: No space left on device"
ENVIRONMENTS = {
    "closed output": ("schema report >&-", 2, "standard output is closed"),
    "closed output, nothing said": ("schema report >&- 2>&-", 2, ""),
    "closed error": ("explain mlp 2>&-", 2, "standard error is closed"),
    "full output": ("schema report > /dev/full", 4, NO_SPACE),
    "full output of a table": ("explain mlp > /dev/full", 4, NO_SPACE),
    "full output of the help": ("--help > /dev/full", 4, NO_SPACE),
    "full error": ("explain nowhere 2> /dev/full", 2, ""),
    "full error of wrong usage": ("plan --nowhere 2> /dev/full", 2, ""),
    "no bytes for a file": ("ulimit -f 0; new --out new.toml", 2, "new.toml cannot be written: File too large"),
    "a name of other bytes": ("explain $'caf\\xe9.toml' --json", 2, "is not UTF-8 text, but reports contain it"),
    "little virtual memory": ("ulimit -v 4000000; schema report > /dev/null", 0, "ulimit -v allows 3.8 GiB"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_what_the_environment_lacks_is_a_sentence_and_no_bug(words, code, said, tmp_path):
    before, _, words = words.rpartition("; ")
    shutil.copy(ROOT / "configs/experiments/mlp.toml", os.fsencode(tmp_path) + b"/caf\xe9.toml")
    command = f"{before or ':'}; {sys.executable} -P -m meshkit {words}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=environment)
    found = done.stdout + done.stderr
    assert (done.returncode, "Traceback" in found) == (code, False), found
    assert said in found


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize(
    "text",
    [
        f'a = "{ESCAPES}"',
        f"# {ESCAPES}",
        r'"\u001b[2J" = 1',
        r'[mesh]' + "\n" + r'"\u001b]0;owned\u0007\u009b\u202e" = 2',
        r'cluster = "\u001b[2J"',
        r'cluster = "dgx_h100"' + "\n" + r'[model]' + "\n" + r'class = "\u001b[2J:\u009bx"',
        r'cluster = "cpu"' + "\n" + r'[train]' + "\n" + r'"a\u001b" = { "\u009b" = 1 }',
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["explain", "plan", "train", "topo", "bench"])
def test_no_terminal_escape_of_a_file_reaches_the_terminal(verb, text, tmp_path, capsys):
    file = tmp_path / "a\x1b[2Jb.toml"
    file.write_text(text)
    arguments = ["--check"] if verb == "topo" else ["--out", str(tmp_path / "\x1bout")] if verb != "explain" else []
    assert main([verb, *arguments, str(file)]) == 2
    shown = capsys.readouterr()
    assert "\\x1b" in shown.err
    assert not set(shown.out + shown.err) & set("\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("make", [str, Text])
def test_a_name_of_megabytes_is_cut_where_it_would_be_wrapped(make, capsys):
    """Wrapping and colouring such a line takes quadratic time: a minute for four mebibytes."""
    table = Table()
    table.add_row(make("a" * 2**22))
    for shown in (make("[" * 2**22), table):
        console.stdout().print(shown)
    assert "4,186,112" in capsys.readouterr().out


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
@pytest.mark.parametrize(
    ("verb", "name"),
    [
        (["explain", "{}"], "e.toml"),
        (["topo", "--xml", "{}"], "t.xml"),
        (["compare", "{}", "{}"], "report.json"),
        (["compare", "{parent}", "{parent}"], "report.json"),
        (["profile", "{parent}"], "trace/capture-p0.json"),
    ],
    ids=["experiment", "topology", "report", "folder", "capture"],
)
def test_what_is_no_file_is_2_at_once(verb, name, make, tmp_path, capsys):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    assert main([word.format(path, parent=tmp_path) for word in verb]) == 2
    assert "not a regular file" in capsys.readouterr().err


def test_runs_with_odd_files_are_2_and_no_traceback(tmp_path, capsys):
    report = tmp_path / "report.json"
    report.write_text('{"schema": "meshkit.report/1", "step": {"time_s": 1e999}}')
    assert main(["compare", str(tmp_path), str(tmp_path), "--fail-if", "time_s>1e999"]) == 2
    (tmp_path / "checkpoints" / "\N{SUPERSCRIPT TWO}").mkdir(parents=True)
    assert main(["checkpoint", "list", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
