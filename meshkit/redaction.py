"""Secrets taken out of what meshkit says and writes. Imports nothing of meshkit.

    text -> redact -> text | redact_streams: everything that this process prints

A secret is the value of an environment variable whose name says so (`*_TOKEN`, `*_KEY`, `*SECRET*`, `*PASSWORD*`, ...),
and the user and password in a URL, wherever it stands. Of the environment itself only `RECORDED` is ever written down.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO
from urllib.parse import unquote

MASK = "***"
# The only variables whose values a file of a run may hold.
RECORDED = ("XLA_FLAGS",)
_SECRET_NAME = re.compile(r"_(?:TOKEN|KEY)S?$|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^\s/@:'\"<>]*):(?P<password>[^\s/@'\"<>]*)@")
_ASSIGNMENT = re.compile(
    r"\b(?P<name>[A-Za-z][A-Za-z0-9_]*)(?P<sign>\s?[=:]\s?)(?P<value>'[^'\n]*'|\"[^\"\n]*\"|[^\s'\",;]+)"
)
# A shorter value, or a number, stands in many other places: masking it would garble what is said, and break JSON.
_SHORTEST = 6


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or a key says that its value is a secret."""
    return bool(_SECRET_NAME.search(name))


def has_credentials(text: str) -> bool:
    """Whether a text holds a URL with a password."""
    return bool(_URL.search(text))


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """A message without secrets: those of the environment, in URLs, and what stands after `a_token =`.

    Args:
        text: any.
        environment: whose secrets are taken out; this process's by default.
    """
    return _ASSIGNMENT.sub(_mask_assignment, redact_values(text, environment))


def redact_values(text: str, environment: Mapping[str, str] | None = None) -> str:
    """A document without secrets of the environment and in URLs. JSON stays JSON."""
    for value in _secrets(os.environ if environment is None else environment):
        if value in text:
            text = text.replace(value, MASK)
    if "://" in text:
        text = _URL.sub(lambda found: f"{found['scheme']}{MASK}@", text)
    return text


def recorded_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The part of the environment that may be written down."""
    env = os.environ if environment is None else environment
    return {name: redact(env[name], env) for name in RECORDED if name in env}


def redact_streams() -> None:
    """From here on this process prints no secret of its environment; nothing changes where there is none."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Redacted) and _secrets(os.environ):
            setattr(sys, name, _Redacted(stream))


def _mask_assignment(found: re.Match) -> str:
    return f"{found['name']}{found['sign']}{MASK}" if is_secret_name(found["name"]) else found[0]


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Values to take out, the longest first: one may contain another."""
    values = set()
    for name, value in environment.items():
        if is_secret_name(name):
            values |= {value.strip(), *(line.strip() for line in value.splitlines())}  # a key in several lines
        if "://" in value:
            for url in _URL.finditer(value):
                values |= {url["password"], unquote(url["password"])}
    found = (v for v in values if len(v) >= _SHORTEST and not v.replace(".", "").isdecimal())
    return sorted(found, key=len, reverse=True)


class _Redacted:
    """A text stream that masks what is written to it; in all else the stream it is around.

    A secret that is written in two pieces, as no print does, would pass.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact_values(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)
