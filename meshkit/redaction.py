"""Remove secrets and terminal escapes from what meshkit prints and writes. This module imports nothing of meshkit.

    text -> redact -> text without secrets | redact_streams does the same for sys.stdout and sys.stderr
    text of a file -> printable -> text without control characters

A secret is the value of an environment variable with a name such as `TOKEN`, `*_PAT`, `*_KEY` or `*SECRET*`, also in
the forms of repr, JSON, URLs and shells. The user and password in any URL are secrets too. Of the environment itself,
only the variables in `RECORDED` are ever written. A printed line may have megabytes, and a secret may have thousands of
lines. So a pattern of six sets of characters first finds places where a secret may begin. A table of the first six
characters of all secrets then confirms a place, and a binary search finds the secret.
"""

from __future__ import annotations

import bisect
import functools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
# Linear: a name is tried from its first letter only, and does not backtrack.
_ASSIGNED = re.compile(r"(?<![A-Za-z0-9_])(?P<name>[A-Za-z_][A-Za-z0-9_]*+)(?P<sign>['\"]?[ \t]{0,8}[=:][ \t]{0,8})")
_VALUE = re.compile(r"""'(?:[^'\\\n]|\\.)*+'?|"(?:[^"\\\n]|\\.)*+"?|[^\s'",;]++""")
# Control characters except tabs and line ends, marks that change the direction of text, and surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# A shorter value, or a number, occurs in many other places: masking it would garble messages, and break JSON.
_SHORTEST = 6


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable or a key implies that its value is a secret."""
    return bool(_SECRET_NAME.search(name))


def has_credentials(text: str) -> bool:
    """Return whether a text holds a URL with a password."""
    return bool(_URL.search(text))


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a message without secrets: those of the environment, those in URLs, and values after `a_token =`.

    Args:
        environment: environment with the secrets, by default this process's.
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
    """Return a document without secrets of the environment and secrets in URLs. JSON stays valid."""
    if secrets := _secrets(tuple((os.environ if environment is None else environment).items())):
        text = secrets.masked(text)
    if "://" in text:
        text = _URL.sub(f"://{MASK}@", text)
    return text


def printable(text: str) -> str:
    """Return text with control characters written out, such as `\\x1b` for an escape character; line ends stay."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def recorded_environment() -> dict[str, str]:
    """Return the part of the environment that may be written to a file."""
    return {name: redact(os.environ[name]) for name in RECORDED if name in os.environ}


def redact_streams() -> None:
    """Mask secrets of the environment in sys.stdout and sys.stderr from here on; do nothing if there are none."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Redacted) and _secrets(tuple(os.environ.items())):
            setattr(sys, name, _Redacted(stream))


def _is_assignment(name: str, sign: str) -> bool:
    """Return whether a secret follows the name and the sign; `unexpected token: x` is prose."""
    return is_secret_name(name) and (name.lower() != "token" or name.isupper() or ":" not in sign)


@dataclass(frozen=True)
class _Secrets:
    """The values to mask, in every form in which they may be written."""

    forms: Sequence[str]
    inner: Sequence[int]
    """For each form the index of the longest other form that it begins with; -1 if there is none."""
    longest: int
    """Length of the longest form in characters."""
    anchors: Collection[str]
    """The first six characters of each form."""
    begins: re.Pattern[str]
    """Matches the first of six characters, each of which stands at its place in some anchor, not always the same."""

    @classmethod
    def from_values(cls, values: Iterable[str]) -> _Secrets:
        forms = sorted({form for value in values for form in _written(value)})
        inner, around = [], []
        for at, form in enumerate(forms):
            while around and not form.startswith(forms[around[-1]]):
                around.pop()
            inner.append(around[-1] if around else -1)
            around.append(at)
        anchors = {form[:_SHORTEST] for form in forms}
        first, *others = ("[" + "".join(map(re.escape, set(place))) + "]" for place in zip(*anchors, strict=True))
        begins = re.compile(f"{first}(?={''.join(others)})")
        return cls(forms, inner, max(map(len, forms)), anchors, begins)

    def masked(self, text: str) -> str:
        said, done = [], 0
        for found in self.begins.finditer(text):
            start = found.start()
            if text[start : start + _SHORTEST] not in self.anchors:
                continue
            end = start + self._length(text[start : start + self.longest])
            if end > max(start, done):
                if start >= done:
                    said += [text[done:start], MASK]
                done = end
        return "".join([*said, text[done:]]) if said else text

    def _length(self, text: str) -> int:
        """Return the length of the longest form that a text begins with; 0 if there is none.

        Among the sorted forms, the last one that is not after the text is this longest form, or begins with it.
        """
        at = bisect.bisect_right(self.forms, text) - 1
        while at >= 0 and not text.startswith(self.forms[at]):
            at = self.inner[at]
        return len(self.forms[at]) if at >= 0 else 0


@functools.lru_cache(maxsize=2)
def _secrets(environment: tuple[tuple[str, str], ...]) -> _Secrets | None:
    values = set()
    for name, value in environment:
        if is_secret_name(name):
            # A secret may have several lines.
            values |= {value.strip(), *(line.strip() for line in value.splitlines())}
        if "://" in value:
            for url in _URL.finditer(value):
                values |= {url["password"], unquote(url["password"])}
    found = {v for v in values if len(v) >= _SHORTEST and not v.replace(".", "").isdecimal()}
    return _Secrets.from_values(found) if found else None


def _written(value: str) -> Iterator[str]:
    """Yield a value as it is, and as repr, JSON, a shell and a URL write it, without their outer quotes."""
    yield value
    yield repr(value)[1:-1]
    yield repr(value + "'\"")[1:-4]  # In a text with both quotes.
    yield ascii(value)[1:-1]
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield value.replace("'", "'\"'\"'")
    yield quote(value, safe="", errors="replace")


class _Redacted:
    """A text stream that masks secrets in what is written to it; all else is passed on to the wrapped stream.

    A secret written in two pieces would not be masked, but print writes a text in one piece.
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
        return _RedactedBytes(self._stream.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)


class _RedactedBytes:
    """The byte stream of a text stream, with the same masking; bytes that are not text pass unchanged."""

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
