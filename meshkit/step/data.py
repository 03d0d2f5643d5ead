"""`[data] source` -> sharded device batches, a function of the step number alone.

    source -> examples (random access) -> shuffled, endless index -> rows of this process -> device batches, prefetched

A source is tokens (text as bytes, or a token file), cut into windows, or the user's own `"pkg.mod:fn"`. The batch of
step s holds the shuffled examples s*B ... s*B + B-1, whatever the number of processes; so one integer, the step,
resumes the data exactly, on any number of machines.
"""

from __future__ import annotations

import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshkit.config.experiment import Experiment
from meshkit.config.rules import ShardingRules
from meshkit.config.user_code import describe_error, load_function, user_code
from meshkit.errors import ConfigError, MeshkitError, RunError
from meshkit.sharding.constrain import partition_spec
from meshkit.sharding.mesh import AnyMesh

STDLIB = "python-stdlib"  # the source code of the running Python's own library: real text that every machine has
_TOKEN_DTYPES = {".bin": "<u2", ".u8": "u1", ".u16": "<u2", ".u32": "<u4"}
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_PREFETCHED_BATCHES = 2
_CHUNK_TOKENS = 1 << 24
_MOST_CHUNKS = 64  # a corpus of more than a billion tokens is sampled, evenly


class Examples(Protocol):
    """Random access to examples, each a dict of arrays with fixed shapes; what `"pkg.mod:fn"` returns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]: ...


@dataclass(frozen=True)
class Windows:
    """Training examples cut from a token sequence: window i predicts tokens i*T+1 ... i*T+T from those before."""

    tokens: np.ndarray  # the whole sequence, possibly memory-mapped
    length: int  # T
    indices: np.ndarray  # the windows of this split

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = int(self.indices[index]) * self.length
        window = np.asarray(self.tokens[start : start + self.length + 1], np.int32)
        return {"tokens": window[:-1], "targets": window[1:], "weights": np.ones(self.length, np.float32)}


@dataclass(frozen=True)
class _Subset:
    """Some of the examples, by index."""

    examples: Examples
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self.examples[int(self.indices[index])]


@dataclass(frozen=True)
class Data:
    """Both splits of a source, and what is known about it."""

    train: Examples
    validation: Examples
    unigram_entropy_nats: float | None
    """Entropy of the token frequencies: the loss of the best model without context. None where there are no tokens."""


def open_data(experiment: Experiment) -> Data:
    """The experiment's data.

    Every k-th window or example (k = 1 / `validation_fraction`) is held out, so that both splits see all of the text.

    Raises:
        ConfigError: nothing there, too few tokens for one window in each split, or nothing to evaluate on.
    """
    fraction, length = experiment.data.validation_fraction, experiment.train.sequence_length
    if _is_token_source(experiment.data.source):
        tokens = open_tokens(experiment)
        every, train, held_out = _split((len(tokens) - 1) // length, fraction)
        if not len(train) or (fraction > 0 and not len(held_out)):
            raise experiment.error(
                "data.source",
                f"the source has {len(tokens)} tokens, too few to cut {every} windows of {length} tokens from.",
                hint="a shorter train.sequence_length",
            )
        data = Data(Windows(tokens, length, train), Windows(tokens, length, held_out), unigram_entropy_nats(tokens))
    else:
        examples = _load_examples(experiment)
        _, train, held_out = _split(len(examples), fraction)
        data = Data(_Subset(examples, train), _Subset(examples, held_out), None)
    if experiment.train.evaluate_every and not len(data.validation):
        raise experiment.error(
            "data.validation_fraction",
            f"nothing is held out to evaluate on: {fraction:g} of {len(data.train)} examples.",
            hint="a larger share or more examples, or train.evaluate_every = 0",
        )
    return data


def _split(count: int, fraction: float) -> tuple[int, np.ndarray, np.ndarray]:
    """k, and the indices of both splits."""
    indices = np.arange(count)
    every = max(2, round(1 / fraction)) if fraction > 0 else count + 1
    held_out = indices % every == every - 1
    return every, indices[~held_out], indices[held_out]


def _is_token_source(source: str) -> bool:
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
        return _text_tokens(stdlib_files())
    path = Path(source)
    if path.is_dir():
        hidden = lambda p: any(part.startswith(".") for part in p.relative_to(path).parts)
        tokens = _text_tokens(p for p in sorted(path.rglob("*")) if p.is_file() and not hidden(p))
        if not len(tokens):
            raise experiment.error("data.source", f"the folder {path} has no text files.")
        return tokens
    if not path.is_file():
        raise experiment.error("data.source", f"there is no file or folder {path}.", hint=f'"{STDLIB}"')
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


def stdlib_files() -> list[Path]:
    """Source files of the standard library, without its tests, in the order of their paths inside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p.relative_to(root) for p in root.rglob("*.py"))
    return [root / p for p in sorted(files, key=Path.as_posix) if not _SKIPPED_FOLDERS.intersection(p.parts)]


