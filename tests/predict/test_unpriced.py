"""Seconds of what a simulation prices by its bytes alone."""

import pytest

import meshkit as mk
from meshkit.hlo.costs import Cost
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.predict.simulate import simulate
from meshkit.predict.unpriced import BY_BYTES, kernel_seconds_by_name, unpriced_seconds, unpriced_share


def simulated():
    """A loop of 4 iterations: a known kernel of 1 s and a custom call of 3 s; 16 s in all."""
    call = Instruction("mine", "custom-call", "kernel", cost=Cost(bytes_accessed=1.0, priced_by="bytes"))
    known = Instruction("known", "fusion", "kernel", cost=Cost(bytes_accessed=1.0))
    loop = Instruction("loop", "while", "while", bodies=("body",), trip_count=4)
    schedule = Schedule(
        "m",
        {"entry": (loop,), "body": (known, call)},
        "entry",
        "0",
        {BY_BYTES: ["mine (my_kernel)"], "conditional": ["if"]},
    )
    seconds = {"mine": 3.0, "known": 1.0}
    return simulate(schedule, mk.Cluster.load("dgx_h100", hosts=1), seconds=lambda i: seconds[i.name])


def test_seconds_are_those_of_every_run():
    simulation = simulated()
    assert kernel_seconds_by_name(simulation) == pytest.approx({"mine": 12.0, "known": 4.0})
    assert unpriced_seconds(simulation) == pytest.approx({BY_BYTES: 12.0})
    assert unpriced_seconds(simulation, steps=4) == pytest.approx({BY_BYTES: 3.0})
    # launch gaps of some microseconds come to the 16 s
    assert unpriced_share(simulation) == pytest.approx(12 / 16, rel=1e-4)
