"""`candidates.jsonl`: every outcome of a search as a line, so that a search that was killed goes on.

The first line says what was searched: a file of another experiment, or of other versions, is not read. A line is
written whole by one call and synced; the torn last line of a process that was killed is cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from meshkit.config.experiment import Experiment
from meshkit.errors import ConfigError
from meshkit.verbs.plan.outcome import Outcome

JOURNAL_FILE = "candidates.jsonl"
_SCHEMA = "meshkit.candidates/1"


class Journal:
    """Outcomes by settings, kept in a file.

    Args:
        folder: of the search; None keeps them in memory.
        experiment: as it is without settings.

    Raises:
        ConfigError: the folder holds a search of something else, or a file that is none.
    """

    def __init__(self, folder: Path | None, experiment: Experiment):
        self.outcomes: dict[tuple[str, ...], Outcome] = {}
        self._path = folder / JOURNAL_FILE if folder else None
        if self._path is None:
            return
        header = _header(experiment)
        if self._path.exists():
            self._read(self._path, header)
        if not self._path.exists() or not self._path.stat().st_size:
            self._append(json.dumps(header))

    def add(self, outcome: Outcome) -> None:
        """Keeps an outcome."""
        self.outcomes[outcome.settings] = outcome
        self._append(outcome.model_dump_json())

    def _append(self, line: str) -> None:
        if self._path is None:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, path: Path, header: Mapping[str, str]) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        lines = whole.splitlines()
        if not lines:
            return
        hint = "another --out, or remove the file"
        try:
            found = json.loads(lines[0])
            if found.get("schema") != _SCHEMA:
                raise ValueError("no header")
        except (ValueError, AttributeError):
            raise ConfigError("this file is no record of a search.", at=str(path), hint=hint) from None
        other = [name for name, value in header.items() if found.get(name) != value]
        if other:
            what = "another experiment" if "experiment" in other else f"another version ({', '.join(other)})"
            raise ConfigError(f"this folder holds a search of {what}.", at=str(path), hint=hint)
        for number, line in enumerate(lines[1:], start=2):
            try:
                outcome = Outcome.model_validate_json(line)
            except ValidationError:
                raise ConfigError("this line is no outcome of a search.", at=f"{path}:{number}", hint=hint) from None
            if outcome.status != "error":  # what went wrong may not do so again
                self.outcomes[outcome.settings] = outcome


def _header(experiment: Experiment) -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("meshkit", "jax", "jaxlib")}
    text = experiment.to_toml()
    if experiment.cluster.calibration is not None:
        text += Path(experiment.cluster.calibration).read_text(encoding="utf-8")
    return {"schema": _SCHEMA, "experiment": hashlib.sha256(text.encode()).hexdigest()[:16], **versions}
