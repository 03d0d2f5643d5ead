"""Test that the documentation's Python runs, commands parse, experiments load, and tables are complete.

A page marks its blocks like this:

- Every ```python block runs, and the blocks of a page run one after the other in one namespace. What a line
  `print(...)  # text` prints must be the text. `<!-- not run: why -->` above a block leaves it out, and
  `<!-- deviceless -->` says that it compiles for absent GPUs.
- Every `meshkit VERB ...` in a ```console block or in inline code must parse, and every `make TARGET` must exist.
- Every ```toml block must parse. One that has cluster, model, mesh and train is an experiment and must load.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

import meshkit as mk
from benchmarks import links
from meshkit.cli import app
from meshkit.config import catalog
from meshkit.config import sections as tables
from meshkit.report import schema as report_schema

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OPTIONS = "reference/options.md"  # `make docs` writes it.
PAGES = sorted({p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")} - {OPTIONS})
WHOLE_EXPERIMENT = {"cluster", "model", "mesh", "train"}
_BLOCK = re.compile(r"(?ms)(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$")
_EXPECTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)
_COMMAND = re.compile(r"`(meshkit [a-z][^`]*)`")


def read(page):
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page, language):
    return [(m["mark"] or "", m["text"]) for m in _BLOCK.finditer(read(page)) if m["language"] == language]


def python_pages():
    for page in PAGES:
        found = [(mark, text) for mark, text in blocks(page, "python") if not mark.startswith("not run")]
        if found:
            compiles = any(mark == "deviceless" for mark, _ in found)
            yield pytest.param([text for _, text in found], id=page, marks=[pytest.mark.deviceless] * compiles)


def command_lines(page):
    """Yield every shown command: lines of console blocks (joined where they end with a backslash), and inline code."""
    for _, text in blocks(page, "console"):
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("$ meshkit "):
                yield line.removeprefix("$ ")
    prose = _BLOCK.sub("", read(page))
    yield from (m[1] for m in _COMMAND.finditer(prose))


def cells(page, heading):
    """Return the body rows of the first table below a heading, as lists of cells."""
    section = read(page).split(f"\n{heading}\n", 1)[1]
    table = re.search(r"^\|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", section, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].splitlines()]


@pytest.mark.parametrize("sources", list(python_pages()))
def test_python_of_a_page_runs_and_prints_what_it_shows(sources, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for source in sources:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "page", "exec"), namespace)
        expected = _EXPECTED.findall(source)
        if expected:
            assert printed.getvalue().splitlines() == expected


@pytest.mark.parametrize(("page", "line"), [(p, line) for p in PAGES for line in command_lines(p)])
def test_shown_commands_parse(page, line):
    group = typer.main.get_command(app)
    _, verb, *arguments = shlex.split(line, comments=True)
    context = group.make_context("meshkit", ["--help"], resilient_parsing=True)
    command = group.get_command(context, verb)
    assert command is not None, f"{page}: there is no verb '{verb}'"
    if arguments:  # Without any arguments, it is only the name of the verb.
        command.make_context(verb, arguments, parent=context)


def test_make_targets_exist():
    shown = {t for page in PAGES for t in re.findall(r"(?:`|\$ )make ([\w-]+)", read(page))}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert shown <= set(targets)


@pytest.mark.parametrize("page", PAGES)
def test_toml_parses_and_whole_experiments_load(page, tmp_path):
    known = set(tables.ExperimentTable.model_fields) | {"program"} | set(tables.ClusterTable.model_fields) | {"file"}
    for mark, text in blocks(page, "toml"):
        if mark.startswith("not run"):
            continue
        table = tomllib.loads(text)
        assert set(table) <= known, page
        file = tmp_path / "experiment.toml"
        file.write_text(text, encoding="utf-8")
        if table.keys() >= WHOLE_EXPERIMENT:
            assert mk.load_experiment(file).mesh.size
        elif not table.keys() & set(tables.ExperimentTable.model_fields) - {"name"}:
            assert mk.Cluster.load(file).num_gpus


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("## `[train]`", tables.TrainTable),
        ("## `[optimizer]`", tables.OptimizerTable),
        ("## `[data]`", tables.DataTable),
        ("## `[checkpoint]`", tables.CheckpointTable),
        ("## `[profile]`", tables.ProfileTable),
        ("## `[failures]`", tables.FailuresTable),
        ("## `[launch]`", tables.LaunchTable),
        ("## `[rules]`", tables.RulesTable),
        ("## `[local_sgd]`", tables.LocalSgdTable),
        ("## `[compression]`", tables.CompressionTable),
        ("## `[pipeline]`", tables.PipelineTable),
        ("## `[[lint.allow]]`", tables.AllowTable),
        ("## `cluster`", tables.ClusterTable),
    ],
)
def test_the_tables_of_the_experiment_file_have_every_key_with_its_default(heading, model):
    shown = {key.strip("`"): default for key, default, *_ in cells("guides/experiment-file.md", heading)}
    assert set(shown) == set(model.fields_by_key())
    for name, field in model.fields_by_key().items():
        default = None if field.is_required() else field.get_default()
        if default in (None, {}, []):
            assert not shown[name].startswith("`"), f"{name} has no default value"
        else:
            assert json.loads(shown[name].strip("`")) == default, name


@pytest.mark.parametrize(
    "part", [p for n, p in vars(report_schema).items() if n.endswith("Part") or n in ("Report", "Warning_")]
)
def test_the_report_page_or_the_schema_defines_every_key(part):
    """The docstring of a part is its description in the schema."""
    attributes = re.findall(r"^    (?:    )?([\w, ]+):", part.__doc__.partition("Attributes:")[2], re.MULTILINE)
    described = {name for names in attributes for name in names.split(", ")}
    described |= set(re.findall(r"`(\w+)`", read("concepts/report.md") + part.__doc__))
    assert {field.alias or n for n, field in part.model_fields.items()} <= described


def commands(command, words):
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{words} {name}")


def test_the_command_line_page_has_every_verb():
    verbs = re.findall(r"^### `meshkit (.*)`$", read("reference/cli.md"), re.MULTILINE)
    assert sorted(verbs) == sorted(typer.main.get_command(app).commands)


def test_the_page_of_options_that_make_docs_writes_has_every_option():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = re.search(rf"^\t\$\(PY\) (-m typer .*) --output docs/{OPTIONS}$", makefile, re.MULTILINE)[1].split()
    text = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sections = re.split(r"^#+ `(meshkit.*)`$", text, flags=re.MULTILINE)
    shown = dict(zip(sections[1::2], sections[2::2], strict=True))
    for name, command in commands(typer.main.get_command(app), "meshkit"):
        options = [option for p in command.params for option in p.opts if option.startswith("--")]
        assert [o for o in options if not re.search(rf"^\* `.*{o}\b", shown[name], re.MULTILINE)] == [], name


def test_the_page_of_public_names_has_all_of_them():
    shown = re.findall(r"^::: meshkit\.(\w+)$", read("reference/python.md"), re.MULTILINE)
    assert sorted(shown) == sorted(mk.__all__)


def test_the_numbers_page_repeats_the_catalog():
    for key, bf16, memory, nvlink, pcie in cells("concepts/numbers.md", "## What the catalog says"):
        gpu = catalog.gpu(key.strip("`"))
        assert float(bf16 if bf16 != "-" else "nan") == pytest.approx(
            gpu.peak_flops.get("bf16", float("nan")) / 1e12, abs=0.05, nan_ok=True
        )
        assert float(memory) == pytest.approx(gpu.memory_bytes_per_s / 1e9, abs=0.5)
        assert float(nvlink) == pytest.approx(gpu.nvlink_bytes_per_s / 1e9, abs=0.5)
        assert float(pcie) == pytest.approx(gpu.pcie_bytes_per_s / 1e9, abs=0.05)


def numbers(row):
    """Return the numbers of a table's row, each with its unit."""
    return [(float(n), unit) for n, unit in re.findall(r"([\d.]+) (\S+B/s|[GM]iB|[mu]?s)\b", " ".join(row))]


