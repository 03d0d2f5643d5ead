"""Examples -> sharded device batches, which depend on the step number alone.

    text, JSONL -> tokens (bytes, or the ids of `data.tokenizer`) -> windows
    token files -> memory-mapped windows, or rows
    "pkg.mod:fn" -> examples by index, or a stream

    examples (random access) -> shuffled, endless index -> rows of this process -> device batches, prefetched
    a stream -> replayed from its start up to the step -> rows of this process -> device batches, prefetched

Step s takes the shuffled examples s*B ... s*B + B-1, B being the global batch, whatever the number of processes. So the
step number alone resumes the data exactly, on any number of machines.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshkit.config.files import open_regular, short
from meshkit.config.places import Places, UserCode, describe_error
from meshkit.config.rules import ShardingRules
from meshkit.errors import MeshkitError, RunError, a_type
from meshkit.sharding.constrain import partition_spec
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.spec import StepSpec

_PREFETCHED_BATCHES = 2
STDLIB = "python-stdlib"  # the source code of the running Python's standard library, text that every machine has
_TOKEN_DTYPES = {".bin": "<u2", ".u8": "u1", ".u16": "<u2", ".u32": "<u4"}
_TEXT_SUFFIXES = (".txt", ".jsonl")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
_CHUNK_TOKENS = 1 << 24
_MOST_CHUNKS = 64  # more than this many chunks, a billion tokens, are sampled evenly
_MOST_ID = 2**31 - 1
_LARGEST_TEXT_BYTES = 2**35


class Examples(Protocol):
    """Random access to examples, each a dict of arrays with fixed shapes; what `"pkg.mod:fn"` returns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]: ...


@dataclass(frozen=True)
class Rows:
    """Training examples from the rows of an array of ids; tokens 1 ... T of a row are predicted from earlier ones."""

    ids: np.ndarray
    """[rows, T + 1], possibly memory-mapped."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = np.asarray(self.ids[index], np.int32)
        return {"tokens": row[:-1], "targets": row[1:], "weights": np.ones(len(row) - 1, np.float32)}


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return a view of tokens as rows of `length` + 1; each row starts at the last token of the row before.

    Args:
        tokens: [n].
        length: T, the length of an example.

    Returns:
        [(n - 1) // T, T + 1]; the tokens left at the end are dropped.
    """
    if len(tokens) <= length:
        return tokens[:0].reshape(0, length + 1)
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


@dataclass(frozen=True)
class Split:
    """A subset of examples, given by their indices."""

    examples: Examples
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self.examples[int(self.indices[index])]


@dataclass(frozen=True)
class Stream:
    """Examples that come one after the other, in the same order whenever they are made with the same seed."""

    make: Callable[[int], Iterable[Mapping[str, Any]]]
    seed: int

    def after(self, count: int) -> Iterator[Mapping[str, Any]]:
        """Yield the examples after the first `count`. A stream that ends is made again, with the next seed.

        Raises:
            RunError: it ends before its first example.
        """
        return itertools.islice(self._endless(), count, None)

    def _endless(self) -> Iterator[Mapping[str, Any]]:
        for epoch in itertools.count():
            example = None
            for example in self.make(self.seed + epoch):
                yield example
            if example is None:
                raise RunError(f"the stream of examples is empty with seed {self.seed + epoch}.")


@dataclass(frozen=True)
class Data:
    """Both splits of a source, and the entropy of its tokens."""

    train: Split | Stream
    validation: Examples
    unigram_entropy_nats: float | None
    """Entropy of the token frequencies: the loss of the best model without context. None for other examples."""


