"""Compiled programs kept on disk: program, target, options and versions -> what XLA made of them.

    export (program bytes) + request -> program_key -> load | compile, store

A key is a hash of everything that reaches the compiler, so a hit is what a compile would give. That includes the lines
of source that each operation comes from, down to where the step was planned from: the report shows them. An entry is
a JSON header and the scheduled HLO, in the folder `programs` of `store.cache_root`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.compile.preflight import version_of
from meshkit.compile.scratch import scratch_folder
from meshkit.compile.store import DamagedEntry, Store, cache_root, max_bytes, private_folder, write_whole
from meshkit.errors import ConfigError

_MAGIC = b"meshkit program 1\n"
_SUFFIX = ".program"
_TEXT = ".pbtxt"  # what XLA reads by its path, and takes for nothing else
# Whatever takes part in compiling: XLA and what it calls, and the libraries whose versions it asks for.
_DISTRIBUTIONS = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc",
    "nvidia-nvjitlink-cu12",
    "nvidia-nvjitlink",
    "nvidia-nvvm",
)
_COMPILER = ("compile/child.py", "compile/options.py", "hlo/proto.py")
# Variables by which jax, XLA and its plugins change what they compile.
_VARIABLES = ("JAX_", "XLA_", "TF_", "MOSAIC_", "TRITON_", "CUDA_", "MESHKIT_XLA_")


@dataclass(frozen=True)
class KeptProgram:
    """The output of the compiler process."""

    result: Mapping[str, Any]
    log: str
    module: bytes  # serialized, scheduled


def program_key(program: bytes, request: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """A hash of all that decides what XLA makes of a program.

    Args:
        program: as `jax.export` serializes it.
        request: what the compiler process gets with it: target, topology, mesh, options.
        environment: of the compiler process.
    """
    decided_by = {
        "program": hashlib.sha256(program).hexdigest(),
        "request": request,
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
        "environment": {k: v for k, v in environment.items() if k.startswith(_VARIABLES)},
        "compiler": _source_digest(),
        "files": _named_files(request.get("compiler_options") or {}),
    }
    return hashlib.sha256(json.dumps(decided_by, sort_keys=True, default=repr).encode()).hexdigest()


def _named_files(options: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the files that options name, such as a profile of measured costs: they are read by the compiler."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if name.endswith("_path") and isinstance(value, str) and value:
            path = Path(value)
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                with contextlib.suppress(OSError):
                    found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def cache_folder() -> Path | None:
    """The private folder that programs are kept in, made if need be; None where none is wanted or can be made.

    Raises:
        ConfigError: `MESHKIT_CACHE` names a folder that cannot serve, or `MESHKIT_CACHE_BYTES` is no number.
    """
    root = cache_root()
    if root is None:
        return None
    folder, named = root / "programs", "MESHKIT_CACHE" in os.environ
    problem = private_folder(folder, of_code=False)
    if problem and named:
        raise ConfigError(
            f"the cache folder that MESHKIT_CACHE names cannot be used: {problem}.",
            at=str(folder),
            hint="MESHKIT_CACHE=off, or a folder of your own",
        )
    return None if problem else folder


def load(folder: Path, key: str) -> KeptProgram | None:
    """What was kept under a key; None if nothing was.

    Raises:
        DamagedEntry: the file is not what was written; it is removed.
    """
    body = _store(folder).read(key + _SUFFIX)
    if body is None:
        return None
    try:
        length = int.from_bytes(body[:8], "little")
        header = json.loads(body[8 : 8 + length])
        return KeptProgram(dict(header["result"]), str(header["log"]), zlib.decompress(body[8 + length :]))
    except (ValueError, KeyError, TypeError, zlib.error):  # sealed, and yet of another form
        with contextlib.suppress(OSError):
            (folder / (key + _SUFFIX)).unlink()
        raise DamagedEntry(f"{key}{_SUFFIX} was damaged") from None


def store(folder: Path, key: str, made: KeptProgram) -> None:
    """Keeps a program: header length (8 bytes), header, compressed module."""
    header = json.dumps({"result": dict(made.result), "log": made.log}).encode()
    body = len(header).to_bytes(8, "little") + header + zlib.compress(made.module, 1)
    _store(folder).write(key + _SUFFIX, body)


def _store(folder: Path) -> Store:
    return Store(folder, max_bytes(), _MAGIC)


def profile_text(costs: Mapping[str, float]) -> str:
    """Seconds of instructions as the text form of `tensorflow.profiler.ProfiledInstructionsProto`."""
    return "".join(f'costs {{ name: "{name}" cost_us: {s * 1e6:.6g} }}\n' for name, s in sorted(costs.items()))


@contextlib.contextmanager
def text_file(text: str) -> Iterator[Path]:
    """A file with a text that XLA reads by its path, which is the same for the same text; kept where programs are.

    Raises:
        ConfigError: as `cache_folder`.
        OSError: it cannot be written, not even among temporary files.
    """
    name = hashlib.sha256(text.encode()).hexdigest()[:32] + _TEXT
    with contextlib.ExitStack() as stack:
        folder = cache_folder() or stack.enter_context(scratch_folder())
        path = folder / name
        with contextlib.suppress(OSError):  # a cache on a full disk: what follows writes elsewhere
            write_whole(path, text.encode())
        if not path.exists():
            path = stack.enter_context(scratch_folder()) / name
            write_whole(path, text.encode())
        yield path


def _source_digest() -> str:
    """Digest of the code that runs in the compiler process: its output is what is kept."""
    sources = (Path(__file__).parent.parent.joinpath(name).read_bytes() for name in _COMPILER)
    return hashlib.sha256(b"\0".join(sources)).hexdigest()
