"""Tell apart the releases of jax under which the tests run: that of constraints.txt, and the oldest."""

import re
from importlib import metadata
from pathlib import Path

import pytest

JAXLIB = metadata.version("jaxlib")
BEFORE_0_12 = tuple(map(int, JAXLIB.split(".")[:2])) < (0, 12)
PINNED = re.search(r"^jaxlib==(\S+)$", (Path(__file__).parents[1] / "constraints.txt").read_text(), re.MULTILINE)
assert PINNED is not None

needs_pinned_jaxlib = pytest.mark.skipif(
    PINNED[1] != JAXLIB, reason=f"needs the jaxlib of constraints.txt, {PINNED[1]}; installed is {JAXLIB}"
)

_ITS_OWN = re.compile(
    r"^(?:WARNING: All log messages before absl::InitializeLog\(\) .*|I\d{4} .* cudart_stub\.cc:\d+\] .*)\n",
    re.MULTILINE,
)


def without_jaxlibs_lines(stderr: str) -> str:
    """Return what a process wrote to stderr, without the lines that jaxlib 0.11 always writes where no GPU is."""
    return _ITS_OWN.sub("", stderr)