def open_data(spec: StepSpec, tokenizer: UserCode | None) -> Data:
    """Return the data of a spec.

    Every k-th window or example (k = 1 / `validation_fraction`) is held out, so that both splits are spread over all of
    the text. Nothing of a stream is held out. Without a tokenizer each byte is a token.

    Raises:
        ConfigError: nothing there, too few tokens for one window in each split, or nothing to evaluate on.
    """
    fraction, length, entropy = spec.data.validation_fraction, spec.train.sequence_length, None
    every = max(2, round(1 / fraction)) if fraction > 0 else 0
    if spec.source is None:
        tokens = open_tokens(spec, tokenizer)
        examples = Rows(tokens if tokens.ndim == 2 else windows(tokens, length))
        if len(examples) < max(1, every):
            unit, hint = ("rows", "more rows") if tokens.ndim == 2 else ("tokens", "a shorter train.sequence_length")
            raise spec.places.error(
                "data.source",
                f"the source has {len(tokens)} {unit}, too few for {max(1, every)} examples of {length} tokens.",
                hint=f"{hint}, or data.validation_fraction = 0" if every else hint,
            )
        entropy = unigram_entropy_nats(tokens)
    else:
        examples = _load_examples(spec.source, spec.data.seed)
    if isinstance(examples, Stream):
        data = Data(examples, Rows(np.zeros((0, length + 1), np.int32)), None)
        at, hint = "train.evaluate_every", "train.evaluate_every = 0, or a source with __len__ and __getitem__"
        message = f"{spec.data.source} is a stream, of which nothing can be held out to evaluate on."
    else:
        indices = np.arange(len(examples))
        held_out = indices % every == every - 1 if every else np.zeros(len(indices), bool)
        data = Data(Split(examples, indices[~held_out]), Split(examples, indices[held_out]), entropy)
        at, hint = "data.validation_fraction", "a larger share or more examples, or train.evaluate_every = 0"
        message = f"nothing is held out to evaluate on: {fraction:g} of {len(examples)} examples."
    if spec.train.evaluate_every and not len(data.validation):
        raise spec.places.error(at, message, hint=hint)
    return data


def is_token_source(source: str) -> bool:
    """Return whether a source is tokens (the standard library, a folder, a file), not `"pkg.mod:fn"`."""
    return source == STDLIB or ":" not in source or Path(source).exists()


def open_tokens(spec: StepSpec, tokenizer: UserCode | None) -> np.ndarray:
    """Return the tokens of a source.

    For text they are its bytes as uint8, or the tokenizer's ids as int32. For a token file they are its memory-mapped
    array. Such a file is `.npy` (also [rows, T + 1]) or raw little-endian integers: `.u8`, `.u16` (or `.bin`), `.u32`.

    Raises:
        ConfigError: no such file, an empty folder, a file of another kind, or a tokenizer that gives no ids.
    """
    source, places = spec.data.source, spec.places
    if source == STDLIB:
        return _text_tokens(tokenizer, (path.read_bytes() for path in stdlib_files()))
    path = Path(source)
    whole = functools.partial(_whole_text, places)
    if path.is_dir():
        hidden = lambda p: any(part.startswith(".") for part in p.relative_to(path).parts)
        files = (p for p in sorted(path.rglob("*")) if p.is_file() and not hidden(p))
        tokens = _text_tokens(tokenizer, map(whole, files))
        if not len(tokens):
            raise places.error("data.source", f"the folder {path} has no text files.")
        return tokens
    if not path.is_file():
        raise places.error("data.source", f"there is no file or folder {path}.", hint=f'"{STDLIB}"')
    if path.suffix in _TEXT_SUFFIXES:
        field = spec.data.text_field or "text"
        documents = _json_documents(places, field, path) if path.suffix == ".jsonl" else [whole(path)]
        return _text_tokens(tokenizer, documents)
    if tokenizer is not None:
        message = f"a tokenizer reads text, and {path} is a file of tokens."
        raise tokenizer.error(message, hint="data.tokenizer = none")
    if path.suffix == ".npy":
        return _mapped_array(places, path, spec.train.sequence_length)
    if path.suffix not in _TOKEN_DTYPES:
        known = ", ".join((".npy", *_TOKEN_DTYPES, *_TEXT_SUFFIXES))
        raise places.error("data.source", f"{path} is not a token file.", hint=f"a folder, or one of {known}")
    dtype = np.dtype(_TOKEN_DTYPES[path.suffix])
    if not path.stat().st_size or path.stat().st_size % dtype.itemsize:
        raise places.error("data.source", f"{path} has {path.stat().st_size} bytes, not whole {dtype} tokens.")
    return np.memmap(path, dtype, mode="r")


def _mapped_array(places: Places, path: Path, length: int) -> np.ndarray:
    """Return the ids of a `.npy` file: one long row to cut into windows, or a row of T + 1 ids for each example."""
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise places.error("data.source", f"{path} cannot be read as .npy: {error}.") from error
    if tokens.ndim not in (1, 2) or not np.issubdtype(tokens.dtype, np.integer):
        raise places.error("data.source", f"{path} holds {tokens.dtype}{list(tokens.shape)}, not rows of ids.")
    if tokens.ndim == 2 and tokens.shape[1] != length + 1:
        raise places.error(
            "data.source",
            f"{path} has rows of {tokens.shape[1]} ids; an example of {length} tokens takes one more, the last target.",
            hint=f"train.sequence_length = {tokens.shape[1] - 1}",
        )
    return tokens


