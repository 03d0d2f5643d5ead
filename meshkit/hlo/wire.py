"""Protocol buffers read by their wire format, without a schema.

jaxlib has no Python classes for XLA's messages; their field numbers never change meaning, so these few lines serve.
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator

from meshkit.errors import ProgramError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Fields = dict[int, list[int | bytes]]


def read_fields(message: bytes) -> Fields:
    """Field number -> values in order: int of a varint, bytes of everything else.

    Raises:
        ProgramError: the bytes are no message.
    """
    found: Fields = {}
    position, end = 0, len(message)
    try:
        while position < end:
            tag, position = _varint(message, position)
            kind = tag & 7
            if kind == _VARINT:
                value, position = _varint(message, position)
            else:
                if kind == _BYTES:
                    size, position = _varint(message, position)
                else:
                    size = {_FIXED64: 8, _FIXED32: 4}[kind]
                if position + size > end:
                    raise IndexError
                value = message[position : position + size]
                position += size
            found.setdefault(tag >> 3, []).append(value)
    except (IndexError, KeyError):
        raise ProgramError(f"not a protocol buffer: byte {position} of {end} is out of place.") from None
    return found


def ints(fields: Fields, number: int) -> list[int]:
    """A repeated integer field, packed or not."""
    return [x for value in fields.get(number, ()) for x in ([value] if isinstance(value, int) else _unpack(value))]


def integer(fields: Fields, number: int, default: int = 0) -> int:
    """An integer field; the default where the message leaves it out."""
    values = ints(fields, number)
    return values[-1] if values else default


def messages(fields: Fields, number: int) -> Iterator[bytes]:
    """The values of a repeated message, string or bytes field."""
    return (value for value in fields.get(number, ()) if isinstance(value, bytes))


def text(fields: Fields, number: int) -> str:
    """A string field; "" where the message leaves it out."""
    return next(messages(fields, number), b"").decode(errors="replace")


def _unpack(packed: bytes) -> list[int]:
    values, position = [], 0
    while position < len(packed):
        value, position = _varint(packed, position)
        values.append(value)
    return values


def _varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    if byte < 128:
        return byte, position + 1
    value, shift = byte & 127, 7
    while True:
        position += 1
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position + 1
        shift += 7
