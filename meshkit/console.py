"""What every verb needs of the terminal: where text goes, how wide it is, and run folders."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from meshkit.errors import ConfigError


def run_folder(folder: Path) -> Path:
    """The folder, made if need be, before anything expensive begins.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise ConfigError(f"the run folder {folder} cannot be written: {e.strerror}.", hint="another --out") from None
    return folder


def width() -> int | None:
    """80 columns where the output is no terminal, so that logs read the same everywhere."""
    return None if sys.stdout.isatty() else 80


def stdout() -> Console:
    """A console for what a verb is asked for. Text is printed as it is: a name from a file may look like markup."""
    return Console(width=width(), markup=False)


def stderr() -> Console:
    """A console for progress and tables that must stay off stdout."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 80, markup=False)


def status(text: str) -> Any:
    """A spinner with text while the block runs; nothing where there is no terminal."""
    return stderr().status(Text(text))


def say(text: str) -> None:
    """Prints a line on stderr."""
    print(text, file=sys.stderr)