def stdlib_files() -> list[Path]:
    """Return the source files of the standard library, without its tests, in the order of their paths inside it."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, folders, files in os.walk(root):  # pathlib would take half a second at every start
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        inside = os.path.relpath(folder, root).replace(os.sep, "/")
        found += [f"{inside}/{name}".removeprefix("./") for name in files if name.endswith(".py")]
    return [root / path for path in sorted(found)]


def _opened_text(places: Places, path: Path) -> io.BufferedReader:
    """Open a regular file that memory can hold; raise ConfigError for any other."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise places.error("data.source", f"{path} cannot be read: {error.strerror}.") from None
    size = os.fstat(file.fileno()).st_size
    if size > _LARGEST_TEXT_BYTES:
        file.close()
        most = _LARGEST_TEXT_BYTES / 2**30
        message = f"{path} has {size / 2**30:,.0f} GiB, and text is read into memory whole: at most {most:g} GiB."
        raise places.error("data.source", message, hint="a file of its tokens (.npy, .u16, .u32), which is mapped")
    return file


def _whole_text(places: Places, path: Path) -> bytes:
    with _opened_text(places, path) as file:
        return file.read()


def _json_documents(places: Places, key: str, path: Path) -> Iterator[bytes]:
    """Yield the text of each line's object, followed by a line break."""
    with _opened_text(places, path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise places.error("data.source", f"line {number} of {path} is no JSON.") from None
            text = record.get(key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                items = record.items() if isinstance(record, dict) else ()
                known = [short(name, 20) for name, value in items if isinstance(value, str)]
                raise places.error(
                    "data.source",
                    f"line {number} of {path} has no text under '{key}'.",
                    hint=f'data.text_field = "{known[0]}"' if known else 'lines such as {"text": "..."}',
                )
            yield text.encode("utf-8", "surrogatepass") + b"\n"


def _text_tokens(tokenizer: UserCode | None, documents: Iterable[bytes]) -> np.ndarray:
    texts = (text for text in documents if b"\0" not in text)
    if tokenizer is None:
        return np.frombuffer(b"".join(texts), np.uint8)
    pieces = []
    for text in texts:
        with tokenizer.calling(hint="it is called with a str and returns its ids"):
            ids = np.asarray(tokenizer.found(text.decode("utf-8", "replace")))
        if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > _MOST_ID)):
            raise tokenizer.error(
                f"{tokenizer.name} gave {ids.dtype}{list(ids.shape)}, not a row of ids from 0.",
                hint="a list of ints, such as tokenizer.encode(text)",
            )
        pieces.append(ids.astype(np.int32))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def unigram_entropy_nats(tokens: np.ndarray) -> float:
    """Return -sum p log p of the token frequencies p, over at most the first 2**26 tokens."""
    first = tokens.ravel(order="K")[: 1 << 26]
    few = first.dtype.kind == "u" and first.dtype.itemsize <= 2
    counts = np.bincount(first) if few else np.unique(first, return_counts=True)[1]
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def vocab_of(model: Any) -> int | None:
    """Return the vocabulary size of an (abstract) model: its `config.vocab` or `vocab`, or None without either."""
    vocab = getattr(getattr(model, "config", model), "vocab", None)
    return vocab if isinstance(vocab, int) else None


def check_tokens(spec: StepSpec, data: Data, model: Any) -> None:
    """Compare the token ids of the data with the (abstract) model's vocabulary size, if `vocab_of` finds it.

    Args:
        data: only token sources are checked; above 2**30 tokens, an even sample of them.

    Raises:
        ConfigError: an id that the model has no row for; look-ups would clamp it in silence.
    """
    vocab, rows = vocab_of(model), data.train.examples if isinstance(data.train, Split) else None
    if not isinstance(rows, Rows) or vocab is None:
        return
    if rows.ids.dtype.kind == "u" and np.iinfo(rows.ids.dtype).max < vocab:
        return
    smallest, largest = _token_range(rows.ids)
    if smallest < 0 or largest >= vocab:
        wrong = smallest if smallest < 0 else largest
        raise spec.places.error(
            "data.source",
            f"the data has token id {wrong}, but the vocab of {spec.model_class.name} is {vocab}.",
            hint=f"model.vocab = {largest + 1}" if smallest >= 0 else "a token file of ids from 0",
        )


