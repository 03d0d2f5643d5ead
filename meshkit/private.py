"""Folders that are meshkit's own: made and marked by it, and closed to everybody but their user.

    private_folder(path) -> made with mode 0700 and the mark, or checked: a folder, of this user, closed, marked
    open_own, write_whole -> the files in it, each of this user alone

One policy for all that is run, trusted or removed without a question: compiled programs, executables, certificates. A
folder without the mark is somebody's: nothing in it is removed, and no mode of it is changed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

MARK = ".meshkit"  # An empty file.


class NotPrivate(Exception):
    """Why a folder or file is not this user's alone, for people."""


def private_folder(folder: Path) -> Path:
    """Return a folder of meshkit's own, without links in its path; it and those above it are made where missing.

    An empty one that is private is taken, and marked.

    Raises:
        NotPrivate: `check_private` says why; or there are files in it, and no mark.
    """
    mark = folder / MARK
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # Asked twice: another process may mark it, then write, in between.
        if not mark.exists() and os.listdir(folder) and not mark.exists():
            raise NotPrivate("there are files in it, and meshkit did not make it")
        check_private(folder)
        mark.touch(mode=0o600)
    except OSError as error:
        raise NotPrivate(error.strerror or str(error)) from None
    return Path(os.path.realpath(folder))


def check_private(folder: Path) -> None:
    """Stop at a folder that others may enter.

    Raises:
        NotPrivate: it is a link or no folder, belongs to another user, others may enter it, or it cannot be written.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        raise NotPrivate(error.strerror or str(error)) from None
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        raise NotPrivate("it is a link")
    if not stat.S_ISDIR(found.st_mode):
        raise NotPrivate("it is no folder")
    if found.st_uid != os.geteuid():
        raise NotPrivate(f"it belongs to another user (uid {found.st_uid})")
    if mode & 0o077:
        raise NotPrivate(f"others may enter it (mode {mode:04o}, not 0700)")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise NotPrivate("it cannot be written")


def open_own(path: Path) -> int:
    """Return a descriptor of a file to read: a regular one of this user, which others cannot write.

    Raises:
        OSError: there is none, it cannot be read, or it is another kind of thing (a link, of another user, ...).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        problem = "it is no file"
    elif found.st_uid != os.geteuid():
        problem = f"it belongs to another user (uid {found.st_uid})"
    elif found.st_mode & 0o022:
        problem = f"others may write it (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EPERM, problem, path.name)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that this user alone can read, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name[:16]}-{secrets.token_hex(8)}.tmp")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