@pytest.mark.parametrize(
    ("heading", "rows"), [("What that costs", links.links), ("## What each parallelism moves", links.parallelisms)]
)
def test_the_tables_of_links_are_what_their_command_prints(heading, rows):
    text = read("concepts/links.md").split(f"\n{heading}", 1)[1].split("\n\n")
    table = next(part for part in text if part.startswith("| "))
    shown = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    for row, made in zip(shown, rows(), strict=True):
        assert row[0] == made[0]
        for (number, unit), (now, of) in zip(numbers(row), numbers(made), strict=True):
            assert unit == of
            assert number == pytest.approx(now, rel=0.05), "python -m benchmarks.links prints other numbers"


def test_a_question_is_answered_in_the_words_that_the_first_page_shows():
    rows = cells("index.md", "## Questions")
    assert len(rows) == 8
    for question, words in rows:
        title, page = re.fullmatch(r"\[(.*)\]\((.*)\)", question).groups()
        text = " ".join(read(page).split())
        assert text.startswith(f"# {title}") or page == "guides/use-in-your-flax-model.md"
        assert words in text, page
    minutes = re.search(r"([\d.]+) to that of a foreign model", (ROOT / "benchmarks" / "first_report.md").read_text())
    assert f"it takes {minutes[1]} minutes" in words


def test_an_idiom_of_flax_has_its_sentence_and_its_test():
    guide = " ".join(read("guides/use-in-your-flax-model.md").split())
    table = (ROOT / "tests" / "README.md").read_text(encoding="utf-8").split("| idiom |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        _, words, file = (cell.strip() for cell in row.strip("|").split("|"))
        assert words in guide or words.startswith("("), words
        assert (ROOT / file.strip("`")).is_file()


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted([*PAGES, OPTIONS])
