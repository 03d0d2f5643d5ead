"""Hands a rendered job to the program that starts it: sbatch, kubectl, bash. Layer 2."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from meshkit.errors import ConfigError, RunError


def submit(command: Sequence[str], text: str) -> str:
    """Runs the command with the text as its input.

    Returns:
        What it printed.

    Raises:
        ConfigError: the program is not on this machine.
        RunError: it refused.
    """
    program = command[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not on this machine's PATH.", hint="--dry-run, which prints what would be handed to it"
        )
    done = subprocess.run(list(command), input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RunError(f"{program} ended with {done.returncode}: {said[-1] if said else 'it said nothing'}.")
    return done.stdout.strip()
