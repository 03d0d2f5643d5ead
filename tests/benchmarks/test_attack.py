"""Test that the attacks detect a script that runs a name, a traceback and an escape, and that they repeat exactly."""

import random

import pytest

from benchmarks.attack import campaigns, doors, harness, mutate


def test_a_name_that_runs_is_seen(tmp_path):
    campaigns.check_script("srun 'touch canary'\n", tmp_path, tmp_path)
    with pytest.raises(harness.Broken, match="a name was run"):
        campaigns.check_script("echo $(touch canary)\n", tmp_path, tmp_path)
    with pytest.raises(harness.Broken, match="no script"):
        campaigns.check_script("echo 'touch\n", tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("code", "text", "message"),
    [(1, "", "a traceback"), (0, "Traceback (most recent call last):", "a traceback"), (2, " ", "without a word"),
     (0, "\x1b[2J", "an escape"), (-9, "", "exit code -9")],
)  # fmt: skip
def test_a_command_that_breaks_is_seen(monkeypatch, code, text, message):
    monkeypatch.setattr(harness, "captured", lambda words: (code, text))
    with pytest.raises(harness.Broken, match=message):
        harness.command("explain")


@pytest.mark.parametrize(
    ("damage", "what"),
    [(mutate.damage_bytes, b"abc" * 50), (mutate.damage_text, 'a = 1\nb = "x"\n'), (mutate.damage_json, '{"a": [1]}')],
)
def test_damages_are_the_same_every_time_and_differ(damage, what):
    found = [damage(what, random.Random(seed)) for seed in range(50)]
    assert found == [damage(what, random.Random(seed)) for seed in range(50)]
    assert len(set(found)) > 15


@pytest.mark.parametrize(
    ("campaign", "outcomes"),
    [(doors.settings, {"refused", "read"}), (doors.modules, {"refused", "run"}), (doors.inputs, {"refused"}),
     (doors.caches, {"refused", "kept beside"})],
)  # fmt: skip
def test_the_doors_hold(tmp_path, monkeypatch, capfd, campaign, outcomes):
    for name in ("MESHKIT_CACHE", "MESHKIT_CACHE_BYTES"):
        monkeypatch.setenv(name, "")  # monkeypatch restores the variables that a campaign sets.
    with capfd.disabled():  # An attack reads what a command prints.
        assert {campaign(tmp_path)(number).run() for number in range(20)} == outcomes


def test_a_door_that_is_open_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(doors, "load_function", lambda *_: None)
    attacks = (doors.settings(tmp_path)(number) for number in range(200))
    taken = next(attack for attack in attacks if not attack.name.startswith("xla."))
    with pytest.raises(harness.Broken, match="it is taken"):
        taken.run()
