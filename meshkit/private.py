"""Folders of meshkit's own, which meshkit makes and marks, and which no other user may enter.

    private_folder(path) -> a new folder with mode 0700 and the mark, or an old one with the right owner, mode and mark
    open_own, write_whole -> read or write a file in it, which only this user may write

This is the one policy for all files that meshkit runs, trusts or removes without asking: compiled programs,
executables, certificates. In a folder without the mark, meshkit removes nothing and changes no mode.
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
    """The reason why a folder or file is not private to this user, as text for a message."""


def private_folder(folder: Path) -> Path:
    """Return the real path of a folder of meshkit's own; make it and its parents if they are missing.

    An existing folder that is private and empty is marked.

    Raises:
        NotPrivate: `check_private` refuses the folder, or it has files but no mark.
    """
    mark = folder / MARK
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # The mark is checked twice: between the checks another process may mark the folder, then write.
        if not mark.exists() and os.listdir(folder) and not mark.exists():
            raise NotPrivate("there are files in it, and meshkit did not make it")
        check_private(folder)
        mark.touch(mode=0o600)
    except OSError as error:
        raise NotPrivate(error.strerror or str(error)) from None
    return Path(os.path.realpath(folder))


def check_private(folder: Path) -> None:
    """Refuse a folder that other users may enter.

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
    """Return a descriptor to read a file, which must be a regular file of this user that others cannot write.

    Raises:
        OSError: it is missing, unreadable, a link, no regular file, another user's, or others may write it.
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
    """Write a file that only this user can read, completely or not at all.

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
