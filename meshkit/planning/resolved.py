"""Import the user's code that an Experiment names, once for all lower layers.

    Experiment -> resolve -> StepSpec -> build_train_step -> TrainProgram

Only a run imports the tokenizer and metrics: a plan needs neither them nor the packages that they import.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from meshkit.config.experiment import Experiment, ExperimentFile, ProgramExperiment
from meshkit.config.places import UserCode
from meshkit.config.rules import ShardingRules
from meshkit.config.toml import dotted, inline, split_key
from meshkit.config.user_code import FUNCTIONS, load_code, load_function
from meshkit.errors import ConfigError
from meshkit.linting.examine import Examined, examine, examine_step
from meshkit.runs.metrics import SinkCode, tensorboard_writer
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.data import is_token_source
from meshkit.step.given import Program, as_program
from meshkit.step.program import TrainProgram
from meshkit.step.spec import StepSpec
from meshkit.step.train_step import build_train_step


def resolve(experiment: Experiment) -> StepSpec:
    """Return the parts of the experiment's training step, with the user's code imported.

    Raises:
        ConfigError: a class or function does not exist, or its module cannot be imported.
    """
    model, train, optimizer, data = experiment.model, experiment.train, experiment.optimizer, experiment.data
    own = optimizer.class_path
    source = None if is_token_source(data.source) else _function(experiment, "data.source", data.source)
    return StepSpec(
        model_class=_code(experiment, "model.class", model.class_path),
        loss=_function(experiment, "train.loss", train.loss) if train.loss else None,
        optimizer_class=_code(experiment, "optimizer.class", own) if own else None,
        source=replace(source, found=functools.partial(source.found, experiment=experiment)) if source else None,
        model=model,
        train=train,
        optimizer=optimizer,
        data=data,
        pipeline=experiment.pipeline,
        local_sgd=experiment.local_sgd,
        compression=experiment.compression,
    )


def make_program(experiment: ProgramExperiment, mesh: AnyMesh) -> Program:
    """Return the training step that the function `program.make` builds for a mesh.

    Raises:
        ConfigError: the function does not exist, raised an error, or returned no `mk.Program`.
    """
    table = experiment.program
    code = _function(experiment, "program.make", table.make)
    with code.calling(f"program.make = {table.make}"):
        made = code.found(mesh, **table.options)
    try:
        return as_program(made, table.make)
    except ConfigError as e:
        raise code.error(e.message, e.hint) from None


def find_tokenizer(experiment: Experiment) -> UserCode | None:
    """Return the function that `data.tokenizer` names; None without a tokenizer.

    Raises:
        ConfigError: it does not exist, or its module cannot be imported.
    """
    name = experiment.data.tokenizer
    return _function(experiment, "data.tokenizer", name) if name else None


def find_sinks(experiment: Experiment) -> SinkCode:
    """Return the functions that receive metrics, as set by `train.metrics` and `train.tensorboard`.

    Raises:
        ConfigError: a function does not exist, or TensorBoard is asked for and not installed.
    """
    train = experiment.train
    return SinkCode(
        metrics=_function(experiment, "train.metrics", train.metrics) if train.metrics else None,
        tensorboard=tensorboard_writer(experiment.places) if train.tensorboard else None,
    )


def functions_by_command(experiment: ExperimentFile) -> list[str]:
    """Return the `--set` overrides that name a user's function, such as `data.tokenizer="pkg.mod:fn"`."""
    document, table = experiment.document, experiment.to_dict()
    keys = [split_key(key) for key in FUNCTIONS]
    by_command = [key for key in keys if document is not None and document.is_overridden(key)]
    return [f"{dotted(key)}={inline(value)}" for key in by_command if (value := table.get(key[0], {}).get(key[1]))]


def make_train_step(experiment: Experiment, mesh: AnyMesh, rules: ShardingRules | None = None) -> TrainProgram:
    """Return the experiment's training step on a mesh, attached or described.

    Args:
        rules: sharding rules that replace the experiment's own.

    Raises:
        ConfigError: a model or loss cannot be imported or does not take its options, or the rules do not fit the model.
    """
    return build_train_step(resolve(experiment), mesh, rules or experiment.rules)


def examine_experiment(experiment: Experiment, program: TrainProgram) -> Examined:
    """Return the lint's examination of the experiment's step before it is compiled."""
    document = experiment.document
    written = document.table.get("rules", {}) if document is not None else None
    return examine(program, experiment.cluster, experiment.mesh, allow=experiment.lint.allow, written=written)


def examine_program(experiment: ProgramExperiment, program: Program, mesh: AnyMesh) -> Examined:
    """Return the lint's examination of a user's own step before it is compiled.

    Without `[rules]`, the arguments' own placement counts as intended.
    """
    rules = experiment.rules if experiment.has_rules else None
    return examine_step(
        program.step,
        program.args,
        mesh=mesh,
        cluster=experiment.cluster,
        rules=rules,
        names=program.names,
        allow=experiment.lint.allow,
        memory_fraction=experiment.train.memory_fraction,
    )


def _code(experiment: ExperimentFile, key: str, name: str) -> UserCode:
    return load_code(name, experiment.search_paths, key, experiment.places)


def _function(experiment: ExperimentFile, key: str, name: str) -> UserCode:
    return load_function(name, experiment.search_paths, key, experiment.places)
