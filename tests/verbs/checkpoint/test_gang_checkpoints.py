"""Test checkpoints of two processes: one speaks for both when it fails, and any mesh restores what they saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.corruption import campaign
from benchmarks.corruption.campaign import abstract, random_state, same_bits
from meshkit.config.sections import CheckpointTable
from meshkit.verbs.checkpoint.manifest import read_manifest, share_of_files
from meshkit.verbs.checkpoint.store import CheckpointStore
from meshkit.verbs.launch.local import LocalPart

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def run_gang(folder: Path) -> list[dict]:
    """Run two processes of four devices, as `launch local` starts them, and return what each of them saw."""
    command = [sys.executable, "-m", "tests.verbs.checkpoint.gang_program", str(folder)]
    environments = LocalPart(2, 4, virtual=True).environments(0)
    logs = [folder / f"rank{i}.log" for i in range(2)]
    gang = []
    try:
        for environment, log in zip(environments, logs):
            with open(log, "w") as f:
                gang.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=f, stderr=f))
        codes = [p.wait(300) for p in gang]
    finally:
        for process in gang:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((folder / f"rank{i}.json").read_text()) for i in range(2)]


def damage_in_share_of(checkpoint: Path, rank: int) -> str:
    """Flip a bit in the largest file that only this process verifies; return its name."""
    sizes = {name: size for name, (size, _) in read_manifest(checkpoint).files.items()}
    name = max(share_of_files(sizes, rank, 2), key=lambda n: sizes[n])
    campaign.apply(checkpoint, campaign.Damage("flip", name, 8 * (sizes[name] // 2)))
    return name


def test_two_processes_restore_fall_back_fail_and_save_as_one(tmp_path):
    folder = tmp_path / "checkpoints"
    campaign.save_steps(folder)  # One process saves them on 4 x 2.
    name = damage_in_share_of(folder / "20", 1)
    seen = run_gang(tmp_path)
    for found in seen:
        assert (found["processes"], found["devices"]) == (2, 8)
        assert f"{name} has other contents than were written, found by process 1" in found["warned"][0]
        assert (found["restored"], found["same"]) == (10, True)  # They are restored on 2 x 4.
        assert found["failed"].startswith("checkpoint 30: process 1: No space left on device")
        assert found["after_failure"] == [10]
        assert found["after_save"] == [30, 10]
    assert "checkpoint 30 could not be saved; the newest is 10" in seen[0]["said"][0]
    assert seen[1]["said"] == []  # There is one line for the job.
    assert sorted(p.name for p in folder.iterdir()) == ["10", "20.corrupt", "30"]

    record = read_manifest(folder / "30").record
    assert (record["processes"], record["mesh"]) == (2, {"data": 2, "tensor": 4})
    assert {name.split("/")[1] for name in record["files"]} >= {"ocdbt.process_0", "ocdbt.process_1"}
    for shape in ((4, 2), (2, 4), (8, 1), (1, 1)):  # One process also restores what two have saved.
        wanted = random_state(30, shape=shape)
        restored = CheckpointStore(folder, CheckpointTable(verify="full")).restore_latest(abstract(wanted))
        assert restored is not None
        assert same_bits(restored, wanted)
