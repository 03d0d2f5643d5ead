"""What XLA recomputes to save memory: told by the names of its clones, and by its log."""

from types import SimpleNamespace

import numpy as np
import pytest

from meshkit.compile.derived import LIMIT
from meshkit.compile.options import Option
from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Schedule
from meshkit.predict.rematerialized import rematerialized
from meshkit.report.schema import MemoryPart
from meshkit.verbs.plan.plan_warnings import plan_warnings

EMPTY = Schedule("m", {"main": ()}, "main", "f")
LOG = (
    "Can't reduce memory use below 21.05GiB (22604740920 bytes) by rematerialization; only reduced to 21.93GiB "
    "(23549564248 bytes), down from 22.26GiB (23902934376 bytes) originally"
)
# Kernels of a millisecond each. `.rematerialized` is another pass's: a broadcast that is cheaper to make than to keep.
# XLA removes an original that nothing uses any more: `sub.7.remat` is all there is of it.
NAMES = (
    "dot.1",
    "gemm_fusion_dot.0",
    "gemm_fusion_dot.0.remat",
    "add",
    "add.remat2.1",
    "sub.7.remat",
    "loop_broadcast_fusion.13.rematerialized",
    "remat.3",
)


def simulated(names=NAMES):
    starts = np.arange(len(names)) * 1e-3
    step = SimpleNamespace(
        window=(0.0, 1e-3 * len(names)),
        compute=np.stack([starts, starts + 1e-3], axis=1),
        compute_op=np.arange(len(names)),
    )
    return SimpleNamespace(
        timeline=SimpleNamespace(steps=[step], op_names=names), notes={}, flops={"bf16": 1.0}, host_bytes=0, noted_s={}
    )


def test_clones_are_told_by_their_names():
    found = rematerialized(simulated(), (LOG,))
    assert (found.kernels, found.counted_bytes) == (2, 23902934376)
    assert found.seconds == pytest.approx(2e-3)
    assert rematerialized(simulated(("dot.1",)), ()).kernels == 0


@pytest.mark.parametrize(
    ("fits", "why", "way"),
    [
        (True, "[xla]", f"{LIMIT} = 10000"),
        (True, "it needs more", "train.remat"),  # plan has tried without
        (False, "[xla]", "train.remat"),
    ],
)
def test_the_plan_says_what_it_costs_and_what_to_try(fits, why, way):
    memory = MemoryPart(fits=fits, peak_bytes=20 * 2**30, margin_bytes=-1, reserved_bytes=1)
    compiled = SimpleNamespace(log=(LOG,), traced_flops=None, chosen=(Option(LIMIT, 115, why),))
    cluster = Cluster.load("dgx_h100")
    found = {w.code: w for w in plan_warnings(compiled, EMPTY, simulated(), memory, cluster, (), steps=2)}
    warning = found["xla_rematerialization"]
    assert warning.seconds == pytest.approx(1e-3)  # of each of the two steps
    assert "recomputes 2 kernels, 1.00 ms a step, to keep within the memory (it counts 22.3 GiB)" in warning.message
    assert "needs 20.0 GiB" in warning.message
    assert way in warning.message
