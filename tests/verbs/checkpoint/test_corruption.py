"""Test that no run goes on with a wrong state, whatever file of a checkpoint is damaged."""

from __future__ import annotations

import pytest

from benchmarks.corruption import campaign


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    campaign.save_steps(folder)
    return folder


@pytest.mark.parametrize(
    ("seeds", "verify"),
    [
        (range(21), "own"),
        pytest.param(range(200), "own", marks=pytest.mark.slow),
        pytest.param(range(200), "full", marks=pytest.mark.slow),
    ],
    ids=["some", "200", "200-full"],
)
def test_every_damage_is_named_and_the_step_before_is_used(saved, seeds, verify):
    found = campaign.run(saved, seeds, verify=verify)
    assert {outcome for _, outcome in found} == {campaign.SAFE}, found
    assert {kind for kind, _ in found} == set(campaign.KINDS)


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_every_clean_checkpoint_is_restored_bit_for_bit(count):
    assert campaign.clean_restores(count) == count


def test_the_campaign_would_find_a_store_that_does_not_look(saved):
    """A flip in the largest file of arrays, with contents unchecked, is restored as a wrong value."""
    checkpoint = saved / str(campaign.DAMAGED)
    largest = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    damages = (
        campaign.Damage("flip", largest.relative_to(checkpoint).as_posix(), at)
        for at in range(4 * largest.stat().st_size, 8 * largest.stat().st_size, 1009)
    )
    assert any(campaign.restore_damaged(saved, d, verify="off") == campaign.WRONG for d in damages)
