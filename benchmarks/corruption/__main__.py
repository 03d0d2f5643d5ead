"""Run the whole campaign, and print the Markdown of `benchmarks/corruption/README.md`; `make corruption` runs it."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks.corruption import campaign  # Imported after the environment that jax reads is set.

_PACKAGES = ("meshkit", "jax", "jaxlib", "orbax-checkpoint", "tensorstore")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.corruption", description=__doc__)
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--clean", type=int, default=20)
    chosen = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    print("# Damaged checkpoints\n")
    print(f"`make corruption`, with Python {platform.python_version()}, {versions}.\n")
    print(f"{_EXPLAINS}\n")
    print(f"Undamaged checkpoints restored bit for bit: {campaign.clean_restores(chosen.clean)} of {chosen.clean}.\n")
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch)
        campaign.save_steps(saved)
        for verify in ("own", "full", "off"):
            found = campaign.run(saved, range(chosen.damages), verify=verify)
            print(f'## `verify = "{verify}"`: {found_wrong(found)} of {chosen.damages} restored wrong\n')
            print(table(found))


_EXPLAINS = """\
Does a run restore a wrong state from a damaged checkpoint? A run saves two steps. Each trial copies them, damages one
file of the newer step (flips one bit, truncates it or deletes it) and restores. Every file has the same chance, so
metadata and the manifest are damaged as often as arrays. With `verify = "off"` meshkit compares only names and sizes;
the wrong states of that table are those that the checksums prevent. orbax gives its files random names, so the last
table differs a little from run to run."""


def found_wrong(found: Counter[tuple[str, str]]) -> int:
    """Return the number of wrong states, over all kinds of damage."""
    return sum(count for (_, outcome), count in found.items() if outcome == campaign.WRONG)


def table(found: Counter[tuple[str, str]]) -> str:
    """Return the outcomes by kind of damage, as Markdown."""
    head = "| damage | " + " | ".join(campaign.OUTCOMES) + " |\n|---|" + "---|" * len(campaign.OUTCOMES) + "\n"
    rows = (
        f"| {kind} | " + " | ".join(str(found[kind, o]) for o in campaign.OUTCOMES) + " |\n" for kind in campaign.KINDS
    )
    return head + "".join(rows)


if __name__ == "__main__":
    main()
