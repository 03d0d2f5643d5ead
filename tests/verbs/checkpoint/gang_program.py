"""Run one process of the gang of test_gang_checkpoints: it restores, falls back, fails to save, and saves.

It is started with the environment of `launch local` and writes what it saw into `rank<i>.json`.
"""

from __future__ import annotations

import errno
import json
import sys
import warnings
from pathlib import Path

import jax

from benchmarks.corruption.campaign import abstract, random_state, same_bits
from meshkit.config.sections import CheckpointTable
from meshkit.distributed.join import join_gang
from meshkit.verbs.checkpoint import manifest
from meshkit.verbs.checkpoint.store import CheckpointStore


def main(folder: Path) -> None:
    """Restore, fall back, fail to save, and save; every process does the same."""
    rank, size = join_gang()
    seen: dict = {"processes": size, "devices": len(jax.devices())}
    wanted = abstract(random_state(0, shape=(2, 4)))
    lines: list[str] = []
    store = CheckpointStore(folder / "checkpoints", CheckpointTable(verify="own"), say=lines.append)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = store.restore_latest(wanted)
    assert state is not None
    seen["warned"] = [str(w.message) for w in said]
    seen["restored"] = int(state.step)
    seen["same"] = same_bits(state, random_state(seen["restored"], shape=(2, 4)))

    real = manifest.fingerprint
    if rank == 1:  # The disk of one host is full.

        def full(path, *, sync):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        manifest.fingerprint = full
    store.save(random_state(30, shape=(2, 4)))
    store.saving.wait(120)
    store.check()
    seen["failed"] = store.news()["checkpoint_error"]
    seen["after_failure"] = store.steps()
    manifest.fingerprint = real

    store.save(random_state(30, shape=(2, 4)))
    store.wait()
    seen["after_save"] = store.steps()
    seen["said"] = lines
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
