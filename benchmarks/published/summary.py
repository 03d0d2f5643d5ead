"""The tables and the picture of a replay: `python -m benchmarks.published.summary --rows FILE.csv --out DIR`.

Reads DIR/details.csv and writes summary.md, predicted.svg and memory.csv beside it. Last in the flow of the replay.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.published.frameworks import FRAMEWORKS
from benchmarks.published.plot import ASKED, draw
from benchmarks.published.replay import Prediction
from benchmarks.published.rows import Row, measured_peak_bytes, read_rows
from benchmarks.published.statistics import groups, median_error, trends, trivial_predictor
from meshkit.errors import MeshkitError

JAX = ("MaxText", "Paxml")
OLDER = Path(__file__).with_name("older_xla.csv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the tables and the picture; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.summary", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="the CSV that was replayed")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the replay")
    options = parser.parse_args(arguments)
    try:
        rows = {row.id: row for row in read_rows(options.rows)}
        found = [p for p in read_details(options.out / "details.csv") if p.id in rows]
    except (MeshkitError, OSError, ValueError) as error:
        print(f"summary: {error}", file=sys.stderr)
        return 2
    (options.out / "summary.md").write_text("\n".join(_summary(found, rows)), encoding="utf-8")
    (options.out / "predicted.svg").write_text(draw(found), encoding="utf-8")
    _write_memory(options.out / "memory.csv", rows.values())
    print(options.out / "summary.md")
    return 0


def read_details(path: Path) -> list[Prediction]:
    """The predictions of a details.csv.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    hints = get_type_hints(Prediction)
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    return [Prediction(**{f.name: _parse(row.get(f.name) or "", hints[f.name]) for f in fields(Prediction)})
            for row in table]  # fmt: skip


def _parse(cell: str, kind: Any) -> Any:
    if kind is str:
        return cell
    if kind is bool:
        return cell == "True"
    if not cell:
        return 0.0 if kind is float else None
    return int(float(cell)) if kind in (int, int | None) else float(cell)


def _summary(found: Sequence[Prediction], rows: Mapping[str, Row]) -> list[str]:
    predicted = [p for p in found if p.error is not None]
    trivial = trivial_predictor(found, rows)
    lines = [
        "# Published training runs, predicted without a GPU",
        "",
        _heading(len(predicted), len(found)),
        "",
        "![predicted and measured](predicted.svg)",
        "",
        *_by_handling(predicted, rows, trivial),
        *_of_their_time(predicted, rows),
        *_families(predicted, rows, trivial),
        *_asked(predicted, rows, trivial),
        *_worst(predicted),
        *_trends(predicted, rows),
        *_memory(found),
        *_unmatched(found),
        *_frameworks(),
    ]
    return [*lines, ""]


def _heading(predicted: int, total: int) -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "meshkit"))
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"{predicted} of {total} rows; {today}, {versions}. No number of the model is fitted to a row. Errors are "
        "medians over groups of correlated rows (one page, model and precision), each by the median of its rows. The "
        "trivial predictor is a constant MFU, the median of all other frameworks."
    )


