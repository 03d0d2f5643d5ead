"""Test that every shipped experiment is planned in little memory, and that the plan explains and prices all of it."""

import pytest

from benchmarks.shipped import planned_apart, shipped

pytestmark = pytest.mark.deviceless


def test_todays_models_are_among_them():
    assert {"deepseek_v3", "deepseek_v3_gb200", "qwen3_235b", "gpt_oss_120b", "llama3_405b"} <= set(shipped())


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped())
def test_an_experiment_is_planned_whole_in_little_memory(name):
    found = planned_apart(name)
    assert found["memory_bytes"] <= 6e9
    assert found["unpriced_share"] <= 0.01
    assert found["unexplained"] == []
