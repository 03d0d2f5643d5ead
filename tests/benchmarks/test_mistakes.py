"""Test that a mistake at any key of an experiment file is reported at that key, with a remedy that helps."""

from __future__ import annotations

import pytest

from benchmarks.attack.mistakes import mistakes


@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_mistakes_are_told_at_their_key_with_a_remedy(seed):
    found = list(mistakes(seed))
    assert len(found) >= 100
    assert [told for told in found if told.fault] == []
