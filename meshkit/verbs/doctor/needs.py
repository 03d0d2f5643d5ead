"""What an experiment needs of this machine before it starts: its model, and room for its checkpoints."""

from __future__ import annotations

import math

import jax

from meshkit.config.experiment import Experiment
from meshkit.errors import MeshkitError
from meshkit.sharding.devices import use_no_accelerator
from meshkit.step.state import describe_model
from meshkit.units import format_bytes
from meshkit.verbs.doctor.diagnosis import Result, error, ok

# Parameters are fp32, and so is AdamW's second moment; the first is of `optimizer.dtype`.
_PARAMETER_BYTES, _SECOND_BYTES, _FIRST_BYTES = 4, 4, {"fp32": 4, "bf16": 2}


def check_experiment(experiment: Experiment) -> tuple[list[Result], int | None]:
    """Whether the model can be built, and the bytes of the checkpoints that a run keeps, one more being written.

    Returns:
        The checks, and those bytes; None where no checkpoints are written or the model is wrong.
    """
    use_no_accelerator()  # the model without its arrays needs no GPU, and a GPU's memory is not ours to take
    try:
        shapes = jax.tree.leaves(describe_model(experiment).params)
    except MeshkitError as e:
        return [error("experiment", e.message, e.hint or "meshkit explain, which shows where")], None
    parameters = sum(math.prod(leaf.shape) for leaf in shapes)
    each = parameters * (_PARAMETER_BYTES + _FIRST_BYTES[experiment.optimizer.dtype] + _SECOND_BYTES)
    text = f"{experiment.model.class_path} has {parameters / 1e6:.1f} M parameters, a checkpoint {format_bytes(each)}"
    if not experiment.checkpoint.every:
        return [ok("experiment", f"{text}, of which none is written")], None
    return [ok("experiment", text)], each * (experiment.checkpoint.keep + 1)
