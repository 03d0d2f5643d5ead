"""Add our trainings on one GPU, with their blind predictions, to own.csv: `python -m benchmarks.published.own`.

The measured times come from DIR/row_NAME/result.json, which `python -m benchmarks.gpu --out DIR --rows` writes. A
prediction is always the one that was committed before the card ran the training, never a later one.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.trainings import TRAININGS

OUT = Path(__file__).with_name("own.csv")
_SETTING = "train.precision="


def main() -> None:
    """Add the rows of a folder to the table; they replace rows of the same id and source."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.own")
    parser.add_argument("folder", type=Path, help="results of one card")
    parser.add_argument("--blind", type=Path, required=True, help="JSON of the plans made before, by name")
    parser.add_argument("--date", required=True, help="date of the measurement")
    parser.add_argument("--source", required=True, help="where the results and the plans are kept")
    args = parser.parse_args()
    found = own_rows(args.folder, json.loads(args.blind.read_text(encoding="utf-8")), args.date, args.source)
    with OUT.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = {row["id"]: row for row in reader}
        for row in found:
            if row["source"] != rows.get(row["id"], row)["source"]:  # Another card's row, or one of a later program.
                row["id"] += "-again"
            rows[row["id"]] = row
    with OUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, reader.fieldnames or [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


def own_rows(folder: Path, blind: dict[str, dict], date: str, source: str) -> Iterator[dict[str, str]]:
    """Yield a row for every training with both times.

    Its measured step is the median of those before and after its trace.
    """
    for name, planned in blind.items():
        path = folder / f"row_{name}" / "result.json"
        values = json.loads(path.read_text(encoding="utf-8"))["values"] if path.exists() else {}
        if "step_s" not in planned or "before_s" not in values:
            continue
        training = TRAININGS.get(name)  # A training that no longer has this name was dense and in bf16.
        settings = (*training.model, *training.train) if training else ()
        step_s = statistics.median(values[key] for key in ("before_s", "after_s") if key in values)
        yield {
            "id": f"{values['gpu']}-{date}-{name}",
            "gpu": values["gpu"],
            "precision": next((s.removeprefix(_SETTING) for s in settings if s.startswith(_SETTING)), "bf16"),
            "experts": "yes" if any("models.moe" in s for s in settings) else "no",
            "measured_step_time_s": f"{step_s:.6g}",
            "predicted_step_time_s": f"{planned['step_s']:.6g}",
            "date": date,
            "source": source,
        }


if __name__ == "__main__":
    main()
