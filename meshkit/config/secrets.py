"""No secret in an experiment file: the file is copied into the run folder and shown in reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshkit.config.document import Override
from meshkit.config.problems import Key, SpecError, dotted
from meshkit.redaction import has_credentials, is_secret_name


def check_secrets(table: Mapping[str, Any], overrides: Sequence[Override] = ()) -> None:
    """Stops at a URL with a password, and at a text under a key of `[model]` whose name says that it is secret.

    Args:
        table: of the experiment.
        overrides: what was laid over it: by now a URL may look like a path there.

    Raises:
        SpecError: which key, without its value.
    """
    pending: list[tuple[Key, Any]] = [((), table), *((o.key, o.raw) for o in overrides)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend(((*path, str(key)), item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend(((*path, str(index)), item) for index, item in enumerate(value))
        elif isinstance(value, str):
            named = path[:1] == ("model",) and is_secret_name(path[-1])
            if named or has_credentials(value):
                what = "is named like a secret" if named else "is a URL with a password"
                raise SpecError(
                    f"{dotted(path)} {what}, and an experiment file is copied into every run folder.",
                    key=path,
                    hint="an environment variable, which the model's own code reads",
                )
