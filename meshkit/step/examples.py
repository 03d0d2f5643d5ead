"""What one example is: the protocol of `[data] source = "pkg.mod:fn"`, and the shapes of its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from meshkit.config.experiment import Experiment
from meshkit.config.user_code import load_object, user_code
from meshkit.errors import ConfigError
from meshkit.step.corpus import is_token_source


class Examples(Protocol):
    """Random access to examples, each a dict of arrays with fixed shapes; what `"pkg.mod:fn"` returns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]: ...


def abstract_example(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of one example of `[data] source`. Opens no corpus, so a plan needs no data.

    Raises:
        ConfigError: as `load_examples` does.
    """
    length = experiment.train.sequence_length
    if is_token_source(experiment.data.source):
        row = jax.ShapeDtypeStruct((length,), np.int32)
        return {"tokens": row, "targets": row, "weights": row.update(dtype=np.float32)}
    example = _read_example(experiment, load_examples(experiment), 0)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in example.items()}


def load_examples(experiment: Experiment) -> Examples:
    """What `data.source = "pkg.mod:fn"` returns when called with `seed=` and `experiment=`; first and last are read."""
    at, name = experiment.error("data.source", "").at, experiment.data.source
    make: Any = load_object(name, experiment.search_paths, at=at)
    if not callable(make):
        raise ConfigError(f"{name} is a {type(make).__name__}, not a function.", at=at)
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
