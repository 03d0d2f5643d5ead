"""What XLA's buffer assignment holds at its peak, by what made it.

The compiler process asks XLA to write its live ranges down (`xla_dump_to`); there the peak is a list of buffers:

    Live ranges at 92 (peak):
    param.2{2}: 1572864 bytes (cumulative: 5767168 bytes)

The module says which model code made each of them (`op_name`), and autodiff marks that: what the forward pass made is
below `jvp(...)`, what the backward pass made below `transpose(jvp(...))`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_PEAK = re.compile(r"^\s*Live ranges at \d+ \(peak\):")
_BUFFER = re.compile(r"^\s*(\S+?)\{([\d,]*)\}: (\d+) bytes")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LOOP = re.compile(r"\bwhile\(.*body=%?([\w.\-]+)")
FORWARD, BACKWARD, CARRIED, ARGUMENT, OTHER = "forward", "backward", "carried", "argument", "other"
KINDS: tuple[str, ...] = (FORWARD, BACKWARD, CARRIED, ARGUMENT, OTHER)


def live_bytes(folder: Path, module_text: str) -> dict[str, int] | None:
    """Bytes at the peak by kind of KINDS, from a folder that XLA dumped into; None where it left no live ranges.

    `forward`: made by the forward pass: what it keeps for the backward pass, or works on. `backward`: made by the
    backward pass, recomputed activations among them. `carried`: what a loop of the backward pass carries along, as
    sums of gradients. `argument`: of the program. `other`: no code of the model made it.

    Args:
        folder: of the dump.
        module_text: the scheduled module, printed.
    """
    files = sorted(folder.glob("*live-range.txt"))
    if not files:
        return None
    kinds = _kinds(module_text)
    found = dict.fromkeys(KINDS, 0)
    for name, size in _at_peak(files[-1]):
        found[kinds.get(name, OTHER)] += size
    return found


def _at_peak(file: Path) -> Iterator[tuple[str, int]]:
    """Instruction and bytes of each buffer that is alive at the peak."""
    inside = False
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if inside:
                buffer = _BUFFER.match(line)
                if not buffer:
                    return
                yield buffer[1], int(buffer[3])
            elif _PEAK.match(line):
                inside = True


def _kinds(text: str) -> dict[str, str]:
    """Instruction -> kind; a parameter of a loop's body has that of the loop."""
    kinds: dict[str, str] = {}
    computation, entry = "", False
    parameters: dict[str, list[str]] = {}
    loops: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line[0].isspace():
            header = _COMPUTATION.match(line)
            computation, entry = (header[2], bool(header[1])) if header else ("", False)
            continue
        named = _INSTRUCTION.match(line)
        if not named:
            continue
        op = _OP_NAME.search(line)
        kind = _of_path(op[1] if op else "")
        if " parameter(" in line:
            parameters.setdefault(computation, []).append(named[1])
            kind = ARGUMENT if entry else OTHER
        if loop := _LOOP.search(line):
            loops[loop[1]] = kind
        kinds[named[1]] = kind
    for body, kind in loops.items():
        for name in parameters.get(body, ()):
            kinds[name] = CARRIED if kind == BACKWARD else kind
    return kinds


def _of_path(path: str) -> str:
    if "transpose(" in path:
        return BACKWARD
    return FORWARD if "jvp(" in path else OTHER
