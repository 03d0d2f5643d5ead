"""Many rows over several processes. Eighth in the flow of the replay; the command line is in __main__.py."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from benchmarks.published.replay import Prediction, group_key, predict
from benchmarks.published.rows import Row


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that share a compiled program together, in the order of the file; each that cannot be matched alone."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group_key(row) or f"alone {row.id}", []).append(row)
    return list(groups.values())


def replay(rows: Sequence[Row], folder: Path, jobs: int, compile_missing: bool) -> Iterator[Prediction]:
    """Predictions of rows as they come, from so many processes; rows that share a program stay together."""
    if jobs == 1:
        for group in grouped(rows):
            yield from predict_group(group, folder, compile_missing)
        return
    left = grouped(rows)
    while left:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            waiting = {pool.submit(predict_group, group, folder, compile_missing): group for group in left}
            try:
                for future in as_completed(waiting):
                    found = future.result()
                    left.remove(waiting[future])
                    yield from found
            except BrokenProcessPool:  # a worker was killed, as a rule for memory: go on with half as many
                if jobs == 1:
                    for group in left:
                        yield from (Prediction(r.id, r.source, note="not predicted: a process died") for r in group)
                    return
                jobs = max(1, jobs // 2)


def predict_group(rows: Sequence[Row], folder: Path, compile_missing: bool) -> list[Prediction]:
    """Predictions of rows one after the other, in one process."""
    return [predict(row, folder, compile_missing=compile_missing) for row in rows]
