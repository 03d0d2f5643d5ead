"""Test faults at every moment of a real gang (2 processes x 4 devices): it ends in time, restarts, and loses no bit.

The six cells here are the attempts of one run, one fault each, so that they cost seven starts instead of twelve. `make
kill-matrix` or the slow tests run every cell by itself. benchmarks/kill_matrix explains gates and faults.
"""

import re
import sys
from dataclasses import dataclass
from itertools import pairwise

import pytest

from benchmarks.kill_matrix.cells import (
    CELLS,
    DOWN_S,
    FAULTS,
    SLOW_STEP_S,
    Cell,
    baseline,
    hit_at_gate,
    leftovers,
    run_cell,
)
from benchmarks.kill_matrix.gang import Gate, Launch
from benchmarks.kill_matrix.hosts import MEMORY_ALONE, several_hosts
from benchmarks.kill_matrix.soak import SEED, plan, problems, soak

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc"),
]

# The cells follow each other in one run with a checkpoint every 4 steps. Two attempts in a row without a new step end a
# run, so each that makes none is between two that do. Beside the commit of step 8, training goes on as far as step 12.
SIX = (
    (Cell("kill -9 of rank 0, the coordinator", "step"), 6),
    (Cell("exception on rank 1", "start"), 0),
    (Cell("kill -9 of rank 0, the coordinator", "commit"), 8),
    (Cell("kill -9 of rank 1", "restore"), 0),
    (Cell("SIGSTOP of rank 1", "save"), 16),
    (Cell("SIGTERM to rank 1 alone", "step"), 17),
)
# The launcher says this of each.
SAID = (
    r"process 0 ended first: killed by SIGKILL .*in phase 'step' at step 6",
    r"process 1 ended first: exit code 1 [^\n]*\n(  \| [^\n]*\n)*  \| [^\n]*InjectedError: an injected fault of",
    r"process 0 ended first: killed by SIGKILL",
    r"process 1 ended first: killed by SIGKILL .*in phase 'restore'",
    r"process 1 is stuck in attempt 4: it has been stopped \(SIGSTOP\) for 1\d s, in phase 'save' at step 16",
    r"stopped by SIGTERM after step \d+; a checkpoint is saved",
)


@dataclass
class Chain:
    hits: list
    codes: list
    said: str
    left: list
    losses: list
    alone: list


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    alone = baseline(tmp_path_factory.mktemp("alone"))
    gates = {}
    for attempt, (cell, step) in enumerate(SIX):
        kind, rank = FAULTS[cell.fault]
        gates[attempt] = Gate(cell.phase, rank, step, kind == "raise", True, SLOW_STEP_S.get(kind, 0.0))
    launch = Launch(tmp_path_factory.mktemp("six"), gates, ("--max-restarts", "8"))
    launch.start()
    try:
        hits = [hit_at_gate(launch, i, gates[i], *FAULTS[cell.fault]) for i, (cell, _) in enumerate(SIX)]
        codes = [launch.end()]  # The last fault was SIGTERM.
        launch.start()
        codes.append(launch.end())
        return Chain(hits, codes, launch.said, leftovers(launch), launch.losses(), alone)
    finally:
        launch.kill()


@pytest.mark.parametrize("number", range(len(SIX)), ids=[cell.name for cell, _ in SIX])
def test_the_gang_is_down_in_time_and_the_cause_is_said(chain, number):
    """15 s are promised; the victim's own pulse says its phase, except beside a commit, where training goes on."""
    cell, hit = SIX[number][0], chain.hits[number]
    assert hit.detection_s < 2 * DOWN_S
    assert hit.pulse in ("", cell.phase) or cell.phase == "commit"
    assert re.search(SAID[number], chain.said), chain.said


def test_the_run_ends_with_the_losses_of_one_left_alone(chain):
    assert chain.codes == [75, 0], chain.said
    assert [step for step, _ in chain.losses] == list(range(1, 25))
    assert chain.losses == chain.alone  # The losses agree bit for bit.
    assert chain.left == []


def test_a_gang_goes_on_from_the_last_snapshot_that_all_have_in_memory(chain, tmp_path):
    """Rank 1 is killed before it copies the state of step 16, which rank 0 keeps; there is no checkpoint at all."""
    options = ("--max-restarts", "2", "--set", "checkpoint.every=0", "--set", "checkpoint.snapshot_every=2")
    gate = Gate("save", 1, 16)
    launch = Launch(tmp_path, {0: gate}, options)
    launch.start()
    try:
        hit = hit_at_gate(launch, 0, gate, "kill", 1)
        assert launch.end() == 0, launch.said
    finally:
        launch.kill()
    assert hit.pulse == "save"
    assert "the snapshot of step 14 is restored; no checkpoint is read" in launch.said
    assert launch.losses() == chain.alone  # The losses agree bit for bit.
    assert leftovers(launch) == []


def test_a_lost_host_gets_its_share_of_the_state_from_its_neighbours_memory(chain, tmp_path):
    """The launcher of host 1 goes with its process before that copies step 16, and nobody has a checkpoint."""
    with several_hosts(tmp_path, MEMORY_ALONE) as hosts:
        hosts.wait_for_gate()
        hosts.lose(1)
        hosts.replace(1)
        assert hosts.end() == chain.alone  # The losses agree bit for bit.
    assert re.search(r"host 1 received its share of the snapshots of steps? .*14.* from the next host", hosts.said)
    assert hosts.said.count("the snapshot of step 14 is restored; no checkpoint is read") == 2
    assert "attempt 0 ended on another host: host 1 is lost" in hosts.said


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, baseline(folder, ("--set", "checkpoint.keep=9"))


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_cell(cell, alone, tmp_path):
    row = run_cell(cell, tmp_path / "cell", *alone)
    assert row.wrong == ""


@pytest.mark.slow
def test_a_soak(tmp_path):
    """In 300 steps with 10 faults, memory grows by at most four times the measured growth.

    The launcher grew by 0.2 MiB over ten restarts. A process grew by 3.5 MiB over steps 100 to 300, which is some 30 kB
    for each of the 40 checkpoints, and by 0.1 MiB without checkpoints.
    """
    found = soak(tmp_path, plan(SEED))
    assert problems(found) == []
    assert max(found.launcher_bytes) - min(found.launcher_bytes) < 1 << 20
    assert all(last - first < 14 << 20 for first, last in zip(found.alone[100], found.alone[300]))


def test_a_plan_is_the_same_for_the_same_seed_and_can_end():
    planned = plan(SEED)
    assert planned == plan(SEED)
    assert planned != plan(SEED + 1)
    assert [p.step for p in planned] == sorted({p.step for p in planned})
    early = [p.phase in ("start", "compile", "restore") for p in planned]
    assert not any(a and b for a, b in pairwise(early))
