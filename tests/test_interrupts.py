"""Test that Ctrl-C at a random moment ends a plan soon, with code 130, without a process or a folder left."""

import random
import sys

import pytest

from tests.interrupted import LONGEST_S, interrupted_after


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("count", "seed"), [(3, 0), pytest.param(50, 1, marks=pytest.mark.slow)], ids=["a few", "fifty"]
)
def test_an_interrupt_ends_a_plan_at_once_and_whole(tmp_path, count, seed):
    seeded, heard, slowest = random.Random(seed), 0, 0.0
    for number in range(count):
        found = interrupted_after(LONGEST_S * (number + seeded.random()) / count, tmp_path)
        if found is None:
            continue
        code, seconds, said, left = found
        heard += 1
        assert (code, left, list(tmp_path.iterdir())) == (130, [], []), said
        assert "bug of ours" not in said
        slowest = max(slowest, seconds)
    assert heard
    print(f"{heard} interrupts, the slowest heard in {slowest:.2f} s")
