"""Decode the wire format of protocol buffers, in a whole file in memory.

`Buffer.fields` walks one message in Python; `Buffer.varints` decodes many numbers at once with numpy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshkit.config.files import open_regular, unpacked

_LARGEST_UNPACKED_BYTES = 8 * 2**30
_MOST_TOGETHER_BYTES = 1 << 20  # Limit on the bytes of strings that are decoded at once.
_PAD = 32  # Zero bytes after the data, since reads of a damaged event may go a little beyond its end.
_CONTINUES = np.uint64(0x8080808080808080)
_PAYLOAD = np.uint64(0x7F7F7F7F7F7F7F7F)
_VARINT, _FIXED64, _MESSAGE, _FIXED32 = 0, 1, 2, 5


class WireError(Exception):
    """Bytes that are not a protocol buffer."""


class Malformed(WireError):
    """The bytes are a protocol buffer, but not the expected message."""


def span_of(value: object) -> tuple[int, int]:
    """Return (start, end) of a message or string.

    Raises:
        Malformed: the value is a number.
    """
    if not isinstance(value, tuple):
        raise Malformed("a number stands where a message belongs")
    return value


def _memory(size: int) -> mmap.mmap:
    """Return memory for `size` bytes and zeros after them; single pages of it can be freed."""
    memory = mmap.mmap(-1, size + _PAD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Huge pages halve the time to fill the memory.
        with suppress(OSError):  # The kernel may not support huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def assembled(word: np.ndarray) -> np.ndarray:
    """Return [n] the varint at the start of each 8-byte word: its 7-bit groups are joined into pairs, fours, eights."""
    stop = ~word & _CONTINUES
    value = word & (stop ^ (stop - np.uint64(1))) & _PAYLOAD  # Without a last byte in the word, all eight are used.
    value = (value & np.uint64(0x007F007F007F007F)) | ((value & np.uint64(0x7F007F007F007F00)) >> np.uint64(1))
    value = (value & np.uint64(0x00003FFF00003FFF)) | ((value & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2))
    value = (value & np.uint64(0x000000000FFFFFFF)) | ((value & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4))
    return value.view(np.int64)


@dataclass(frozen=True)
class Buffer:
    """A file in memory."""

    path: Path
    size: int
    memory: mmap.mmap
    data: memoryview
    """The bytes and the padding, for loops in Python."""
    bytes: np.ndarray
    """The same memory as an array."""
    words: np.ndarray
    """[size + 25] the eight bytes from every position, as a little-endian number; a view."""

    @classmethod
    def read(cls, path: Path) -> Buffer:
        """Read a whole file, unpacked if its name ends in `.gz`.

        Raises:
            OSError: the file cannot be read.
            WireError: the file is not a whole gzip file, or unpacks to more than 8 GiB or 100 times its size.
        """
        if path.suffix == ".gz":
            try:
                with open_regular(path) as packed:
                    return cls.from_pieces(path, list(unpacked(packed, _LARGEST_UNPACKED_BYTES)))
            except ValueError as e:
                raise WireError(str(e)) from None
        with open_regular(path) as f:
            memory = _memory(os.fstat(f.fileno()).st_size)
            with memoryview(memory) as room:
                size = f.readinto(room[: len(room) - _PAD])
        return cls._over(path, memory, size)

    @classmethod
    def from_pieces(cls, path: Path, pieces: list[bytes]) -> Buffer:
        """Return the buffer of a file from the pieces of its content; the list `pieces` is emptied."""
        size, at = sum(map(len, pieces)), 0
        memory = _memory(size)
        pieces.reverse()
        while pieces:
            piece = pieces.pop()
            memory[at : at + len(piece)] = piece
            at += len(piece)
        return cls._over(path, memory, size)

    @classmethod
    def _over(cls, path: Path, memory: mmap.mmap, size: int) -> Buffer:
        data = np.frombuffer(memory, np.uint8)
        words = np.ndarray(shape=(size + _PAD - 7,), dtype="<u8", buffer=data.data, strides=(1,))
        return cls(path, size, memory, data.data, data, words)

    def forget(self, start: int, end: int) -> None:
        """Free the memory of bytes that are not needed again; they read as zeros from now on."""
        first, last = -(-start // mmap.PAGESIZE), end // mmap.PAGESIZE
        if last > first and hasattr(self.memory, "madvise"):
            self.memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Return the number at a position, and the position after it.

        Raises:
            WireError: the number does not end before `end`, or has more than ten bytes.
        """
        if at < end and (value := self.data[at]) < 0x80:
            return value, at + 1
        value = shift = 0
        while at < end:
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
            if shift > 63:
                break
        raise WireError(f"a number at byte {at} has no end")

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int | bytes | tuple[int, int]]]:
        """Yield (field number, value) of a message: a value is a signed number, 4 or 8 bytes, or (start, end) of bytes.

        Raises:
            WireError: the bytes are no message.
        """
        at = start
        while at < end:
            key, at = self.varint(at, end)
            number, kind = key >> 3, key & 7
            if kind == _VARINT:
                value, at = self.varint(at, end)
                yield number, value - (1 << 64) if value >> 63 else value
            elif kind == _MESSAGE:
                length, at = self.varint(at, end)
                yield number, (at, self._inside(at, length, end))
                at += length
            elif kind in (_FIXED64, _FIXED32):
                length = 8 if kind == _FIXED64 else 4
                yield number, bytes(self.data[at : self._inside(at, length, end)])
                at += length
            else:
                raise WireError(f"byte {at} begins no field")
            if number == 0:
                raise WireError(f"a field without a number before byte {at}")

    def skip(self, at: int, end: int) -> int:
        """Return the position after the field that begins at `at`.

        Raises:
            WireError: no field begins there.
        """
        key, at = self.varint(at, end)
        kind = key & 7
        if kind == _VARINT:
            return self.varint(at, end)[1]
        if kind == _MESSAGE:
            length, at = self.varint(at, end)
            return self._inside(at, length, end)
        if kind in (_FIXED64, _FIXED32):
            return self._inside(at, 8 if kind == _FIXED64 else 4, end)
        raise WireError(f"byte {at} begins no field")

    def text(self, start: int, end: int) -> str:
        return str(self.data[start:end], "utf-8", "replace")

    def texts(self, start: np.ndarray, end: np.ndarray) -> list[str]:
        """Return [n] strings from positions in ascending order; many are decoded at once and then split."""
        found: list[str] = []
        for i in range(0, len(start), 1024):
            begins, ends = start[i : i + 1024], end[i : i + 1024]
            first, last = int(begins[0]), int(ends[-1])
            if last - first > _MOST_TOGETHER_BYTES:
                found += [self.text(a, b) for a, b in zip(begins.tolist(), ends.tolist())]
                continue
            every = str(self.data[first:last], "latin-1")  # In latin-1, each character is one byte.
            cut = [every[a:b] for a, b in zip((begins - first).tolist(), (ends - first).tolist())]
            found += cut if every.isascii() else [t.encode("latin-1").decode("utf-8", "replace") for t in cut]
        return found

    def varints(self, at: np.ndarray, *, wide: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return [n] the varint at each position, and [n] its length in bytes.

        A varint of more than eight bytes gets length 0. With `wide`, all ten bytes of such a varint (negative numbers
        have ten) are decoded, and the length must not be used.
        """
        word = self.words[at]
        stop = ~word & _CONTINUES
        length = np.where(stop == 0, 0, (np.bitwise_count(stop ^ (stop - np.uint64(1))) >> 3)).astype(np.int64)
        value = assembled(word)
        if wide and (long := stop == 0).any():
            value[long] |= self._ninth_and_tenth(at[long]).view(np.int64)
        return value, length

    def _ninth_and_tenth(self, at: np.ndarray) -> np.ndarray:
        ninth, tenth = self.bytes[at + 8].astype(np.uint64), self.bytes[at + 9].astype(np.uint64)
        more = ninth >= np.uint64(0x80)
        return ((ninth & np.uint64(0x7F)) << np.uint64(56)) | np.where(more, tenth << np.uint64(63), np.uint64(0))

    def _inside(self, at: int, length: int, end: int) -> int:
        if at + length > end:
            raise WireError(f"{length} bytes from byte {at} on reach beyond the {end} there are")
        return at + length
