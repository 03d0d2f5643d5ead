"""Published training runs as rows: any CSV with the columns of the shared data. First in the flow of the replay.

Nothing here raises on what a row holds: a number that is not one is blank, and what is missing is said in a note later.
"""

from __future__ import annotations

import csv
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshkit.errors import ConfigError

_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")
_DERIVED_STEP = re.compile(r"DERIVED step\D*?([\d.]+)\s*s\b")
_BYTES = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}
_PEAK = re.compile(r"(peak alloc|peak memory|mem/GPU)\D{0,4}([\d.]+)\s*(GiB|GB|MiB|MB)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One published run; None or "" is what its source does not say.

    Attributes:
        id, source, notes: as written; `source` holds the reference to the page too.
        text: every other column that is no number.
        numbers: every column that is one.
        correction: what was changed of it and why (corrections.toml); "" for nothing.
    """

    id: str
    source: str
    notes: str
    text: Mapping[str, str]
    numbers: Mapping[str, float]
    correction: str = ""

    def count(self, name: str) -> int | None:
        """A column as a positive whole number."""
        value = self.numbers.get(name)
        return int(value) if value is not None and value >= 1 and float(value).is_integer() else None

    def say(self, name: str) -> str:
        """A column of text, "" where it is blank."""
        return self.text.get(name, "")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; ids that are missing or come twice get a number.

    Raises:
        ConfigError: no such file, or one without a header that has `id`.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.DictReader(file)
            table = list(reader)
            columns = reader.fieldnames or []
    except (OSError, csv.Error) as error:
        raise ConfigError(f"'{path}' cannot be read as CSV: {error}.", hint="--rows FILE.csv") from None
    if "id" not in columns:
        raise ConfigError(
            f"'{path}' has no column 'id'.", at=str(path), hint="a header like that of published_runs.csv"
        )
    rows, seen = [], set()
    for index, cells in enumerate(table):
        row = parse_row(cells, f"row-{index + 1}")
        name, again = row.id, 2
        while name in seen:
            name, again = f"{row.id}#{again}", again + 1
        seen.add(name)
        rows.append(replace(row, id=name))
    return rows


def parse_row(cells: Mapping[str | None, object], name: str) -> Row:
    """A row of strings; `name` stands for an id that is missing."""
    text = {k: v.strip() for k, v in cells.items() if isinstance(k, str) and isinstance(v, str)}
    source = " ".join(filter(None, (text.get("source", ""), text.get("source_ref", ""))))
    stated, why = text, []
    for known in _corrections():
        if re.search(known["source"], source) and all(stated.get(k) == v for k, v in known["when"].items()):
            text = {**text, **known["cells"]}
            why.append(known["why"])
    numbers = {key: value for key, cell in text.items() if (value := _number(cell)) is not None}
    return Row(text.get("id") or name, source, text.get("notes", ""), text, numbers, "; ".join(why))


@functools.cache
def _corrections() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("corrections.toml").read_text(encoding="utf-8"))["correction"]


def _number(cell: str) -> float | None:
    if not _NUMBER.fullmatch(cell):
        return None
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def measured_step_time_s(row: Row, model_flops: float | None = None) -> tuple[float | None, str]:
    """Seconds of a measured step and what they are derived from.

    The step time itself; else tokens/s; else the step that a note derives; else TFLOP/s, of the FLOP that its source
    counts (`step_tflop_per_gpu`, of corrections.toml) or of the model's in a step over all GPUs, the whole attention
    square counted as Meta does.
    """
    numbers, gpus = row.numbers, row.count("n_gpus")
    if (direct := numbers.get("step_time_s", 0)) > 0:
        return direct, ""
    batch, length = row.count("global_batch_seqs"), row.count("seq_len")
    rate = numbers.get("tokens_per_s_per_gpu", 0)
    if rate > 0 and gpus and batch and length:
        return batch * length / (rate * gpus), "measured time derived from tokens/s"
    if found := _DERIVED_STEP.search(row.notes):
        return float(found[1].rstrip(".")), "measured time as the note derives it"
    teraflops = numbers.get("tflops_per_gpu", 0)
    if teraflops > 0 and (counted := numbers.get("step_tflop_per_gpu", 0)) > 0:
        return counted / teraflops, "measured time derived from TFLOP/s as its source counted them"
    if teraflops > 0 and gpus and model_flops:
        return model_flops / (teraflops * 1e12 * gpus), "measured time derived from TFLOP/s, formula assumed"
    return None, "no measured time"


def measured_peak_bytes(notes: str, source: str = "") -> tuple[int, str, str] | None:
    """(bytes, `allocated` or `reserved`, the words) of a peak of memory that a note states.

    torchtitan prints the reserved peak of the caching allocator; SimuMax and others that say `alloc` the allocated one.
    A bare figure per GPU is taken as allocated. What KempnerForge prints as GB are GiB (its metrics/memory.py).
    """
    found = _PEAK.search(notes)
    if found is None:
        return None
    unit = "gib" if found[3].lower() == "gb" and "kempner" in source.lower() else found[3].lower()
    size = int(float(found[2].rstrip(".")) * _BYTES[unit])
    return size, "reserved" if found[1].lower() == "peak memory" else "allocated", found[0]
