"""Check that every reader takes linear time, with 1, 2 and 4 MiB of input that is hard for searches and parsers."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attack.harness import Attack, Broken, Campaign, Outcome, captured

SIZES = (2**20, 2**21, 2**22)
_MOST_GROWTH, _NO_TIME_S = 6.0, 1.0  # The most growth at four times the size; times below a second are noise.
_ROOT = Path(__file__).parents[2]
_GOOD = (_ROOT / "configs" / "experiments" / "llama_debug_cpu.toml").read_text

# Pieces that are repeated until the size is reached; the reader adds what comes before and after them.
_TEXT = ("a", "\\", '"', "'", "[", "{", "(", "\n", " ", "\t", "#", ".", "a.", "a=1\n", "[a]\n", "é", "\x1b[", "\r", ":")
_SECRETS = ("://", "://a:", "a://b:c@", "token=", "a_key='", 'token: "\\', "A_TOKEN", "x_", "=", "s3cr3t-value", "\\'")
_XML = ("<pci>", '<pci busid="0000:00:00.0"/>', "<!--", "-->", "&amp;", " ", 'a="b" ', "\n", "a", "<gpu/>", "]]>")
_MATRIX = (
    "GPU0\t",
    "NV18\t",
    " ",
    "\t",
    "\n",
    "X ",
    "GPU0 X\n",
    "NIC0: mlx5_0\n",
    "\x1b[4m",
    "0-",
    "1:",
    "0-1,",
    "Device 0: a",
)
_WIRE = (
    b"\x0a\x00", b"\xff", b"\x80", b"\x0a\x02\x12\x00", b"\x0a\x04\x1a\x02\x22\x00", b"\x12\x01a", b"\x22\x01a",
    b"\x0a\x08\x22\x06\x08\x01\x12\x02\x12\x00",
)  # fmt: skip
_IN_LINE = (b"\x22\x00", b"\x22\x02\x08\x01", b"\x22\x06\x08\x01\x22\x02\x08\x01", b"\x22\x04\x22\x02\x08\x01")


Form = Callable[[int], Any]  # From a size to an input of about that size.
# A function from an input to a function that reads it (only the latter is timed), and the inputs by name.
Reader = tuple[Callable[[Any], Callable[[], object]], dict[str, Form]]


def _of(piece: Any, around: Callable[[Any], Any] = lambda x: x, room: int = 0) -> Form:
    """Return a form that repeats a piece, with text around it; `room` is the size of that text."""
    return lambda size: around(piece * ((size - room) // len(piece)))


def _in_file(file: Path, read: Callable[[], object]) -> Callable[[Any], Callable[[], object]]:
    """Return a function that writes the input to a file and returns the reader of that file."""

    def prepare(content: str | bytes) -> Callable[[], object]:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return read

    return prepare


def _cli(*words: str) -> None:
    code, text = captured(list(words))
    if code == 1 or "Traceback (most recent call last)" in text:
        raise Broken(f"a traceback: {text[-600:]}")


def _experiment(folder: Path) -> Reader:
    file, good = folder / "e.toml", _GOOD()
    placed = {
        "at the end": lambda x: f"{good}\n{x}",
        "in a string": lambda x: good.replace('preset = "', 'preset = "' + x, 1),
        "in a value": lambda x: f"{good}\n[optimizer]\nlearning_rate = {x}",
    }
    forms = {f"{p!r} {where}": _of(p, around, 4096) for where, around in placed.items() for p in _TEXT}

    def overrides(size: int) -> str:
        lines = (f'[[rules.override]]\npath = "**/a{i}/*"\nspec = ["fsdp"]\n' for i in range(size // 64))
        return good + "\n" + "".join(lines)[: size - 8192].rsplit("[[", 1)[0]

    return _in_file(file, lambda: _cli("explain", "--rules", str(file))), {**forms, "overrides": overrides}


def _rules(folder: Path) -> Reader:
    from meshkit.config.rules import path_matches

    path = "layers/" + "a/" * 30 + "kernel"
    pieces = ("**/a*", "**", "**/", "*a", "*", "a**", "/**", "a")
    return lambda rule: lambda: path_matches(rule, path), {piece: _of(piece) for piece in pieces}


def _topology(folder: Path) -> Reader:
    file = folder / "t.xml"
    placed = {
        "inside": lambda x: f'<system version="1"><cpu numaid="0">{x}</cpu></system>',
        "in a tag": lambda x: f"<system {x}/>",
    }
    forms = {f"{p!r} {where}": _of(p, around, 4096) for where, around in placed.items() for p in _XML}
    return _in_file(file, lambda: _cli("topo", "--xml", str(file))), forms


def _matrix(folder: Path) -> Reader:
    file = folder / "m.txt"
    good = (_ROOT / "tests/data/topo/text/ml-engineering_perf_topo.txt").read_text()
    placed = {"": lambda x: x, " behind a matrix": lambda x: good + x}
    forms = {f"{p!r}{where}": _of(p, around, 8192) for where, around in placed.items() for p in _MATRIX}
    return _in_file(file, lambda: _cli("topo", "--matrix", str(file))), forms


def _report(folder: Path) -> Reader:
    place, file = folder / "report", folder / "r.json"
    _cli("profile", str(_ROOT / "tests/data/synthetic_2gpu_3step.xplane.pb"), "--out", str(place))
    good = json.loads((place / "report.json").read_text())
    rows = good["communication"]

    def with_(key: str, make: Callable[[int], Any]) -> Form:
        return lambda size: json.dumps(good | {key: make(size)})

    forms = {repr(p): _of(p) for p in ("[", "{", '"', " ", "1", '{"a":', "[1,")} | {
        "a long warning": with_("warnings", lambda n: [{"code": "x", "message": "a " * (n // 2)}]),
        "many warnings": with_("warnings", lambda n: [{"code": "x", "message": "m"}] * (n // 32)),
        "many rows": with_("communication", lambda n: rows * (n // len(json.dumps(rows)))),
        "a long name": with_("communication", lambda n: [{**rows[0], "collective": "a-" * (n // 2)}, *rows[1:]]),
    }
    return _in_file(file, lambda: _cli("compare", str(place / "report.json"), str(file))), forms


def _metrics(folder: Path) -> Reader:
    from meshkit.report.measured import read_history
    from meshkit.verbs.launch.local import last_step

    line = '{{"step": {}, "loss": 1.5, "step_time_s": 0.1}}\n'
    forms = {repr(p): _of(p) for p in ("[", "{", '{"step":', "1", "\n", '"', "\\", "{}\n")} | {
        "steps": lambda size: "".join(line.format(i) for i in range(size // 48)),
        "one step": lambda size: line.format(1) * (size // 48),
    }
    return _in_file(folder / "metrics.jsonl", lambda: (read_history(folder), last_step(folder))), forms


def _varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _varint(value >> 7) if value > 127 else bytes([value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _trace(folder: Path) -> Reader:
    file = folder / "x.xplane.pb"
    names = _field(2, b"/device:GPU:0")
    line = _field(2, b"Stream #1")
    kinds = {
        "": lambda x: x,
        " in a plane": lambda x: _field(1, names + x),
        " in a line": lambda x: _field(1, names + _field(3, line + x)),
        " in an event": lambda x: _field(1, names + _field(3, line + _field(4, x))),
        " in a name": lambda x: _field(1, names + _field(4, _field(2, _field(2, x)))),
        " as a message": lambda x: _field(2, x),
    }
    pieces = {" in a line": (*_IN_LINE, b"\xff"), " as a message": (b"1 dropped ", b"1", b"dropped", b" ", b"1 a")}
    forms = {f"{p!r}{where}": _of(p, around) for where, around in kinds.items() for p in pieces.get(where, _WIRE)}
    return _in_file(file, lambda: _cli("profile", str(file))), forms


def _programs(folder: Path) -> Reader:
    from meshkit.config.mesh import Placement
    from meshkit.errors import MeshkitError
    from meshkit.hlo.instructions import read_instructions
    from meshkit.hlo.module import Module, read_program
    from tests.hlo_text import serialized_hlo

    place = Placement.from_shape(("x",), (8,))
    module = "HloModule m\n\nENTRY %e (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n{}\n}}\n"
    root = '  ROOT %r = f32[8] custom-call(%x), custom_call_target="{}", metadata={{op_name="{}"}}, backend_config="{}"'

    def prepare(text: str) -> Callable[[], object]:
        serialized = serialized_hlo(text)

        def read() -> None:
            with contextlib.suppress(MeshkitError):
                loaded = Module(serialized)
                read_program(loaded, place)
                read_instructions(loaded)

        return read

    def many(size: int) -> str:
        count = size // 128  # The size of a line in the serialized message.
        lines = [f"  %a{i} = f32[8] add(%{f'a{i - 1}' if i else 'x'}, %x)" for i in range(count)]
        return module.format("\n".join([*lines, f"  ROOT %r = f32[8] negate(%a{count - 1})"]))

    names = ("a", "a/", "jit(call)/", "call_exported/", "/", "(", "a_1/", "metadata={", "}", "[1,", ", ", " = ")
    calls = (r"\"lhs_contracting_dimensions\":", r"\"intermediate_tensor_shape\": {", r"{\"a\":", "[")
    placed = {
        "in a name": (names, lambda x: module.format(root.format("t", x, ""))),
        "in a configuration": (names, lambda x: module.format(root.format("__cublas$gemm", "a/b", x))),
        "in a call": (calls, lambda x: module.format(root.format("__cudnn$fmhaSoftmax", "a", x))),
    }
    forms = {f"{p!r} {where}": _of(p, around) for where, (pieces, around) in placed.items() for p in pieces}
    return prepare, {**forms, "instructions": many}


def _safetensors(folder: Path) -> Reader:
    from meshkit.errors import MeshkitError
    from meshkit.weights.files import open_file

    file = folder / "model.safetensors"
    one = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}

    def prepare(header: str) -> Callable[[], object]:
        file.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode())
        return read

    def read() -> None:
        with contextlib.suppress(MeshkitError):
            open_file(file)

    return prepare, {repr(p): _of(p) for p in ("[", "{", '{"a":', '"', " ", "1", "\\")} | {
        "tensors": lambda size: json.dumps({f"t{i}": one for i in range(size // 64)}),
        "a name": _of("a", lambda x: '{"' + x + '": 1}'),
        "metadata": _of("b", lambda x: '{"__metadata__": {"a": "' + x + '"}}'),
    }


def _redaction(folder: Path) -> Reader:
    from meshkit.redaction import redact

    environment = {"A_TOKEN": "s3cr3t-value", "B_KEY": "a" * 6, "URL": "http://u:aaaa:bbbb@h"}
    return lambda text: lambda: redact(text, environment), {repr(p): _of(p) for p in (*_SECRETS, *_TEXT)}


def _console(folder: Path) -> Reader:
    from rich.text import Text

    from meshkit import console

    def prepare(text: str) -> Callable[[], object]:
        def say() -> None:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                console.say(text)
                console.stdout().print(Text(text))

        return say

    return prepare, {repr(p): _of(p) for p in (*_TEXT, "[red]", "\u202e", "a b ", "é ")}


def _logs(folder: Path) -> Reader:
    from meshkit.verbs.launch.local import Follower, last_words

    file = folder / "rank0.log"
    pieces = (*_TEXT, "\x1b[0;", "Traceback (most recent call last)\n", "[Gloo] Rank\n", "\x1b[0m", "a\n")
    read = lambda: (Follower(file).new_lines(last=True), last_words(file, 20))
    return _in_file(file, read), {repr(p): _of(p) for p in pieces}


READERS = {
    "an experiment's TOML": _experiment,
    "a rule's path": _rules,
    "NCCL's topology XML": _topology,
    "`nvidia-smi topo -m`": _matrix,
    "report.json": _report,
    "metrics.jsonl": _metrics,
    "a trace": _trace,
    "a program's HLO": _programs,
    "a safetensors header": _safetensors,
    "redaction of what is printed": _redaction,
    "the console": _console,
    "a process's log": _logs,
}


def _prepare(folder: Path) -> Callable[[int], Attack]:
    """Return the attacks, one for each reader: all its shapes in all sizes."""

    def make(number: int) -> Attack:
        name, reader = list(READERS.items())[number]
        place = folder / str(number)

        def run() -> str:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            slowest = dict.fromkeys(SIZES, 0.0)
            bad, count, only = [], 0, os.environ.get("ATTACK_SHAPE")
            prepare, forms = reader(place)
            for shape, form in forms.items():
                if only and only not in shape:
                    continue
                taken = [_seconds(prepare(form(size))) for size in SIZES]
                count += 1
                if _grows(taken):  # The machine may have been busy, so time again.
                    taken = [min(t, _seconds(prepare(form(size)))) for t, size in zip(taken, SIZES)]
                if _grows(taken):
                    bad.append(f"{shape}: {', '.join(f'{s:.2f}' for s in taken)} s")
                slowest = {size: max(slowest[size], s) for size, s in zip(SIZES, taken)}
            if bad:
                raise Broken("; ".join(bad))
            return json.dumps([count, *slowest.values()])

        return Attack(name, run)

    return make


def _grows(taken: Sequence[float]) -> bool:
    return taken[-1] > max(_MOST_GROWTH * taken[0], _NO_TIME_S)


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    taken = time.process_time() - began
    gc.collect()
    # A command reads only one file, so memory that an earlier one left should not count.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return taken


CAMPAIGN = Campaign(len(READERS), _prepare, limit_s=600.0)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the seconds of readers by size as Markdown."""
    lines = ["", "| reader | shapes | 1 MiB | 2 MiB | 4 MiB |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        count, *seconds = json.loads(outcome.said) if outcome.held else ["-", *["not linear"] * 3]
        cells = [f"{s:.2f} s" if isinstance(s, float) else s for s in seconds]
        lines.append(f"| {outcome.name} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