def _families(predicted: Sequence[Prediction], rows: Mapping[str, Row], trivial: Mapping[str, float]) -> list[str]:
    columns = ("family", "precision", "configured", "rows", "groups", "median error", "median \\|error\\|",
               "trivial \\|error\\|", "inside bounds")  # fmt: skip
    lines = ["## By family", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    keys = sorted({(p.family, p.precision, not p.configured) for p in predicted})
    for family, precision, partly in keys:
        members = [p for p in predicted if (p.family, p.precision, not p.configured) == (family, precision, partly)]
        lines.append(f"| {family} | {precision} | {'partly' if partly else 'fully'} | {_row(members, rows, trivial)} |")
    return [*lines, f"| all | | | {_row(predicted, rows, trivial)} |", ""]


_HANDLING = {
    "none": "what `meshkit plan` of the row's file gives: the product's own",
    "adjusted": "compiled whole, then changed as FSDP in PyTorch does",
    "stage": "one pipeline stage of another framework",
}


def _by_handling(predicted: Sequence[Prediction], rows: Mapping[str, Row], trivial: Mapping[str, float]) -> list[str]:
    columns = ("handling", "configured", "rows", "groups", "median error", "median \\|error\\|", "trivial \\|error\\|",
               "inside bounds", "inside 80 %")  # fmt: skip
    lines = ["## By handling", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, words in _HANDLING.items():
        for partly in (False, True):
            members = [p for p in predicted if (p.handling, p.configured) == (name, not partly)]
            if members:
                inside = [p.interval_low_s <= p.measured_s <= p.interval_high_s for p in members
                          if p.interval_low_s and p.interval_high_s and p.measured_s]  # fmt: skip
                covered = f"{sum(inside)} of {len(inside)}" if inside else ""
                stated = "partly" if partly else "fully"
                lines.append(f"| `{name}`: {words} | {stated} | {_row(members, rows, trivial)} | {covered} |")
    return [*lines, ""]


def read_older(path: Path = OLDER) -> list[dict[str, str]]:
    """The rows of a file of benchmarks.older_xla.

    Raises:
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _of_their_time(predicted: Sequence[Prediction], rows: Mapping[str, Row]) -> list[str]:
    older = {row["id"]: float(row["older_s"]) for row in read_older()}
    columns = ("XLA", "rows", "groups", "median error", "median \\|error\\|", "worst row")
    about = (
        "Fully stated rows by the XLA of their images (older_xla.csv, `python -m benchmarks.older_xla`; profiled runs "
        "by a predicted profile). It is not what `meshkit plan` gives, which is the first line."
    )
    lines = ["## `none`, compiled by the XLA of their time", "", about, ""]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    members = [p for p in predicted if p.id in older and p.configured]
    if not members:
        return []
    then = [replace(p, predicted_s=older[p.id]) for p in members]
    for name, found in (("today's", members), ("of their time", then)):
        grouped, worst = groups(found, rows), max(found, key=lambda p: abs(p.error or 0.0))
        errors = (f"{_signed(grouped):+.1%}", _percent(median_error(grouped, lambda p: p.error)))
        cells = (name, len(found), len(grouped), *errors, f"{worst.id} {worst.error or 0.0:+.1%}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""]


def _signed(grouped: Mapping[tuple[str, ...], Sequence[Prediction]]) -> float:
    return statistics.median(statistics.median(p.error or 0.0 for p in group) for group in grouped.values())


def _row(members: Sequence[Prediction], rows: Mapping[str, Row], trivial: Mapping[str, float]) -> str:
    grouped = groups(members, rows)
    inside = [p.inside for p in members if p.inside is not None]
    ours, plain = median_error(grouped, lambda p: p.error), median_error(grouped, lambda p: trivial.get(p.id))
    cells = (len(members), len(grouped), f"{_signed(grouped):+.1%}", _percent(ours), _percent(plain))
    return " | ".join(map(str, (*cells, f"{sum(inside)} of {len(inside)}")))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _asked(predicted: Sequence[Prediction], rows: Mapping[str, Row], trivial: Mapping[str, float]) -> list[str]:
    jax = [p for p in predicted if p.family in JAX]
    others = other_configured(predicted)
    lines = ["## Asked and found", "", "| rows | asked | found | trivial |", "|---|---|---|---|"]
    for name, members, asked in (
        ("all", predicted, "half of the trivial predictor's"),
        ("all but experts", [p for p in predicted if "experts" not in p.family], "half of the trivial predictor's"),
        ("JAX", jax, "half of the trivial predictor's"),
        ("other frameworks, fully configured, bf16", others, f"{ASKED:.0%}"),
    ):
        grouped = groups(members, rows)
        ours, plain = median_error(grouped, lambda p: p.error), median_error(grouped, lambda p: trivial.get(p.id))
        lines.append(f"| {name} ({len(members)} rows, {len(grouped)} groups) | {asked} | {_percent(ours)} | "
                     f"{_percent(plain)} |")  # fmt: skip
    errors = sorted(abs(p.error or 0) for p in others)
    if errors:
        lines.append(f"| the same, each row on its own | {ASKED:.0%} | {_percent(statistics.median(errors))} | |")
    return [*lines, ""]


def other_configured(predicted: Iterable[Prediction]) -> list[Prediction]:
    """Fully configured bf16 rows of frameworks other than JAX."""
    return [p for p in predicted if p.family not in JAX and p.configured and p.precision == "bf16"]


def _worst(predicted: Sequence[Prediction]) -> list[str]:
    others = sorted(other_configured(predicted), key=lambda p: -abs(p.error or 0))
    lines = [
        "## The worst quarter of other frameworks' fully configured bf16 rows",
        "",
        "| row | measured s | predicted s | error | all hidden s | none hidden s |",
        "|---|---|---|---|---|---|",
    ]
    for p in others[: -(-len(others) // 4)]:
        lines.append(
            f"| {p.id} | {p.measured_s:.4g} | {p.predicted_s:.4g} | {p.error:+.1%} | {p.hidden_s:.4g} | "
            f"{p.blocking_s:.4g} |"
        )
    return [*lines, ""]


def _trends(predicted: Sequence[Prediction], rows: Mapping[str, Row]) -> list[str]:
    found = trends(predicted, rows)
    moved = [t for t in found if t.right is not None]
    falls = sum(t.measured < 0 for t in moved)
    right = (
        f"The sign is right in {sum(bool(t.right) for t in moved)} of {len(moved)} settings whose measured change is "
        f"above 1 %, where `it falls` is right in {falls}"
    )
    size = ""
    if moved:
        part = statistics.median(t.predicted / t.measured for t in moved if t.measured)
        apart = statistics.median(abs(t.predicted - t.measured) for t in moved)
        size = f" In the median {part:.0%} of the measured change is predicted, {100 * apart:.1f} points off."
    lines = [
        "## Trends: tokens/s per GPU from the smallest to the largest number of GPUs",
        "",
        f"{right}, and above what their own runs in between go the other way (scatter); the others are still.{size}",
        "",
        "| setting | GPUs | measured | scatter | predicted | sign |",
        "|---|---|---|---|---|---|",
    ]
    for t in found:
        sign = "still" if t.right is None else "right" if t.right else "wrong"
        scatter = f"{t.scatter:.1%}" if t.scatter else ""
        cells = (t.setting, f"{t.gpus[0]} to {t.gpus[1]}", f"{t.measured:+.1%}", scatter, f"{t.predicted:+.1%}", sign)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _memory(found: Sequence[Prediction]) -> list[str]:
    both = [p for p in found if p.peak_bytes and p.measured_peak_bytes]
    lines = ["## Peak memory", "", "| row | means | measured GiB | predicted GiB | error |", "|---|---|---|---|---|"]
    for p in both:
        ratio = p.peak_bytes / p.measured_peak_bytes - 1  # pyright: ignore[reportOptionalOperand, reportOperatorIssue]
        lines.append(f"| {p.id} | {p.peak_means} | {(p.measured_peak_bytes or 0) / 2**30:.1f} | "
                     f"{(p.peak_bytes or 0) / 2**30:.1f} | {ratio:+.1%} |")  # fmt: skip
    errors = [abs((p.peak_bytes or 0) / (p.measured_peak_bytes or 1) - 1) for p in both]
    median = f"Median |error| {statistics.median(errors):.1%} over {len(errors)} rows; asked 6 %." if errors else ""
    return [*lines, "", median, ""]


def _unmatched(found: Sequence[Prediction]) -> list[str]:
    reasons = Counter(p.note.split(": ", 2)[-1] if "mixture" in p.note else p.note for p in found if not p.predicted_s)
    lines = ["## Rows without a prediction", "", "| rows | reason |", "|---|---|"]
    return [*lines, *(f"| {count} | {reason} |" for reason, count in reasons.most_common()), ""]


def _frameworks() -> list[str]:
    lines = [
        "## What each framework is taken to do",
        "",
        "| framework | compiled | attention | gradients | weights | from |",
        "|---|---|---|---|---|---|",
    ]
    for f in FRAMEWORKS:
        attention = (f.attention or "of the catalog") if f.fused_attention else "scores in memory"
        beside = ", under the last backward pass" if f.overlaps_gradients and not f.whole else ""
        sharing = "cut by fsdp" if f.whole else "ZeRO-1" if f.sharded_optimizer else "whole"
        compiled = "the step" if f.whole else "one stage of one replica"
        lines.append(f"| {f.name} | {compiled} | {attention} | {f.reduce}{beside} | {sharing} | {f.why} |")
    return lines


def _write_memory(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "peak_bytes", "meaning", "quote"))
        writer.writerows((r.id, *peak) for r in rows if (peak := measured_peak_bytes(r.notes, r.source)))


if __name__ == "__main__":
    sys.exit(main())
