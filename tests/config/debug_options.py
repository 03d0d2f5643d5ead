"""Read which XLA options this jaxlib has from its own descriptor, for tests and for `benchmarks.attack`."""

import mmap
from pathlib import Path

import jaxlib

from meshkit.hlo.proto import messages, read_fields


def fields_of_debug_options() -> dict[str, int]:
    """Return the type of each option by name, from the descriptor of xla/xla.proto that the library carries."""
    library = Path(jaxlib.__file__).with_name("libjax_common.so")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start, last = content.find(b"\n\rxla/xla.proto\x12\x03xla"), b"b\x06proto3"
        described = read_fields(content[start : content.find(last, start) + len(last)])
    options = next(m for m in messages(described, 4) if m[1] == [b"DebugOptions"])
    return {f[1][0].decode(): f[5][0] for f in messages(options, 2)}