def _token_range(rows: np.ndarray) -> tuple[int, int]:
    each = max(1, _CHUNK_TOKENS // rows.shape[1])
    count = min(_MOST_CHUNKS, -(-len(rows) // each))
    last = max(0, len(rows) - each)
    starts = [round(last * k / max(1, count - 1)) for k in range(count)]
    chunks = [rows[start : start + each] for start in starts]
    return min(int(c.min()) for c in chunks), max(int(c.max()) for c in chunks)


def abstract_example(spec: StepSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of one example of `[data] source`. Opens no corpus, so a plan needs no data.

    Raises:
        ConfigError: the user's own source raises, or gives no examples.
    """
    length = spec.train.sequence_length
    if spec.source is None:
        row = jax.ShapeDtypeStruct((length,), np.int32)
        return {"tokens": row, "targets": row, "weights": row.update(dtype=np.float32)}
    code, examples = spec.source, _load_examples(spec.source, spec.data.seed)
    example = _first(code, examples) if isinstance(examples, Stream) else _read_example(code, examples, 0)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in example.items()}


def _load_examples(code: UserCode, seed: int) -> Examples | Stream:
    """Call the function that `data.source = "pkg.mod:fn"` names and check its first and last example.

    A sequence has `__len__` and `__getitem__`; anything else that can be iterated is a stream.
    """
    name, make = code.name, code.found
    with code.calling(hint=f"the line it names; {name} is called with seed and experiment"):
        examples: Any = make(seed=seed)
    if not hasattr(examples, "__getitem__") or not hasattr(examples, "__len__"):
        if hasattr(examples, "__iter__"):
            stream = Stream(lambda seed: make(seed=seed), seed)
            _first(code, stream)
            return stream
        given = type(examples).__name__
        must = "it must return a sequence with __len__ and __getitem__, or an iterable"
        raise code.error(f"{name} gave a {given}: {must}.")
    with code.calling():
        count = len(examples)
    if not count:
        raise code.error(f"{name} gave no examples: it must return a non-empty sequence.")
    first, last = ({k: v.shape for k, v in _read_example(code, examples, i).items()} for i in (0, count - 1))
    if first != last:
        raise code.error(f"the first example of {name} has the shapes {first}, but the last one has {last}.")
    return examples


def _first(code: UserCode, stream: Stream) -> dict[str, np.ndarray]:
    with code.calling():
        example = next(iter(stream.make(stream.seed)), None)
    if example is None:
        raise code.error(f"{code.name} gave no examples: the iterable is empty.")
    return _arrays(code, f"the first example of {code.name}", example)


def _read_example(code: UserCode, examples: Examples, index: int) -> dict[str, np.ndarray]:
    name = f"example {index} of {code.name}"
    with code.calling(name):
        example = examples[index]
    return _arrays(code, name, example)


def _arrays(code: UserCode, name: str, example: Any) -> dict[str, np.ndarray]:
    """Return an example's values as arrays. Raises ConfigError where it is no dict of numbers."""
    if not isinstance(example, Mapping) or not example or not all(isinstance(key, str) for key in example):
        given = a_type(example) if not isinstance(example, Mapping) else f"a dict with keys {list(example)}"
        raise code.error(f"{name} is {given}, not a dict of named arrays.")
    with code.calling(name):
        arrays = {key: np.asarray(value) for key, value in example.items()}
    for key, value in arrays.items():
        if value.dtype.kind not in "biuf" and not jax.numpy.issubdtype(value.dtype, jax.numpy.number):
            raise code.error(f"'{key}' in {name} is {value.dtype}, not an array of numbers.")
    return arrays


def abstract_batch(spec: StepSpec, mesh: AnyMesh, rules: ShardingRules) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a global batch as ShapeDtypeStructs with shardings. Opens no corpus, so a plan needs no data.

    The first dim is sharded as `act_batch`, and a second dim of length `sequence_length` as `act_length`.

    Returns:
        Name -> ShapeDtypeStruct [global_batch, ...], with the dtypes that jax keeps (int64 becomes int32).

    Raises:
        ConfigError: as `abstract_example` does.
    """
    train = spec.train

    def batch_leaf(x):
        shape = (train.global_batch, *x.shape)
        along = "act_length" if shape[1:2] == (train.sequence_length,) else None
        spec = rules.spec_for(("act_batch", along, *(None for _ in shape[2:]))[: len(shape)], kind="activations")
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition_spec(spec)))

    return {name: batch_leaf(x) for name, x in abstract_example(spec).items()}


@dataclass(frozen=True)
class Batches:
    """Device batches by step number."""

    examples: Examples | Stream
    like: Mapping[str, Any]
    seed: int | None

    def at(self, step: int) -> dict[str, jax.Array]:
        """Return the global batch of one step; this process loads only the rows that its devices hold.

        It raises what `iterate` raises.
        """
        return next(self.iterate(step, step + 1))

    def iterate(self, first: int, last: int) -> Iterator[dict[str, jax.Array]]:
        """Yield the batches of steps first ... last-1. Background threads read them and put them on devices early.

        Raises:
            RunError: the source raises, or gives an example of another shape, in the step that the error names; or a
                stream has no example.
        """
        ahead: deque[dict[str, jax.Array]] = deque()
        for rows in self._streamed(first, last) if isinstance(self.examples, Stream) else self._loaded(first, last):
            ahead.append(self._to_devices(rows))
            if len(ahead) > _PREFETCHED_BATCHES:
                yield ahead.popleft()
        yield from ahead

    def _loaded(self, first: int, last: int) -> Iterator[dict[str, np.ndarray]]:
        import grain  # not at the top: a plan reads no data, and grain with orbax would be a seventh of its imports

        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2 * _PREFETCHED_BATCHES)
        return iter(grain.MapDataset.range(first, last).map(self.load).to_iter_dataset(options))

    def _streamed(self, first: int, last: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield the local rows of each step of a stream; examples before the first step are made and skipped."""
        assert isinstance(self.examples, Stream)
        examples = self.examples.after(first * self._size)
        with ThreadPoolExecutor(1, "meshkit-data") as pool:
            steps = (pool.submit(self._next, step, examples) for step in range(first, last))
            ahead = deque(itertools.islice(steps, 2 * _PREFETCHED_BATCHES))
            while ahead:
                ahead.extend(itertools.islice(steps, 1))
                yield ahead.popleft().result()

    def _next(self, step: int, examples: Iterator[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        with _data_of(step):
            batch = list(itertools.islice(examples, self._size))
            return self._stacked(step, [batch[row] for row in self.local_rows()])

    def load(self, step: int) -> dict[str, np.ndarray]:
        """Return the local rows of a step, in the order of `local_rows`.

        Raises:
            RunError: the source raises, or gives an example unlike the first one.
        """
        import grain

        dataset = grain.MapDataset.source(cast(Examples, self.examples))
        shuffled: Any = (dataset if self.seed is None else dataset.shuffle(seed=self.seed)).repeat()
        with _data_of(int(step)):
            return self._stacked(int(step), [shuffled[int(step) * self._size + row] for row in self.local_rows()])

    @property
    def _size(self) -> int:
        return next(iter(self.like.values())).shape[0]

    def _stacked(self, step: int, examples: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        rows = {name: [np.asarray(e[name], x.dtype) for e in examples] for name, x in self.like.items()}
        for name, x in self.like.items():
            odd = next((v.shape for v in rows[name] if v.shape != x.shape[1:]), None)
            if odd is not None:
                message = f"step {step + 1} has an example whose '{name}' is {list(odd)}, not {list(x.shape[1:])}."
                raise RunError(message, hint="examples of one shape")
        return {name: np.stack(values) for name, values in rows.items()}

    def local_rows(self) -> Sequence[int]:
        """Return the numbers of a batch's rows that devices of this process hold, in order."""
        rows: set[int] = set()
        for x in self.like.values():
            for index in x.sharding.addressable_devices_indices_map(x.shape).values():
                rows.update(range(*index[0].indices(x.shape[0])))
        return sorted(rows)

    def _to_devices(self, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        rows = np.asarray(self.local_rows())

        def put_leaf(x, values):
            def shard(index):
                start, stop, _ = index[0].indices(x.shape[0])
                first = int(np.searchsorted(rows, start))
                return values[(slice(first, first + stop - start), *index[1:])]

            return jax.make_array_from_callback(x.shape, x.sharding, shard)

        return {name: put_leaf(x, local[name]) for name, x in self.like.items()}


@contextmanager
def _data_of(step: int) -> Iterator[None]:
    try:
        yield
    except (MeshkitError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"the data of step {step + 1} raised {describe_error(error)}.") from error
