"""Entries on disk that may be thrown away: the folder under both caches, compiled programs and executables.

An entry is one file in a folder that only its owner can enter: a digest of its content, then the content. It is written
whole or not at all; one that is not what was written is a miss. Entries used longest ago go when all of a folder exceed
`$MESHKIT_CACHE_BYTES` (default 2 GiB). The folders lie under `meshkit` in `$XDG_CACHE_HOME`, or under `$MESHKIT_CACHE`
(`off` keeps nothing).
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

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

    folder: Path  # private, see `private_folder`
    most_bytes: int  # that all entries may take
    magic: bytes = b""  # that every entry begins with

    def read(self, name: str) -> bytes | None:
        """The content of an entry, which then counts as just used; None if there is none.

        Raises:
            DamagedEntry: the file is not what was written, and is removed; or it cannot be read.
        """
        path = self.folder / name
        try:
            sealed = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:
            raise DamagedEntry(f"{name} cannot be read: {e.strerror or e}") from None
        start = len(self.magic) + hashlib.sha256().digest_size
        content = sealed[start:]
        if sealed[:start] != self._seal(content):
            with suppress(OSError):
                path.unlink()
            raise DamagedEntry(f"{name} ({len(sealed)} bytes) was damaged")
        with suppress(OSError):
            os.utime(path)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Keeps an entry, and removes those used longest ago beyond the bound.

        A full disk or a folder that became unwritable costs the entry, never the work.
        """
        with suppress(OSError):
            write_whole(self.folder / name, self._seal(content) + content)
            self.trim(keep=name)

    def trim(self, keep: str = "") -> None:
        """Removes what writers left behind, then entries used longest ago until all fit the bound."""
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            with suppress(OSError):  # another process trims too
                found = path.stat()
                if path.suffix == ".tmp" and time.time() - found.st_mtime > _STALE_S:
                    path.unlink()
                elif stat.S_ISREG(found.st_mode) and path.suffix != ".tmp":
                    entries.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.most_bytes:
                return
            if path.name != keep or size > self.most_bytes:
                path.unlink(missing_ok=True)
                total -= size

    def _seal(self, content: bytes) -> bytes:
        return self.magic + hashlib.sha256(content).digest()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=f"{path.name[:16]}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


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


@contextmanager
def cache_off(*, when: bool = True) -> Iterator[None]:
    """Nothing is read or kept inside, by this process and those it starts."""
    before = os.environ.get("MESHKIT_CACHE")
    if when:
        os.environ["MESHKIT_CACHE"] = "off"
    try:
        yield
    finally:
        if when and before is None:
            del os.environ["MESHKIT_CACHE"]
        elif when and before is not None:
            os.environ["MESHKIT_CACHE"] = before


def private_folder(folder: Path, *, of_code: bool = True) -> str | None:
    """Makes a folder that its owner alone can enter, where there is none.

    Args:
        folder: to make or check.
        of_code: what is in it will be executed. Such a folder must be private already; any other is made so.

    Returns:
        What is wrong with it, None if nothing is: another owner, or it cannot be written. Of a folder of code also: a
        link, open to others, or in a folder in which others could put another one in its place.
    """
    mine = os.geteuid()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat() if of_code else folder.stat()
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISDIR(found.st_mode):
            return "it is a link"
        if found.st_uid != mine:
            return f"it belongs to another user (uid {found.st_uid})"
        if mode & 0o077 and of_code:
            return f"others may enter it (mode {mode:04o}, not 0700)"
        if mode & 0o077:
            folder.chmod(0o700)
        for parent in folder.resolve().parents if of_code else ():
            above = parent.stat()
            shared = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
            if shared or above.st_uid not in (0, mine):
                who = "others can write" if shared else f"uid {above.st_uid} owns"
                return f"{who} {parent}, and could put another folder in its place"
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"


def _home() -> Path:
    with suppress(RuntimeError):  # no HOME and no entry in the password file
        return Path.home()
    return Path("/nonexistent")
