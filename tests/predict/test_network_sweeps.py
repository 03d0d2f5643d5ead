"""The network model against measured sweeps: the error bands that it claims, held to fixed data.

The bands are the project's own targets, not a spread of the data: nothing here is timed.
"""

from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import host_cliff
from benchmarks.nccl_sweeps import (
    BANDS,
    describe,
    in_band,
    leave_one_out,
    read_sweeps,
    read_xla_table,
    with_shipped_numbers,
)


@pytest.fixture(scope="module")
def sweeps():
    rows, skipped = read_sweeps()
    assert not skipped
    assert len(rows) == 125
    return rows


@pytest.fixture(scope="module")
def xla_table():
    return read_xla_table()


@pytest.mark.parametrize(("band", "median", "p90"), [(BANDS[1], 0.20, 0.45), (BANDS[2], 0.10, 0.20)])
@pytest.mark.parametrize("left_out", ["nothing", "system", "gpu"])
def test_all_reduce_sweeps(sweeps, band, median, p90, left_out):
    errors = with_shipped_numbers(sweeps) if left_out == "nothing" else leave_one_out(sweeps, key=left_out)[0]
    size = np.abs(errors[in_band(sweeps, *band[1:])])
    assert np.median(size) <= median
    assert np.percentile(size, 90) <= p90


def test_fitted_numbers_hardly_depend_on_which_system_is_left_out(sweeps):
    _, numbers = leave_one_out(sweeps)
    assert np.ptp([fitted["turnaround_steps"] for fitted in numbers.values()]) <= 0.1
    assert np.ptp([fitted["launch_s"] for fitted in numbers.values()]) <= 10e-6


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all", "collective-permute", "reduce-scatter"])
@pytest.mark.parametrize("device", ["sm_90", "sm_100_B200", "sm_100_GB200", "sm_103", "all"])
def test_xla_table(xla_table, kind, device):
    """`all` counts the rows of an 8-GPU sm_103 machine too, which XLA measured at a tenth of its NVLink."""
    rows = [row for row in xla_table if row.collective == kind and device in ("all", row.system)]
    assert len(rows) >= 24
    assert np.median(np.abs(with_shipped_numbers(rows))) <= 0.25


@pytest.mark.parametrize(
    ("system", "gpu", "nic", "nics", "shape"),
    [
        ("H100 x16, 2 nodes, 8x400G", "h100_sxm", "ib_ndr", 8, (8, 2)),
        ("A100 x24, 3 nodes, 4x HDR200", "a100_80gb", "ib_hdr", 4, (8, 3)),
        ("2 nodes x 8 A100, 8x100G RoCE", "a100_80gb", "roce_100", 8, (8, 2)),
        ("32 H200 GPUs, 4 hosts", "h200", "ib_ndr", 8, (8, 4)),
        ("GB200 x144", "gb200", "ib_ndr", 4, (72, 2)),
        ("A100 x4, 1 node", "a100_80gb", "ib_hdr", 8, (4, 1)),
        ("B200 x32, 4 nodes, 8x50GB/s EFAv4 per node", "b200", "efa_400", 8, (8, 4)),
        ("A100 x16, 2 nodes, 4x100G EFA", "a100_80gb", "efa_100", 4, (8, 2)),
        ("H100 x16, 2 nodes, 32x100G EFA", "h100_sxm", "efa_100", 32, (8, 2)),
    ],
)
def test_system_names(system, gpu, nic, nics, shape):
    _, cluster, g, k = describe(system)
    assert cluster.nic is not None
    assert (cluster.gpu.key, cluster.nic.key, cluster.nics_per_host, (g, k)) == (gpu, nic, nics, shape)


def test_efa_of_an_older_host_has_the_latency_that_its_plugin_announces():
    """75 us on p5, whose four cards a GPU a name may sum up; 35 us on p6: twice that a step of a large message."""
    old, new = (describe(f"{gpu} x16, 2 nodes, 8x400G EFA")[1].link("infiniband") for gpu in ("H100", "B200"))
    assert (old.fabric, new.fabric) == ("efa_400", "efa_400")
    assert old.latency_s - new.latency_s == pytest.approx(2 * (75e-6 - 35e-6))
    assert old.latency_small_s - new.latency_small_s == pytest.approx(75e-6 - 35e-6)


def test_an_unknown_system_is_left_out(tmp_path):
    path = tmp_path / "sweep.csv"
    path.write_text("system,collective,algo,bytes,time_us,busbw_GBps,source\nTPU v5,all_reduce,x,1024,5,1,me\n")
    rows, skipped = read_sweeps(path)
    assert not rows
    assert "no GPU" in skipped["TPU v5"]


def test_the_cliff_is_drawn():
    root = ElementTree.fromstring(host_cliff.draw())
    lines = [node for node in root if node.tag.endswith("polyline")]
    assert len(lines) == len(host_cliff.KINDS)
    assert all(len(line.attrib["points"].split()) == len(host_cliff.GROUPS) for line in lines)


@pytest.mark.parametrize("kind", ["all-to-all", "collective-permute"])
def test_the_cliff_from_one_host_to_two(kind):
    """What goes through one NIC: 46 GB/s after NVLink's 300 and more; half of an all-to-all over two hosts stays."""
    times = dict(zip(host_cliff.GROUPS, host_cliff.times_ms(kind), strict=True))
    assert times[16] > 3 * times[8]
