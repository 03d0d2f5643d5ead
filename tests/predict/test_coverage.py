"""Test how a compiled program's work is compared with the traced one's: missing, repeated and underpriced work."""

from types import SimpleNamespace

import numpy as np
import pytest

import meshkit as mk
from meshkit.compile.choices import LIMIT
from meshkit.compile.options import Option
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule
from meshkit.hlo.pipeline_report import useful_flops
from meshkit.planning.warnings import plan_warnings
from meshkit.predict.coverage import flop_note, kernel_seconds_by_name, rematerialized, unpriced_seconds
from meshkit.predict.simulate import simulate
from meshkit.report.schema import MemoryPart
from meshkit.step.program import StepFacts


def program(*kernels, source="", **bodies):
    """Return a schedule with a kernel for each of these FLOP, then a conditional on the bodies."""
    made = [Instruction(f"k{n}", "fusion", "kernel", source, Cost(dict(flops))) for n, flops in enumerate(kernels)]
    if bodies:
        made.append(Instruction("if", "conditional", "conditional", bodies=tuple(bodies)))
    return Schedule("m", {"main": tuple(made), **{name: tuple(b) for name, b in bodies.items()}}, "main", "f")


def note(schedule, traced: float | None = 8e12, *, step_s=1e-3, recomputed=False):
    return flop_note(schedule, traced, 8, step_s=step_s, peak_flops=1e15, recomputed=recomputed)


def found_in(schedule, **options):
    found = note(schedule, **options)
    assert found is not None
    return found


@pytest.mark.parametrize("executed", [{"bf16": 1.0e12}, {"bf16": 6e11, "f8e4m3fn": 4.05e11}, {"bf16": 9.91e11}])
def test_one_percent_is_what_xla_itself_adds_and_drops(executed):
    assert note(program(executed)) is None


def test_repeated_work_is_named():
    found = found_in(program({"bf16": 2e12}))
    assert found.code == "repeated_work"
    assert "executes 2.00 TFLOP of matmuls per GPU, the traced one needs 1.00 TFLOP (+100.0%): GPUs re" in found.message
    assert "XLA recomputes" in found_in(program({"bf16": 2e12}), recomputed=True).message


def test_work_that_was_not_priced_is_no_prediction():
    found = found_in(program({"bf16": 5e11}))
    assert found.code == "flops"
    assert "(-50.0%): part of the compiled program has no price" in found.message


def test_ragged_matmuls_that_xla_makes_dense_are_named():
    found = found_in(program({"bf16": 4e12}, source="moe/experts/ragged_dot_general"))
    assert found.code == "ragged_dot"
    assert "(+300.0%): XLA:GPU makes ragged matmuls" in found.message
    assert (found.names, found.share) == (("k0",), 0.75)
    mixed = Schedule("m", {"main": (*program({"bf16": 1e12}, source="ragged_dot").computations["main"],
                                    *program({"bf16": 4e12}).computations["main"])}, "main", "f")  # fmt: skip
    assert found_in(mixed).code == "repeated_work"  # The difference is more than the ragged ones explain.


def test_a_difference_that_costs_nothing_is_none():
    """1e12 FLOP are 1 ms of this GPU's peak, which is less than a thousandth of a step of 2 s."""
    assert note(program({}), step_s=2.0) is None


def test_of_a_conditional_the_branch_with_the_most_work_counts():
    """The longest branch may be another one, which communicates."""
    few, many = (Instruction("k", "fusion", "kernel", cost=Cost({"bf16": flops})) for flops in (1e11, 7e11))
    schedule = program({"bf16": 3e11}, short=[few], long=[many])
    assert useful_flops(schedule) == pytest.approx(1e12)
    assert note(schedule) is None


def test_nothing_is_said_of_what_was_not_counted():
    assert note(program({"bf16": 1e12}), None) is None
    assert note(program({}), 0.0) is None


def simulated_loop():
    """Return a simulated loop of 4 iterations of a known kernel of 1 s and a custom call of 3 s: 16 s in all."""
    call = Instruction("mine", "custom-call", "kernel", cost=Cost(bytes_accessed=1.0, priced_by="bytes"))
    known = Instruction("known", "fusion", "kernel", cost=Cost(bytes_accessed=1.0))
    loop = Instruction("loop", "while", "while", bodies=("body",), trip_count=4)
    schedule = Schedule(
        "m",
        {"entry": (loop,), "body": (known, call)},
        "entry",
        "0",
        {"opaque custom call": ["mine (my_kernel)"], "conditional": ["if"]},
    )
    seconds = {"mine": 3.0, "known": 1.0}
    return simulate(schedule, mk.Cluster.load("dgx_h100", hosts=1), seconds=lambda i: seconds[i.name])


def test_seconds_are_those_of_every_run():
    simulation = simulated_loop()
    assert kernel_seconds_by_name(simulation.timeline) == pytest.approx({"mine": 12.0, "known": 4.0})
    assert unpriced_seconds(simulation) == pytest.approx({"opaque custom call": 12.0})
    assert unpriced_seconds(simulation, steps=4) == pytest.approx({"opaque custom call": 3.0})


EMPTY = Schedule("m", {"main": ()}, "main", "f")
LOG = (
    "Can't reduce memory use below 21.05GiB (22604740920 bytes) by rematerialization; only reduced to 21.93GiB "
    "(23549564248 bytes), down from 22.26GiB (23902934376 bytes) originally"
)
# Each kernel takes a millisecond. `.rematerialized` comes from another pass, for a broadcast that is cheaper to make
# than to keep. XLA removes an original that nothing uses any more, so `sub.7.remat` is all that is left of it.
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
        (True, "it needs more", "train.remat"),  # The plan has tried to do without.
        (False, "[xla]", "train.remat"),
    ],
)
def test_the_plan_says_what_it_costs_and_what_to_try(fits, why, way):
    memory = MemoryPart(fits=fits, peak_bytes=20 * 2**30, margin_bytes=-1, reserved_bytes=1)
    chosen = (Option(LIMIT, 115, why),)
    compiled = SimpleNamespace(log=(LOG,), traced_flops=None, dead_updates=(), chosen=chosen, symmetric_bytes=0)
    cluster = Cluster.load("dgx_h100")
    facts = StepFacts(steps_per_call=2)
    found = {w.code: w for w in plan_warnings(compiled, EMPTY, simulated(), memory, cluster, (), facts)}
    warning = found["xla_rematerialization"]
    assert warning.seconds == pytest.approx(1e-3)  # The seconds are of one of the two steps.
    said = "recomputes 2 kernels (1.00 ms a step) to stay within the memory (it expects to need 22.3 GiB)"
    assert said in warning.message
    assert "needs 20.0 GiB" in warning.message
    assert way in warning.message
