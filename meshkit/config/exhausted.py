"""A device without enough memory, said in terms of the experiment.

Devices run behind the program: the error of a step surfaces where something waits for its values (metrics, a
checkpoint, a capture), so whole runs stand inside `device_memory`, not single calls.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from meshkit.config.experiment import Experiment
from meshkit.errors import MeshkitError, RunError
from meshkit.units import GIB, KIB, MIB, TIB, format_bytes

_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
_EXHAUSTED = re.compile(r"out[ _]of[ _]memory|RESOURCE_EXHAUSTED: .*\b(allocat|memory)", re.IGNORECASE)
_ASKED = re.compile(r"allocat\w+ ([\d.]+) ?(\w+)")
_PROGRAM = re.compile(r"executable_name='(\w+)'")
_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}  # as XLA writes them; "bytes" beside them


@contextmanager
def device_memory(experiment: Experiment, *, hint: str | None = None) -> Iterator[None]:
    """A block that runs programs on devices: where one has too little memory, the error says what helps.

    Raises:
        RunError: jax ran out of a device's memory, wherever in the block it came to say so.
    """
    try:
        yield
    except MeshkitError:
        raise
    except Exception as error:
        found: BaseException | None = error
        while found is not None:
            if type(found).__name__ in _ERRORS and is_of_memory(str(found)):
                raise too_little_memory(experiment, str(found), stats=_stats(), hint=hint) from error
            found = found.__cause__ or found.__context__
        raise


def is_of_memory(said: str) -> bool:
    """Whether an error of XLA's or CUDA's says that memory has run out."""
    return _EXHAUSTED.search(said) is not None


def too_little_memory(
    experiment: Experiment,
    said: str,
    *,
    stats: Mapping[str, int] | None = None,
    at: str | None = None,
    hint: str | None = None,
) -> RunError:
    """The error of a run that did not fit.

    Args:
        experiment: that ran.
        said: by XLA.
        stats: of the device's allocator; without them its pool is what the experiment gives it.
        at: where; default the experiment's file.
        hint: default plan's remedies.
    """
    cluster, train, stats = experiment.cluster, experiment.train, stats or {}
    asked, program = _ASKED.search(said), _PROGRAM.search(said)
    message = f"the device has too little memory for {program[1] if program else 'the run'}"
    if asked:
        message += f", which asked for {format_bytes(float(asked[1]) * _UNITS.get(asked[2], 1))} at once"
    if not cluster.is_cpu:
        pool = stats.get("bytes_limit", int(cluster.gpu.memory_bytes * train.memory_fraction))
        used = f", {format_bytes(stats['bytes_in_use'])} of them in use" if "bytes_in_use" in stats else ""
        name, there = cluster.gpu.name, format_bytes(cluster.gpu.memory_bytes)
        message += f": of the {there} of {name} XLA has {format_bytes(pool)}{used}"
    file = str(experiment.path or experiment.name)
    less = [] if train.remat == "full" else ['train.remat = "full"']
    less += [f"train.accumulate above {train.accumulate}", f"train.global_batch below {train.global_batch}"]
    remedies = f"`meshkit plan {file}`, which says what makes it fit, as {', '.join(less)}, or more GPUs to shard over"
    return RunError(f"{message}.", at=at or file, hint=hint or remedies)


def _stats() -> Mapping[str, Any] | None:
    """Of the allocator of this process's first device; None where it has none or cannot be asked."""
    jax = sys.modules.get("jax")
    try:
        return jax and jax.local_devices()[0].memory_stats()
    except Exception:
        return None
