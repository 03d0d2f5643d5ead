"""Test that requirements.txt has what constraints.txt pins, with hashes, complete, and without addresses."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.releases import needs_pinned_jaxlib

ROOT = Path(__file__).parents[1]
LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.+!]+)(?: ; sys_platform == .linux.)?"
    r"(?: --hash=sha256:[0-9a-f]{64})+"
)


@pytest.fixture(scope="module")
def pinned():
    """Return name -> version of requirements.txt."""
    text = (ROOT / "requirements.txt").read_text()
    lines = [line for line in text.replace(" \\\n   ", "").splitlines() if not line.startswith("#")]
    found = [LINE.fullmatch(line) for line in lines]
    assert None not in found, [line for line, match in zip(lines, found) if match is None]
    names = [canonicalize_name(match["name"]) for match in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, (match["version"] for match in found)))


def test_it_agrees_with_the_constraints(pinned):
    lines = (ROOT / "constraints.txt").read_text().split()
    constraints = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert pinned == constraints


@needs_pinned_jaxlib
def test_it_has_every_package_that_any_of_them_needs(pinned):
    """The installed packages, whose metadata is read, are those that the constraints pin."""
    todo = [Requirement(r) for r in metadata.requires("meshkit") or ()]
    wanted = {"", "plan", "dev"}
    todo = [r for r in todo if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in wanted)]
    seen = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            assert name in pinned
            assert requirement.specifier.contains(pinned[name], prereleases=True), requirement
            further = [Requirement(r) for r in metadata.requires(name) or ()]
            todo += [r for r in further if r.marker is None or r.marker.evaluate({"extra": extra})]
    assert len(seen) > 60


def test_no_file_of_pins_names_an_address():
    for name in ("requirements.txt", "constraints.txt"):
        text = (ROOT / name).read_text()
        assert "://" not in text
        assert not re.search(r"^\s*(-i|-f|-e|--index|--extra-index|--find-links|--trusted-host)", text, re.MULTILINE)
        assert " @ " not in text
