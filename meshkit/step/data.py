"""Examples -> sharded device batches, a function of the step number alone.

    examples (random access) -> shuffled, endless index -> rows of this process -> device batches, prefetched
    a stream -> replayed up to the step -> the same

The batch of step s holds the shuffled examples s*B ... s*B + B-1, whatever the number of processes; so one integer, the
step, resumes the data exactly, on any number of machines.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshkit.config.experiment import Experiment
from meshkit.config.rules import ShardingRules
from meshkit.config.user_code import describe_error
from meshkit.errors import MeshkitError, RunError
from meshkit.sharding.constrain import partition_spec
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.sources import Examples, Stream, abstract_example

_PREFETCHED_BATCHES = 2


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

    examples: Examples | Stream  # a split
    like: Mapping[str, Any]  # the abstract batch
    seed: int | None  # of the shuffle; None keeps the order

    def at(self, step: int) -> dict[str, jax.Array]:
        """The global batch of one step; this process loads only the rows that its devices hold."""
        return next(self.iterate(step, step + 1))

    def iterate(self, first: int, last: int) -> Iterator[dict[str, jax.Array]]:
        """The batches of steps first ... last-1, read by background threads and put on devices ahead of their use."""
        ahead: deque[dict[str, jax.Array]] = deque()
        for rows in self._streamed(first, last) if isinstance(self.examples, Stream) else self._loaded(first, last):
            ahead.append(self._to_devices(rows))
            if len(ahead) > _PREFETCHED_BATCHES:
                yield ahead.popleft()
        yield from ahead

    def _loaded(self, first: int, last: int) -> Iterator[dict[str, np.ndarray]]:
        """The local rows of each step, by index: this process reads no others."""
        import grain  # with orbax it is a seventh of what a plan imports, which reads no data

        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2 * _PREFETCHED_BATCHES)
        return iter(grain.MapDataset.range(first, last).map(self._load).to_iter_dataset(options))

    def _streamed(self, first: int, last: int) -> Iterator[dict[str, np.ndarray]]:
        """The local rows of each step of a stream; what comes before the first step is made and left out."""
        assert isinstance(self.examples, Stream)
        examples = self.examples.after(first * self._size)
        with ThreadPoolExecutor(1, "meshkit-data") as pool:
            steps = (pool.submit(self._next, step, examples) for step in range(first, last))
            ahead = deque(itertools.islice(steps, 2 * _PREFETCHED_BATCHES))
            while ahead:
                ahead.extend(itertools.islice(steps, 1))
                yield ahead.popleft().result()

    def _next(self, step: int, examples: Iterator[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """The local rows of the next step of a stream. Raises RunError as `_load` does."""
        with _data_of(step):
            batch = list(itertools.islice(examples, self._size))
            return self._stacked(step, [batch[row] for row in self._local_rows()])

    def _load(self, step: int) -> dict[str, np.ndarray]:
        """The local rows of a step, in the order of `_local_rows`.

        Raises:
            RunError: the source raises, or gives an example unlike the first one.
        """
        import grain

        dataset = grain.MapDataset.source(cast(Examples, self.examples))
        shuffled: Any = (dataset if self.seed is None else dataset.shuffle(seed=self.seed)).repeat()
        with _data_of(int(step)):
            return self._stacked(int(step), [shuffled[int(step) * self._size + row] for row in self._local_rows()])

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


@contextmanager
def _data_of(step: int) -> Iterator[None]:
    """What the user's source raises, as an error that names the step."""
    try:
        yield
    except (MeshkitError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"the data of step {step + 1} raised {describe_error(error)}.") from error
