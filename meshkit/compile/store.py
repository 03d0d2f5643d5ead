"""Entries on disk that may be thrown away: the folder under both caches, compiled programs and executables.

An entry is one file in a folder that only its owner can enter: a digest of its content, then the content. It is written
whole or not at all; one that is not what was written, or not by this user, is a miss. Entries used longest ago go when
all of a folder exceed `$MESHKIT_CACHE_BYTES` (default 2 GiB). The folders lie under `meshkit` in `$XDG_CACHE_HOME`, or
under `$MESHKIT_CACHE` (`off` keeps nothing).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meshkit.compile.private import HeldFolder, open_own, write_whole
from meshkit.errors import ConfigError

DEFAULT_BYTES = 2 * 2**30
_OFF = {"", "0", "off", "no", "none", "false"}
# A writer that died leaves its temporary file; after an hour nobody is writing it any more.
_STALE_S = 3600.0


class DamagedEntry(Exception):
    """A file of a store that is not what was written, or cannot be read."""


@dataclass(frozen=True)
class Store:
    """A folder of sealed entries, each a file of its own."""

    folder: Path  # private, see `private.py`
    most_bytes: int  # that all entries may take
    magic: bytes = b""  # that every entry begins with
    held: HeldFolder | None = None
    """The folder where what is in it is run: nothing is looked up by its path again."""
    key: bytes = b""
    """With which entries and their names are sealed; b"": a digest that finds accidents alone."""

    def read(self, name: str) -> bytes | None:
        """The content of an entry, which then counts as just used; None if there is none.

        Raises:
            DamagedEntry: the file is not what was written, and is removed; or it cannot be read.
        """
        try:
            with self._opened() as at, os.fdopen(open_own(name, at), "rb") as file:
                sealed = file.read()
                start = len(self.magic) + hashlib.sha256().digest_size
                content = sealed[start:]
                if hmac.compare_digest(sealed[:start], self._seal(name, content)):
                    with suppress(OSError):
                        os.utime(file.fileno())
                    return content
                with suppress(OSError):
                    os.unlink(name, dir_fd=at)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise DamagedEntry(f"{name} cannot be read: {e.strerror or e}") from None
        raise DamagedEntry(f"{name} ({len(sealed)} bytes) was damaged")

    def write(self, name: str, content: bytes) -> None:
        """Keeps an entry, and removes those used longest ago beyond the bound.

        A full disk or a folder that became unwritable costs the entry, never the work.
        """
        with suppress(OSError):
            with self._opened() as at:
                write_whole(Path(name), self._seal(name, content) + content, at=at)
            self.trim(keep=name)

    def trim(self, keep: str = "") -> None:
        """Removes what writers left behind, then entries used longest ago until all fit the bound."""
        entries: list[tuple[float, int, str]] = []
        with self._opened() as at, os.scandir(at) as listed:
            for entry in listed:
                with suppress(OSError):  # another process trims too
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(".tmp"):
                        if time.time() - found.st_mtime > _STALE_S:
                            os.unlink(entry.name, dir_fd=at)
                    elif stat.S_ISREG(found.st_mode):
                        entries.append((found.st_mtime, found.st_size, entry.name))
            total = sum(size for _, size, _ in entries)
            for _, size, name in sorted(entries):
                if total <= self.most_bytes:
                    return
                if name != keep or size > self.most_bytes:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=at)
                    total -= size

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder, with a position of its own in its names."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        at = os.open(os.curdir, flags, dir_fd=self.held.descriptor) if self.held else os.open(self.folder, flags)
        try:
            yield at
        finally:
            os.close(at)

    def _seal(self, name: str, content: bytes) -> bytes:
        if not self.key:
            return self.magic + hashlib.sha256(content).digest()
        seal = hmac.new(self.key, name.encode() + b"\0", "sha256")
        seal.update(content)
        return self.magic + seal.digest()


def cache_root() -> Path | None:
    """Where everything is kept that may be thrown away; None where nothing is wanted.

    Raises:
        ConfigError: `MESHKIT_CACHE_BYTES` is no number.
    """
    named = os.environ.get("MESHKIT_CACHE")
    if named is not None and named.strip().lower() in _OFF:
        return None
    max_bytes()  # a wrong bound is said before anything is compiled
    if named is not None:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else _home() / ".cache") / "meshkit"


def max_bytes() -> int:
    """Bytes that all entries of a store together may take.

    Raises:
        ConfigError: `MESHKIT_CACHE_BYTES` is no number of bytes.
    """
    given = os.environ.get("MESHKIT_CACHE_BYTES")
    if given is None:
        return DEFAULT_BYTES
    if not given.strip().isdecimal():
        raise ConfigError(
            f"MESHKIT_CACHE_BYTES is '{given}', not a number of bytes.", hint=f"MESHKIT_CACHE_BYTES={DEFAULT_BYTES}"
        )
    return int(given)


def _home() -> Path:
    with suppress(RuntimeError):  # no HOME and no entry in the password file
        return Path.home()
    return Path("/nonexistent")
