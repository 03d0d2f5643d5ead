"""Read published training runs as rows of any CSV with the columns of rows.csv.

A Row has a run's cells; `trainer_of` says what ran, and `measured_step_s` gives its measured step. Nothing here raises
on the contents of a row: a number that cannot be read is blank.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshkit.errors import ConfigError

_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")
_MOST_CELL = 10_000  # Characters; longer cells are cut.
# Words of a source that name a trainer: JAX trainers with their name in the `framework` column, then others.
_JAX = {
    "maxtext": "maxtext",
    "axlearn": "axlearn",
    "paxml": "paxml",
    "pax": "paxml",
    "praxis": "paxml",
    "levanter": "levanter",
    "haliax": "levanter",
    "t5x": "t5x",
    "easylm": "easylm",
    "tunix": "tunix",
    "equinox": "equinox",
    "flax": "flax",
    "jax": "jax",
}
_OTHERS = ("megatron", "nemo", "torchtitan", "pytorch", "torch", "deepspeed", "mosaicml", "llm-foundry", "composer",
           "fms-fsdp", "internevo", "simumax", "kempnerforge", "vtrain", "tensorflow", "mindspore", "paddle",
           "neuronx", "colossalai", "nanotron", "fsdp2", "hugging face", "transformers")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One published run; None or "" stands for what its source does not state."""

    id: str
    """The id, which is unique in its file."""
    text: Mapping[str, str]
    """Every column as it is written."""
    numbers: Mapping[str, float]
    """Every column that is a number."""

    def count(self, name: str) -> int | None:
        """Return a column as a positive whole number; None if it is none."""
        value = self.numbers.get(name)
        return int(value) if value is not None and value >= 1 and value.is_integer() else None

    def say(self, name: str) -> str:
        """Return a column as text; "" if it is blank."""
        return self.text.get(name, "")

    @property
    def group(self) -> tuple[str, ...]:
        """The page, model and precision: runs that share them are correlated and weigh as one."""
        page = self.say("source_ref").partition(" ")[0] or self.say("source") or self.id
        return (page, self.say("model"), self.say("precision").partition(" ")[0])

    @property
    def publisher(self) -> str:
        """The publisher of the run: the first word of its page, or of its source."""
        return re.split(r"[/@: ]", self.say("source_ref") or self.say("source"))[0]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; missing and repeated ids get a number.

    Raises:
        ConfigError: the file cannot be read, or its header has no `id`.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            table = list(reader) if "id" in columns else []
    except (OSError, csv.Error) as error:
        raise ConfigError(f"'{path}' cannot be read as CSV: {error}.", hint="--rows FILE.csv") from None
    if "id" not in columns:
        raise ConfigError(f"'{path}' has no column 'id'.", hint="a header like that of benchmarks/published/rows.csv")
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
    """Return the row of a line's cells; `name` replaces a missing id."""
    text = {k.strip(): v.strip()[:_MOST_CELL] for k, v in cells.items() if isinstance(k, str) and isinstance(v, str)}
    numbers = {key: value for key, cell in text.items() if (value := _number(cell)) is not None}
    return Row(text.get("id") or name, text, numbers)


def _number(cell: str) -> float | None:
    if not _NUMBER.fullmatch(cell):
        return None
    value = float(cell.replace(",", ""))
    return value if math.isfinite(value) else None


def trainer_of(row: Row) -> tuple[str, str]:
    """Return the JAX trainer that ran a row, or "" and the reason why the row is not planned.

    The column `framework` names the trainer; if it is blank, the source or else the notes do. Nothing is guessed if a
    text names a JAX trainer and another one.
    """
    stated = row.say("framework").lower()
    if stated:
        found = _named(stated, _JAX)
        return (_JAX[found], "") if found else ("", f"another framework: {stated[:60]}")
    for cell in (f"{row.say('source')} {row.say('source_ref')}", row.say("notes")):
        jax, other = _named(cell.lower(), _JAX), _named(cell.lower(), _OTHERS)
        if jax and not other:
            return _JAX[jax], ""
        if other and not jax:
            return "", f"another framework: its source names {other}"
        if jax and other:
            return "", f"its source names {jax} and {other}: the column framework is missing"
    return "", "not known to be JAX: the column framework is missing, and no source names one"


def _named(text: str, words) -> str:
    return next((word for word in words if re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", text)), "")


def measured_step_s(
    row: Row, model_flops: float | None = None, peak_flops: float | None = None
) -> tuple[float | None, str]:
    """Return the seconds of a measured step, and how they are derived if the row does not state them.

    Args:
        row: a row with `step_time_s`, or else tokens/s, or else FLOP/s or MFU.
        model_flops: the FLOP of a step over all GPUs, with the whole square of attention (`step.model_flops` of a
            report).
        peak_flops: the peak of one GPU to which the MFU refers.
    """
    found, how = _derived(row, model_flops, peak_flops)
    return (found, how) if found and math.isfinite(found) else (None, "no measured time")


def _derived(row: Row, model_flops: float | None, peak_flops: float | None) -> tuple[float | None, str]:
    numbers, gpus = row.numbers, row.count("n_gpus")
    if (direct := numbers.get("step_time_s", 0)) > 0:
        return direct, ""
    batch, length = row.count("global_batch_seqs"), row.count("seq_len")
    rate = numbers.get("tokens_per_s_per_gpu", 0)
    if rate > 0 and gpus and batch and length:
        return batch * length / (rate * gpus), "measured time derived from tokens/s"
    teraflops = numbers.get("tflops_per_gpu", 0)
    if teraflops > 0 and gpus and model_flops:
        return model_flops / (teraflops * 1e12 * gpus), "measured time derived from TFLOP/s, by plan's count of FLOP"
    share = numbers.get("mfu_pct", 0) / 100
    if 0 < share < 1 and gpus and model_flops and peak_flops:
        return model_flops / (share * peak_flops * gpus), "measured time derived from MFU, by plan's count of FLOP"
    return None, ""
