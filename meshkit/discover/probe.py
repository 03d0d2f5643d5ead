"""Probe: the four questions that discovery asks a machine, and who answers them.

A live machine, a recorded bundle and a test fixture answer alike, so that every line of discovery runs without a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from meshkit.config.bounded import LARGEST_FILE_BYTES
from meshkit.discover.nvml import read_nvml

_LARGEST_SYSFS_BYTES = 65_536
_COMMAND_TIMEOUT_S = 30.0
_ENGLISH = {"LC_ALL": "C", "LANG": "C"}  # what commands print must not depend on the user's language


class Probe(Protocol):
    """What discovery may ask; an answer that does not exist is None (or empty), never an exception."""

    name: str

    def read_file(self, path: str) -> str | None:
        """The text of a file of the machine."""
        ...

    def list_dir(self, path: str) -> tuple[str, ...]:
        """The names in a folder of the machine, sorted."""
        ...

    def run(self, *command: str) -> str | None:
        """What a command prints; None where it is missing or fails."""
        ...

    def nvml(self) -> Mapping[str, Any] | str:
        """NVML's answers as plain data (`nvml.Snapshot`), or why there are none."""
        ...


class LiveProbe:
    """This machine."""

    name = "this machine"

    def read_file(self, path: str) -> str | None:
        try:
            with open(path, "rb") as file:
                return file.read(_LARGEST_SYSFS_BYTES).decode("utf-8", errors="replace")
        except (OSError, ValueError):
            return None

    def list_dir(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(entry.name for entry in Path(path).iterdir()))
        except OSError:
            return ()

    def run(self, *command: str) -> str | None:
        program = shutil.which(command[0])
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *command[1:]],
                capture_output=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
                env=os.environ | _ENGLISH,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout[:LARGEST_FILE_BYTES].decode("utf-8", errors="replace") if done.returncode == 0 else None

    def nvml(self) -> Mapping[str, Any] | str:
        return read_nvml()


class FixtureProbe:
    """Answers that were written down: by a test, or read from a bundle."""

    def __init__(
        self,
        *,
        files: Mapping[str, str] | None = None,
        commands: Mapping[str, str] | None = None,
        nvml: Mapping[str, Any] | str = "no NVIDIA driver",
        name: str = "a fixture",
    ):
        self.name, self.files, self.commands, self.answers = name, dict(files or {}), dict(commands or {}), nvml

    def read_file(self, path: str) -> str | None:
        return self.files.get(path)

    def list_dir(self, path: str) -> tuple[str, ...]:
        prefix = path.rstrip("/") + "/"
        return tuple(sorted({file[len(prefix) :].split("/")[0] for file in self.files if file.startswith(prefix)}))

    def run(self, *command: str) -> str | None:
        return self.commands.get(" ".join(command))

    def nvml(self) -> Mapping[str, Any] | str:
        return self.answers


class RecordingProbe(FixtureProbe):
    """Another probe's answers, written down as they are given."""

    def __init__(self, probe: Probe):
        super().__init__(name=probe.name)
        self.probe = probe

    def read_file(self, path: str) -> str | None:
        text = self.probe.read_file(path)
        if text is not None:
            self.files[path] = text
        return text

    def list_dir(self, path: str) -> tuple[str, ...]:
        return self.probe.list_dir(path)

    def run(self, *command: str) -> str | None:
        text = self.probe.run(*command)
        if text is not None:
            self.commands[" ".join(command)] = text
        return text

    def nvml(self) -> Mapping[str, Any] | str:
        self.answers = self.probe.nvml()
        return self.answers
