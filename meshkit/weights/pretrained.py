"""`checkpoint.initial`: the first state of a new run, with the weights of a folder in place of random ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import chex

from meshkit.config.experiment import Experiment
from meshkit.config.user_code import user_code
from meshkit.errors import ConfigError
from meshkit.step.state import TrainState, describe_model
from meshkit.step.train_step import TrainProgram
from meshkit.weights.files import read_weights
from meshkit.weights.layout import Layout


def first_state(experiment: Experiment, program: TrainProgram) -> TrainState:
    """The state before the first step, on the program's shardings: initialized, or as `checkpoint.initial` has it.

    Only the parameters come from the folder. Optimizer state starts at zero either way, and does not depend on them.

    Raises:
        ConfigError: the model does not say how its parameters correspond to files, or the files do not fit it.
    """
    state = program.init()
    folder = experiment.checkpoint.initial
    if folder is None:
        return state
    layout = layout_of(experiment)
    state = replace(state, params=None)  # lets go of the random weights before others take their place
    arrangement, wanted = program.arrangement, program.abstract_state.params
    params = read_weights(Path(folder), layout, arrangement.saved.params if arrangement else wanted)
    params = arrangement.params_from_saved(params) if arrangement else params
    try:
        chex.assert_trees_all_equal_shapes_and_dtypes(params, wanted)
    except AssertionError as error:
        message = f"the weights do not make the parameters of {experiment.model.class_path}: {error}"
        raise ConfigError(message, at=folder, hint="the hf_layout() of this very model") from None
    return replace(state, params=params)


def layout_of(experiment: Experiment) -> Layout:
    """What the experiment's model answers to `hf_layout()`.

    Raises:
        ConfigError: it has no such method.
    """
    name = experiment.model.class_path
    model = describe_model(experiment).abstract_model()
    method = getattr(model, "hf_layout", None)
    if method is None:
        message = f"{name} has no method hf_layout(), which says what its weights are called in a file."
        raise experiment.error("checkpoint.initial", message, hint="models.llama:Llama or models.moe:Moe, or write one")
    with user_code(experiment, "model.class", f"hf_layout of {name}"):
        layout = method()
    if not isinstance(layout, Layout):
        message = f"hf_layout of {name} gives a {type(layout).__name__}, not a meshkit.weights.layout.Layout."
        raise experiment.error("model.class", message)
    return layout
