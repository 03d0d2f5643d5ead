"""`[pipeline]` as rules, and what can be refused about it without a model.

The section says enough: the pipeline's axis cuts the layers of every stacked parameter, and with
`head = "vocab_parallel"` the vocabulary as well, outside of the axes that cut it anyway. Nothing else may be cut by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshkit.config.problems import SpecError, did_you_mean
from meshkit.config.rules import ShardingRules
from meshkit.config.sections import PipelineSpec
from meshkit.config.tables import PipelineTable

# schedule -> the one that is the same with virtual stages
_WITH_CHUNKS = {"gpipe": "circular", "1f1b": "interleaved_1f1b"}


def pipeline_rules(table: PipelineTable | None, logical: Mapping[str, Any]) -> dict[str, Any]:
    """The rules that a pipeline adds to those of `[rules.logical]`, or puts in their place.

    Raises:
        ConfigError: `layers` is cut over something else, or the head's vocabulary over the pipeline without being
            meant to.
    """
    if table is None:
        return {}
    rules = ShardingRules(logical).mapping("parameters")
    axis, layers, vocab = table.axis, rules.get("layers", ()), rules.get("vocab", ())
    if layers not in ((), (axis,)):
        raise SpecError(
            f"the rules cut the layers over {' x '.join(layers)}, but the pipeline over '{axis}'.",
            key=("rules", "logical", "layers"),
            value=list(layers),
            hint=f'layers = "{axis}", or no rule for it',
        )
    added: dict[str, Any] = {"layers": [axis]}
    if table.head == "vocab_parallel":
        added["vocab"] = [axis, *(a for a in vocab if a != axis)]
    elif axis in vocab:
        raise SpecError(
            f"the rules cut the vocabulary over the pipeline's axis '{axis}', but its head is replicated.",
            key=("rules", "logical", "vocab"),
            value=list(vocab),
            hint='pipeline.head = "vocab_parallel", or a rule without that axis',
        )
    return added


def check_pipeline(spec: PipelineSpec, rules: ShardingRules, sizes: Mapping[str, int], train: Any) -> None:
    """Refuses what no model could make right.

    Args:
        spec: the section.
        rules: of the experiment, `pipeline_rules` included.
        sizes: mesh axis -> size.
        train: the `[train]` section.

    Raises:
        ConfigError: an axis that is not there, or that something else uses; sizes that a schedule cannot have.
    """
    axis = spec.axis
    if axis is None:
        return
    if axis not in sizes:
        known = ", ".join(sizes)
        message = f"pipeline.axis names mesh axis '{axis}', but the mesh has {known}."
        raise SpecError(message, key=("pipeline", "axis"), value=axis, hint=did_you_mean(axis, sizes))
    _check_rules(axis, rules)
    _check_schedule(spec, sizes[axis])
    if train.accumulate > 1:
        message = f"a pipeline adds up its {spec.microbatches} microbatches itself: train.accumulate must be 1."
        hint = f"train.accumulate = 1 and pipeline.microbatches = {spec.microbatches * train.accumulate}"
        raise SpecError(message, key=("train", "accumulate"), value=train.accumulate, hint=hint)


def check_alone(spec: PipelineSpec, local_sgd: str | None, compression: str | None) -> None:
    """Refuses what exchanges gradients or weights in another way: the pipeline's one program does it already.

    Raises:
        ConfigError: naming the section.
    """
    for section, axis in (("local_sgd", local_sgd), ("compression", compression)):
        if spec.axis is not None and axis is not None:
            message = f"a pipeline reduces its gradients itself, once a step, so [{section}] has nothing to work on."
            raise SpecError(message, key=(section, "axis"), value=axis, hint="one of the two sections")


def _check_rules(axis: str, rules: ShardingRules) -> None:
    for table in ("logical", "compute", "gradients", "optimizer"):
        for logical, axes in (getattr(rules, table) or {}).items():
            if axis in axes and logical not in ("layers", "vocab"):
                raise SpecError(
                    f"the pipeline's axis '{axis}' holds different layers, so it cannot cut {logical} as well.",
                    key=("rules", table, logical),
                    value=list(axes),
                    hint=f"{logical} without '{axis}'",
                )
    batch = rules.mapping("activations").get("act_batch", ())
    for logical, axes in (rules.gradients or {}).items():
        cut = [a for a in axes if a in batch]
        if cut:
            raise SpecError(
                f"a pipeline reduces gradients over {', '.join(cut)} once a step, so their accumulators are whole: "
                f"rules.gradients cannot cut {logical} over it.",
                key=("rules", "gradients", logical),
                value=list(axes),
                hint="no rule for it: parameters, moments and reduced gradients are cut all the same",
            )


def _check_schedule(spec: PipelineSpec, stages: int) -> None:
    chunks, microbatches = spec.virtual_stages, spec.microbatches
    if chunks == 1:
        return
    if spec.schedule in _WITH_CHUNKS:
        raise SpecError(
            f"schedule '{spec.schedule}' has one virtual stage on each stage, not {chunks}.",
            key=("pipeline", "schedule"),
            value=spec.schedule,
            hint=f'schedule = "{_WITH_CHUNKS[spec.schedule]}", or virtual_stages = 1',
        )
    if microbatches % stages:
        below, above = microbatches // stages * stages, -(-microbatches // stages) * stages
        raise SpecError(
            f"{microbatches} microbatches are not a multiple of the {stages} stages, which {chunks} virtual stages "
            "need.",
            key=("pipeline", "microbatches"),
            value=microbatches,
            hint=f"microbatches = {below} or {above}" if below else f"microbatches = {above}",
        )