def _text_tokens(files: Iterable[Path]) -> np.ndarray:
    """The bytes of all files one after the other, as uint8; files that hold a NUL byte are no text and are left out."""
    contents = (p.read_bytes() for p in files)
    return np.frombuffer(b"".join(c for c in contents if b"\0" not in c), np.uint8)


def unigram_entropy_nats(tokens: np.ndarray, limit: int = 1 << 26) -> float:
    """-sum p log p of the token frequencies, over at most the first `limit` tokens."""
    counts = np.bincount(np.asarray(tokens[:limit]))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def check_tokens(experiment: Experiment, data: Data, model: Any) -> None:
    """Compares the token ids of the data with the (abstract) model's vocab, if it says it: `config.vocab` or `vocab`.

    Raises:
        ConfigError: an id that the model has no row for; look-ups would clamp it in silence.
    """
    vocab = getattr(getattr(model, "config", model), "vocab", None)
    if not isinstance(data.train, Windows) or not isinstance(vocab, int):
        return
    tokens = data.train.tokens
    if tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < vocab:
        return
    smallest, largest = _token_range(tokens)
    if smallest < 0 or largest >= vocab:
        wrong = smallest if smallest < 0 else largest
        raise experiment.error(
            "data.source",
            f"the data has token id {wrong}, but the vocab of {experiment.model.class_path} is {vocab}.",
            hint=f"model.vocab = {largest + 1}" if smallest >= 0 else "a token file of ids from 0",
        )


