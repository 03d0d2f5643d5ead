"""`[data] source` -> one sequence of tokens: bytes of text, or a token file.

`"python-stdlib"` is the source code of the standard library of the running Python: real text that every machine has.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from meshkit.config.experiment import Experiment

STDLIB = "python-stdlib"
_TOKEN_DTYPES = {".bin": "<u2", ".u8": "u1", ".u16": "<u2", ".u32": "<u4"}
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def is_token_source(source: str) -> bool:
    """Whether a source is tokens (the standard library, a folder, a file), not `"pkg.mod:fn"`."""
    return source == STDLIB or ":" not in source or Path(source).exists()


def open_tokens(experiment: Experiment) -> np.ndarray:
    """The tokens of the experiment's source: uint8 of text, or the memory-mapped array of a token file.

    A token file is `.npy`, or raw little-endian integers: `.u8`, `.u16` (also `.bin`), `.u32`.

    Raises:
        ConfigError: no such file, an empty folder, or a file of another kind.
    """
    source = experiment.data.source
    if source == STDLIB:
        return text_tokens(stdlib_files())
    path = Path(source)
    if path.is_dir():
        tokens = text_tokens(p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p, path))
        if not len(tokens):
            raise experiment.error("data.source", f"the folder {path} has no text files.")
        return tokens
    if not path.is_file():
        raise experiment.error("data.source", f"there is no file or folder {path}.", hint=f'"{STDLIB}"')
    return _open_token_file(experiment, path)


def stdlib_files() -> list[Path]:
    """Source files of the standard library, without its tests, in the order of their paths inside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p.relative_to(root) for p in root.rglob("*.py"))
    return [root / p for p in sorted(files, key=Path.as_posix) if not _SKIPPED_FOLDERS.intersection(p.parts)]


def text_tokens(files: Iterable[Path]) -> np.ndarray:
    """The bytes of all files one after the other, as uint8; files that hold a NUL byte are no text and are left out."""
    contents = (p.read_bytes() for p in files)
    return np.frombuffer(b"".join(c for c in contents if b"\0" not in c), np.uint8)


def _open_token_file(experiment: Experiment, path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise experiment.error("data.source", f"{path} cannot be read as .npy: {error}.") from error
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise experiment.error("data.source", f"{path} holds {tokens.dtype}{list(tokens.shape)}, not a row of ids.")
        return tokens
    if path.suffix not in _TOKEN_DTYPES:
        known = ", ".join((".npy", *_TOKEN_DTYPES))
        raise experiment.error("data.source", f"{path} is not a token file.", hint=f"a folder, or one of {known}")
    dtype = np.dtype(_TOKEN_DTYPES[path.suffix])
    if not path.stat().st_size or path.stat().st_size % dtype.itemsize:
        raise experiment.error("data.source", f"{path} has {path.stat().st_size} bytes, not whole {dtype} tokens.")
    return np.memmap(path, dtype, mode="r")


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
