"""`[data] source` -> sharded device batches, a function of the step number alone.

    source -> examples (random access) -> shuffled, endless index -> rows of this process -> device batches, prefetched

The batch of step s holds the shuffled examples s*B ... s*B + B-1, whatever the number of processes; so one integer, the
step, resumes the data exactly, on any number of machines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshkit.config.experiment import Experiment
from meshkit.config.rules import ShardingRules
from meshkit.config.user_code import describe_error
from meshkit.errors import MeshkitError, RunError
from meshkit.sharding.constrain import partition_spec
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.corpus import is_token_source, open_tokens
from meshkit.step.examples import Examples, abstract_example, load_examples
from meshkit.step.state import describe_model

_PREFETCHED_BATCHES = 2
_CHUNK_TOKENS = 1 << 24
_MOST_CHUNKS = 64  # a corpus of more than a billion tokens is sampled, evenly


@dataclass(frozen=True)
class Windows:
    """Training examples cut from a token sequence: window i predicts tokens i*T+1 ... i*T+T from those before.

    Attributes:
        tokens: the whole sequence, possibly memory-mapped.
        length: T.
        indices: which windows belong to this split.
    """

    tokens: np.ndarray
    length: int
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = int(self.indices[index]) * self.length
        window = np.asarray(self.tokens[start : start + self.length + 1], np.int32)
        return {"tokens": window[:-1], "targets": window[1:], "weights": np.ones(self.length, np.float32)}


@dataclass(frozen=True)
class Data:
    """Both splits of a source, and what is known about it.

    Attributes:
        train, validation: the splits.
        unigram_entropy_nats: entropy of the token frequencies, the loss of the best model without context; None for a
            source that has no tokens.
    """

    train: Examples
    validation: Examples
    unigram_entropy_nats: float | None


def open_data(experiment: Experiment) -> Data:
    """The experiment's data.

    Every k-th window (k = 1 / `validation_fraction`) is held out, so that both splits see all of the text.

    Raises:
        ConfigError: nothing there, too few tokens for one window in each split, or nothing to evaluate on.
    """
    data = _open_splits(experiment)
    if experiment.train.evaluate_every and not len(data.validation):
        share = experiment.data.validation_fraction
        raise experiment.error(
            "data.validation_fraction",
            f"nothing is held out to evaluate on: {share:g} of {len(data.train)} examples.",
            hint="a larger share or more examples, or train.evaluate_every = 0",
        )
    return data


def _open_splits(experiment: Experiment) -> Data:
    spec, length = experiment.data, experiment.train.sequence_length
    fraction = spec.validation_fraction
    if not is_token_source(spec.source):
        return _split_examples(load_examples(experiment), fraction)
    tokens = open_tokens(experiment)
    windows = np.arange((len(tokens) - 1) // length)
    every = max(2, round(1 / fraction)) if fraction > 0 else len(windows) + 1
    held_out = windows % every == every - 1
    train, validation = windows[~held_out], windows[held_out]
    if not len(train) or (fraction > 0 and not len(validation)):
        raise experiment.error(
            "data.source",
            f"the source has {len(tokens)} tokens, too few to cut {every} windows of {length} tokens from.",
            hint="a shorter train.sequence_length",
        )
    return Data(Windows(tokens, length, train), Windows(tokens, length, validation), unigram_entropy_nats(tokens))


def check_tokens(experiment: Experiment, data: Data) -> None:
    """Compares the token ids of the data with the model's vocab, where the model says it (`config.vocab` or `vocab`).

    Raises:
        ConfigError: an id that the model has no row for; look-ups would clamp it in silence.
    """
    if not isinstance(data.train, Windows):
        return
    model = describe_model(experiment).abstract_model()
    vocab = getattr(getattr(model, "config", model), "vocab", None)
    tokens = data.train.tokens
    if not isinstance(vocab, int) or (tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < vocab):
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


def unigram_entropy_nats(tokens: np.ndarray, limit: int = 1 << 26) -> float:
    """-sum p log p of the token frequencies, over at most the first `limit` tokens."""
    counts = np.bincount(np.asarray(tokens[:limit]))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


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
    """Device batches by step number.

    Attributes:
        examples: a split.
        like: the abstract batch.
        seed: of the shuffle; None keeps the order.
    """

    examples: Examples
    like: Mapping[str, Any]
    seed: int | None

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


@dataclass(frozen=True)
class _Subset:
    """Some of the examples, by index."""

    examples: Examples
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self.examples[int(self.indices[index])]


def _split_examples(examples: Examples, fraction: float) -> Data:
    indices = np.arange(len(examples))
    every = max(2, round(1 / fraction)) if fraction > 0 else len(indices) + 1
    held_out = indices % every == every - 1
    return Data(_Subset(examples, indices[~held_out]), _Subset(examples, indices[held_out]), None)
