"""Reading what somebody else made: compressed data that would fill the memory, names that lead elsewhere.

A capture, a bundle or a checkpoint travels between machines and people. Each names files and holds compressed parts.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

_GZIP = 16 + zlib.MAX_WBITS
_PIECE = 2**20


def gunzip(data: bytes, most_bytes: int) -> bytes:
    """The content of gzip data (all of its members).

    Raises:
        ValueError: it is damaged or incomplete, or has more than `most_bytes`; no more than that is ever unpacked.
    """
    pieces, total = [], 0
    while data:
        unpack = zlib.decompressobj(_GZIP)
        while not unpack.eof:
            try:
                piece = unpack.decompress(data, _PIECE)
            except zlib.error as error:
                raise ValueError(f"it is no gzip data: {error}") from None
            total += len(piece)
            if total > most_bytes:
                raise ValueError(f"it unpacks to more than {most_bytes / 2**20:g} MiB")
            pieces.append(piece)
            data = unpack.unconsumed_tail
            if not unpack.eof and not data and not piece:
                raise ValueError("it ends before its content does")
        data = unpack.unused_data.lstrip(b"\0")  # what fills up a tape's last block
    return b"".join(pieces)


def inside(folder: Path, name: str) -> Path | None:
    """The path of a file that a document in a folder names; None where it leads out of it, by `..`, `/` or a link."""
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        return None
    path = folder / name
    home = os.path.realpath(folder)
    return path if os.path.realpath(path).startswith(home.rstrip(os.sep) + os.sep) else None