def _token_range(tokens: np.ndarray) -> tuple[int, int]:
    """Smallest and largest id, chunk by chunk, so that a memory-mapped corpus never has to fit."""
    count = min(_MOST_CHUNKS, -(-len(tokens) // _CHUNK_TOKENS))
    last = max(0, len(tokens) - _CHUNK_TOKENS)
    starts = [round(last * k / max(1, count - 1)) for k in range(count)]
    chunks = [tokens[start : start + _CHUNK_TOKENS] for start in starts]
    return min(int(c.min()) for c in chunks), max(int(c.max()) for c in chunks)


def abstract_example(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of one example of `[data] source`. Opens no corpus, so a plan needs no data.

    Raises:
        ConfigError: the user's own source raises, or gives no examples.
    """
    length = experiment.train.sequence_length
    if _is_token_source(experiment.data.source):
        row = jax.ShapeDtypeStruct((length,), np.int32)
        return {"tokens": row, "targets": row, "weights": row.update(dtype=np.float32)}
    example = _read_example(experiment, _load_examples(experiment), 0)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in example.items()}


def _load_examples(experiment: Experiment) -> Examples:
    """What `data.source = "pkg.mod:fn"` returns when called with `seed=` and `experiment=`; first and last are read."""
    at, name = experiment.where("data.source"), experiment.data.source
    make = load_function(experiment, "data.source", name)
    with user_code(
        experiment, "data.source", name, hint=f"the line it names; {name} is called with seed and experiment"
    ):
        examples: Any = make(seed=experiment.data.seed, experiment=experiment)
    if not hasattr(examples, "__getitem__") or not hasattr(examples, "__len__"):
        given = type(examples).__name__
        raise ConfigError(f"{name} gave a {given}: it must return a sequence with __len__ and __getitem__.", at=at)
    with user_code(experiment, "data.source", name):
        count = len(examples)
    if not count:
        raise ConfigError(f"{name} gave no examples: it must return a non-empty sequence.", at=at)
    first, last = ({k: v.shape for k, v in _read_example(experiment, examples, i).items()} for i in (0, count - 1))
    if first != last:
        raise ConfigError(f"the first example of {name} has {first}, the last one {last}.", at=at)
    return examples


def _read_example(experiment: Experiment, examples: Examples, index: int) -> dict[str, np.ndarray]:
    """One example as arrays. Raises ConfigError where it is no dict of numbers."""
    name = f"example {index} of {experiment.data.source}"
    with user_code(experiment, "data.source", name):
        example = examples[index]
    if not isinstance(example, Mapping) or not example or not all(isinstance(key, str) for key in example):
        given = type(example).__name__ if not isinstance(example, Mapping) else f"dict with keys {list(example)}"
        raise experiment.error("data.source", f"{name} is a {given}, not a dict of named arrays.")
    with user_code(experiment, "data.source", name):
        arrays = {key: np.asarray(value) for key, value in example.items()}
    for key, value in arrays.items():
        if value.dtype.kind not in "biuf" and not jax.numpy.issubdtype(value.dtype, jax.numpy.number):
            raise experiment.error("data.source", f"'{key}' in {name} is {value.dtype}, not an array of numbers.")
    return arrays


def abstract_batch(experiment: Experiment, mesh: AnyMesh, rules: ShardingRules) -> dict[str, jax.ShapeDtypeStruct]:
    """A global batch as ShapeDtypeStructs with shardings. Opens no corpus, so a plan needs no data.

    The first dim is `act_batch`; a second one as long as `sequence_length` is `act_length`.
    """
    train = experiment.train

    def one(x):
        shape = (train.global_batch, *x.shape)
        along = "act_length" if shape[1:2] == (train.sequence_length,) else None
        spec = rules.spec_for(("act_batch", along, *(None for _ in shape[2:]))[: len(shape)], kind="activations")
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition_spec(spec)))

    return {name: one(x) for name, x in abstract_example(experiment).items()}


@dataclass(frozen=True)
class Batches:
    """Device batches by step number."""

    examples: Examples  # a split
    like: Mapping[str, Any]  # the abstract batch
    seed: int | None  # of the shuffle; None keeps the order

    def at(self, step: int) -> dict[str, jax.Array]:
        """The global batch of one step; this process loads only the rows that its devices hold."""
        return self._to_devices(self._load(step))

    def iterate(self, first: int, last: int) -> Iterator[dict[str, jax.Array]]:
        """The batches of steps first ... last-1, read by background threads and put on devices ahead of their use."""
        import grain  # with orbax it is a seventh of what a plan imports, which reads no data

        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2 * _PREFETCHED_BATCHES)
        loaded = iter(grain.MapDataset.range(first, last).map(self._load).to_iter_dataset(options))
        ahead: deque[dict[str, jax.Array]] = deque()
        for rows in loaded:
            ahead.append(self._to_devices(rows))
            if len(ahead) > _PREFETCHED_BATCHES:
                yield ahead.popleft()
        yield from ahead

    def _load(self, step: int) -> dict[str, np.ndarray]:
        """The local rows of a step, in the order of `_local_rows`.

        Raises:
            RunError: the source raises, or gives an example unlike the first one.
        """
        shuffled = self._endless()
        size = next(iter(self.like.values())).shape[0]
        try:
            examples = [shuffled[int(step) * size + row] for row in self._local_rows()]
            rows = {name: [np.asarray(e[name], x.dtype) for e in examples] for name, x in self.like.items()}
        except (MeshkitError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise RunError(f"the data of step {int(step) + 1} raised {describe_error(error)}.") from error
        for name, x in self.like.items():
            odd = next((v.shape for v in rows[name] if v.shape != x.shape[1:]), None)
            if odd is not None:
                message = f"step {int(step) + 1} has an example whose '{name}' is {list(odd)}, not {list(x.shape[1:])}."
                raise RunError(message, hint="examples of one shape")
        return {name: np.stack(values) for name, values in rows.items()}

    def _endless(self):
        import grain

        dataset = grain.MapDataset.source(self.examples)
        return (dataset if self.seed is None else dataset.shuffle(seed=self.seed)).repeat()

    def _local_rows(self) -> Sequence[int]:
        rows: set[int] = set()
        for x in self.like.values():
            for index in x.sharding.addressable_devices_indices_map(x.shape).values():
                rows.update(range(*index[0].indices(x.shape[0])))
        return sorted(rows)

    def _to_devices(self, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        rows = np.asarray(self._local_rows())

        def one(x, values):
            def shard(index):
                start, stop, _ = index[0].indices(x.shape[0])
                first = int(np.searchsorted(rows, start))
                return values[(slice(first, first + stop - start), *index[1:])]

            return jax.make_array_from_callback(x.shape, x.sharding, shard)

        return {name: one(x, local[name]) for name, x in self.like.items()}
