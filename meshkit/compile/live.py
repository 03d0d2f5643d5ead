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

from meshkit.hlo.proto import ModuleAttributes

_PEAK = re.compile(r"^\s*Live ranges at \d+ \(peak\):")
_BUFFER = re.compile(r"^\s*(\S+?)\{([\d,]*)\}: (\d+) bytes")
FORWARD, BACKWARD, CARRIED, ARGUMENT, OTHER = "forward", "backward", "carried", "argument", "other"
KINDS: tuple[str, ...] = (FORWARD, BACKWARD, CARRIED, ARGUMENT, OTHER)


def live_bytes(folder: Path, module: ModuleAttributes) -> dict[str, int] | None:
    """Bytes at the peak by kind of KINDS, from a folder that XLA dumped into; None where it left no live ranges.

    `forward`: made by the forward pass: what it keeps for the backward pass, or works on. `backward`: made by the
    backward pass, recomputed activations among them. `carried`: what a loop of the backward pass carries along, as
    sums of gradients. `argument`: of the program. `other`: no code of the model made it.

    Args:
        folder: of the dump.
        module: that was compiled.
    """
    files = sorted(folder.glob("*live-range.txt"))
    if not files:
        return None
    kinds = _kinds(module)
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


def _kinds(module: ModuleAttributes) -> dict[str, str]:
    """Instruction -> kind; a parameter of a loop's body has that of the loop."""
    kinds: dict[str, str] = {}
    parameters: dict[str, list[str]] = {}
    loops: dict[str, str] = {}
    for computation in module.computations:
        for at in map(module.of, module.order(computation)):
            kind = _of_path(at.source)
            if at.opcode == "parameter":
                parameters.setdefault(computation, []).append(at.name)
                kind = ARGUMENT if computation == module.entry else OTHER
            if at.opcode == "while":
                loops[at.called[0]] = kind
            kinds[at.name] = kind
    for body, kind in loops.items():
        for name in parameters.get(body, ()):
            kinds[name] = CARRIED if kind == BACKWARD else kind
    return kinds


def _of_path(path: str) -> str:
    if "transpose(" in path:
        return BACKWARD
    return FORWARD if "jvp(" in path else OTHER
