"""Secrets and terminal escapes taken out of what meshkit says and writes. Imports nothing of meshkit.

    text -> redact -> text | redact_streams: everything that this process prints
    text of a file -> printable -> text that moves no cursor

A secret is the value of an environment variable whose name says so (`TOKEN`, `*_PAT`, `*_KEY`, `*SECRET*`, ...), also
as repr, JSON, a URL or a shell would write it, and the user and password in a URL, wherever it stands. Of the
environment itself only `RECORDED` is ever written down. What a process prints may be a line of megabytes: all of this
is linear in the length of the text.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, TextIO
from urllib.parse import quote, unquote

MASK = "***"
# The only variables whose values a file of a run may hold.
RECORDED = ("XLA_FLAGS",)
_SECRET_NAME = re.compile(
    r"(?:^|_)TOKEN$|_(?:TOKENS|PATS?|KEYS?|PASS|PWD)$|API_?KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL",
    re.IGNORECASE,
)
# Linear: a match begins at `://`, and no part of it crosses a slash, so that no two attempts read the same text.
_URL = re.compile(r"://(?P<user>[^\s/@:'\"<>]*+):(?P<password>[^\s/@'\"<>]*+)@")
# Linear: a name is tried from its first letter only, and gives nothing back.
_ASSIGNED = re.compile(r"(?<![A-Za-z0-9_])(?P<name>[A-Za-z_][A-Za-z0-9_]*+)(?P<sign>['\"]?[ \t]{0,8}[=:][ \t]{0,8})")
_VALUE = re.compile(r"""'(?:[^'\\\n]|\\.)*+'?|"(?:[^"\\\n]|\\.)*+"?|[^\s'",;]++""")
# Control characters but tabs and line ends, marks that turn the direction of text around, halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
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
    text = redact_values(text, environment)
    said, done = [], 0
    for found in _ASSIGNED.finditer(text):
        if found.start() < done or not _is_assignment(found["name"], found["sign"]):
            continue
        value = _VALUE.match(text, found.end())
        if value:
            said += [text[done : found.end()], MASK]
            done = value.end()
    return "".join([*said, text[done:]])


def redact_values(text: str, environment: Mapping[str, str] | None = None) -> str:
    """A document without secrets of the environment and in URLs. JSON stays JSON."""
    for value in _secrets(os.environ if environment is None else environment):
        if value in text:
            text = text.replace(value, MASK)
    if "://" in text:
        text = _URL.sub(f"://{MASK}@", text)
    return text


def printable(text: str) -> str:
    """A text of several lines in which what a terminal would obey is written out: `\\x1b` for an escape character."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


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


def _is_assignment(name: str, sign: str) -> bool:
    """Whether a secret follows; `unexpected token: x` is prose."""
    return is_secret_name(name) and (name.lower() != "token" or name.isupper() or ":" not in sign)


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Values to take out, the longest first: one may contain another."""
    values = set()
    for name, value in environment.items():
        if is_secret_name(name):
            values |= {value.strip(), *(line.strip() for line in value.splitlines())}  # a key in several lines
        if "://" in value:
            for url in _URL.finditer(value):
                values |= {url["password"], unquote(url["password"])}
    found = {v for v in values if len(v) >= _SHORTEST and not v.replace(".", "").isdecimal()}
    return sorted({form for value in found for form in _written(value)}, key=len, reverse=True)


def _written(value: str) -> Iterable[str]:
    """A value as it is, and as repr, JSON, a shell and a URL write it, without their outer quotes."""
    yield value
    yield repr(value)[1:-1]
    yield repr(value + "'\"")[1:-4]  # as in a text with both quotes
    yield ascii(value)[1:-1]
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield value.replace("'", "'\"'\"'")
    yield quote(value, safe="", errors="replace")


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

    @property
    def buffer(self) -> _RedactedBytes:
        """What bytes are written to."""
        return _RedactedBytes(self._stream.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)


class _RedactedBytes:
    """The stream of bytes below a text stream, masked likewise; bytes that are no text pass as they are."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream

    def write(self, data: Any) -> int:
        data = bytes(data)
        self._stream.write(redact_values(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"))
        return len(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
