"""Test how a rehearsal's look-ups and scatters are priced by the ids that they had, and where the ids came from."""

import json
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import scoring
from benchmarks.gpu.ids import Ids, as_it_ran, ids_of, uses
from meshkit.config import catalog
from meshkit.config.mesh import Placement
from meshkit.hlo.module import read_schedule
from meshkit.predict.kernels import kernel_work
from meshkit.report.schema import KernelClassPart, KernelPart, KernelsPart, Report, StepPart, WindowPart
from tests.hlo_text import parse_hlo

H100 = catalog.gpu("h100_sxm")
ROWS, WIDTH, TABLE = 65536, 512, 131072
PROGRAM = Path(__file__).parent.parent / "data/hlo/ids.hlo"


@pytest.fixture(scope="module")
def module():
    return parse_hlo(PROGRAM.read_text())


@pytest.fixture(scope="module")
def schedule(module):
    return read_schedule(module, Placement.from_shape(("data",), (8,)))


def measured(seconds):
    op = KernelPart(name="brought", count=1, busy_s=seconds)
    kernels = KernelsPart(classes=(KernelClassPart(kind="gather and scatter", count=1, time_s=seconds, ops=(op,)),))
    step = StepPart(time_s=1.0, compute_s=1.0)
    return Report(source="profile", window=WindowPart(steps=1, devices=1), step=step, kernels=kernels)


def seconds_of(schedule):
    return {i.name: kernel_work(i.cost, H100).alone_s for i, _ in schedule.walk() if i.cost and i.kind == "kernel"}


def test_ids_are_of_the_batch_or_a_collectives_and_sorted_ones_are_neither(module):
    found = {use.name: use for use in uses(module)}
    assert {name: use.mocked for name, use in found.items()} == {"looked": False, "own": False, "brought": True}
    own, looked = found["own"], found["looked"]
    assert (own.adds, own.rows, own.row_bytes, own.table_rows) == (True, ROWS, 4 * WIDTH, TABLE)
    assert (looked.adds, looked.rows, looked.row_bytes, looked.table_rows) == (False, ROWS, 2 * WIDTH, TABLE)


@pytest.mark.parametrize(
    ("ids", "looked_rows", "turns"), [(None, 256, 256), (Ids(ROWS, 40_000, 3), 40_000, 3), (Ids(10, 10, 1), 10, 6554)]
)
def test_a_row_is_read_once_however_often_it_is_looked_up_and_the_most_frequent_waits_for_itself(
    module, schedule, ids, looked_rows, turns
):
    spread = {i.name: i.cost for i, _ in schedule.walk() if i.cost}
    priced, held = as_it_ran(schedule, module, H100, measured(1e-3), ids)
    found = {i.name: i.cost for i, _ in priced.walk() if i.cost}
    assert set(held) == {"brought"}
    assert spread["looked"].bytes_accessed - found["looked"].bytes_accessed == (ROWS - looked_rows) * 2 * WIDTH
    assert spread["own"].bytes_accessed - found["own"].bytes_accessed == (ROWS - looked_rows) * 2 * 4 * WIDTH
    others = ROWS * WIDTH * (1 - turns / ROWS)
    assert found["own"].added[0] - others == pytest.approx(turns * 64 * 32 * 525.6 / 165.4, rel=1e-3)
    assert found["routed"] == spread["routed"]


@pytest.mark.parametrize(
    ("seconds", "held", "priced_s"),
    [
        (30e-6, "ids beyond the table", 65536 * 512 / 512 * 157 / (132 * 1.98e9)),
        (1e-3, "ids all alike", 65536 * 12.4e-9),
    ],
)
def test_what_memory_held_instead_of_ids_is_told_by_the_time_alone(module, schedule, seconds, held, priced_s):
    priced, found = as_it_ran(schedule, module, H100, measured(seconds), None)
    assert found == {"brought": held}
    assert seconds_of(priced)["brought"] == pytest.approx(priced_s, rel=0.01)


def test_a_rehearsal_says_which_ids_it_had(tmp_path):
    assert ids_of(tmp_path) is None
    (tmp_path / "ids.json").write_text(json.dumps({"tokens": {"count": 8, "different": 4, "most": 3}}))
    assert ids_of(tmp_path) == Ids(8, 4, 3)


def test_every_rehearsal_of_the_first_card_holds_all_of_its_promises(tmp_path):
    archive = Path("benchmarks/gpu/h100-2026-11-22.tar.xz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    text = scoring.score(tmp_path / "h100-2026-11-22")
    tables = {table.partition("\n")[0]: table for table in text.split("### ") if "(`rehearse_" in table}
    assert len(tables) == 7
    for name, table in tables.items():
        kept = [line for line in table.splitlines() if "within" in line or "collectives" in line]
        assert len(kept) >= 9
        broken = [line.split("|")[1].strip() for line in kept if "| no" in line]
        # That day's price had Mixtral's ragged exchanges as plain ones, not slice by slice.
        assert broken == (["step"] if "mixtral" in name else []), name
    assert text.splitlines()[-1] == "Of 88 promises 84 hold."  # The four broken promises are those of `small_trace`.
