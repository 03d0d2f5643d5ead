"""Measure live captures (`[profile] every`) on a GPU: one step in five is traced, and another process reads traces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.verbs import DEBUG, LLAMA_1B, gpu_here
from meshkit.config.experiment import load

_EVERY, _CAPTURES, _WARM_UP, _BEHIND, _MOST = 5, 4, 3, 2, 200


def measure(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Yield the seconds of steps without a capture, with one and just after one, and the CPU seconds of a capture."""
    experiment = load(DEBUG) if toy else load(LLAMA_1B, [f"cluster.gpu={gpu_here()}", "model.layers=4"])
    from meshkit.sharding.mesh import build_mesh, prepare_platform

    prepare_platform(experiment.cluster, memory_fraction=experiment.train.memory_fraction)
    import jax

    from meshkit.compile.attached import compile_step
    from meshkit.planning.resolved import make_train_step
    from meshkit.trace.capture import CapturedStep
    from meshkit.verbs.rehearse.rehearsal import filled
    from meshkit.verbs.train import watch

    mesh: Any = build_mesh(experiment.mesh, experiment.cluster, devices=sorted(jax.devices(), key=lambda d: d.id))
    made = make_train_step(experiment, mesh)
    step = compile_step(made, experiment.cluster, experiment.placement, experiment.xla)
    captured = CapturedStep(step.program, mesh, experiment.cluster, experiment.mesh, made.facts, step.options)
    said: list[str] = []
    stragglers = watch.Stragglers(0, said.append)
    captures = watch.StepCaptures(
        _EVERY, captured, stragglers, said.append, first_step=_WARM_UP + 1, budget_s=1e9, budget=1e9
    )
    state, batch = filled(made, experiment)
    took: dict[str, list[float]] = {"plain": [], "captured": [], "behind": []}
    number = last = 0
    try:
        while len(took["captured"]) < _CAPTURES and number < _MOST:
            number += 1
            began = time.perf_counter()
            if due := number > _WARM_UP and captures.is_due(number, number):
                captures.start(state)
            state, metrics = step.program(state, batch)
            jax.block_until_ready(metrics)
            if due:
                captures.stop(number, (state, metrics))
                last = number
            seconds = time.perf_counter() - began
            if number > _WARM_UP:
                took["captured" if due else "behind" if 0 < number - last <= _BEHIND and last else "plain"].append(
                    seconds
                )
            if number - last == _BEHIND:
                captures.join(60.0)
        captures.join(60.0)
    finally:
        captures.close()
    found = {f"a step, {kind} s": statistics.median(seconds) for kind, seconds in took.items() if seconds}
    yield found | {"captures": len(took["captured"]), "warnings": said}
    yield {"CPU of a capture s": stragglers.cpu_s / max(1, len(took["captured"]))}
