"""Measure XLA options on two programs: Llama 1B on its one GPU, and one process's part of Llama 3 8B on 16 GPUs.

NCCL is mocked in the second program. Each program runs in a process of its own, which compiles the step once for each
option and runs it a few times. All runs share one state, so a case costs only its compile and its steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.verbs import DEBUG, LLAMA_1B, ROOT, gpu_here
from meshkit.config.experiment import Experiment, load
from meshkit.verbs.rehearse.rehearsal import FLAGS

OWN = "as meshkit sets them"
_EITHER: dict[str, dict[str, Any]] = {
    OWN: {},
    "no Triton matmuls": {"xla_gpu_enable_triton_gemm": False},
    "cuDNN fusions": {"xla_gpu_cudnn_gemm_fusion_level": 2},
}
# Every rehearsal, so also the second program, runs without command buffers. The first program has no communication.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama_1b": _EITHER | {"no command buffers": {"xla_gpu_enable_command_buffer": ""}},
    "llama3_8b of 16": _EITHER | {"symmetric buffers": {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}},
}
_STEPS, _WARM_UP = 10, 3


def measure(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Yield the seconds of a step and its compile, and the bytes of its memory, by program and option."""
    for program in CASES:
        command = [sys.executable, "-m", "benchmarks.gpu.options", program, *(["toy"] if toy else [])]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
        with (folder / "options.log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment(program, toy), stderr=log, **streams)
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
        if code := process.wait():
            raise RuntimeError(f"{program} ended with {code}; see options.log")


def experiment_of(program: str, toy: bool, gpu: str = "h100_sxm") -> Experiment:
    """Return the experiment of a program; at toy size the debug Llama."""
    if toy:
        return load(DEBUG)
    if program == "llama_1b":
        return load(LLAMA_1B, [f"cluster.gpu={gpu}"])
    return load(ROOT / "configs/experiments/llama3_8b.toml", [f"cluster.gpu={gpu}", "model.layers=8"])


def environment(program: str, toy: bool) -> dict[str, str]:
    """Return the environment of the process that runs a program: a rehearsal's if GPUs are missing."""
    if toy or program == "llama_1b":
        return dict(os.environ)
    from meshkit.verbs.rehearse.rehearsal import gpu_environment

    return gpu_environment(experiment_of(program, toy), os.environ)


def refused(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the options that the installed XLA does not accept, each with its reason; a compiler for CPUs is asked."""
    import jax

    from meshkit.compile.options import refused_option
    from meshkit.sharding.mesh import use_no_accelerator

    use_no_accelerator()
    found, lowered = [], jax.jit(lambda x: x + 1).lower(1.0)
    for options in cases.values():
        for name, value in options.items():
            try:
                lowered.compile(compiler_options={name: value})
            except Exception as e:  # jax wraps XLA's errors in several types
                found.append(": ".join(refused_option(str(e))))
    return found


def flags() -> dict[str, dict[str, Any]]:
    """Return the XLA_FLAGS of a rehearsal as options."""
    said = (flag.removeprefix("--").partition("=") for flag in FLAGS)
    return {"XLA_FLAGS of a rehearsal": {name: value != "false" and value for name, _, value in said}}


def main(program: str, toy: bool) -> None:
    """Run the cases of a program one after the other, and print a line of JSON for each."""
    experiment = experiment_of(program, toy, "h100_sxm" if toy else gpu_here())
    from meshkit.sharding.mesh import build_mesh, prepare_platform
    from meshkit.verbs.rehearse.rehearsal import filled, mock

    if not toy and program != "llama_1b":
        mock(experiment.cluster)
    prepare_platform(experiment.cluster, memory_fraction=experiment.train.memory_fraction)
    import jax

    from meshkit.compile.attached import compile_step
    from meshkit.compile.options import bytes_at_once, memory_of
    from meshkit.planning.resolved import make_train_step

    devices = sorted(jax.devices(), key=lambda d: d.id)
    mesh: Any = build_mesh(experiment.mesh, experiment.cluster, devices=devices)
    made = make_train_step(experiment, mesh)
    state, batch = filled(made, experiment)
    for case, options in CASES[program].items():
        xla = {**experiment.xla, **({} if toy else options)}
        compiled = compile_step(made, experiment.cluster, experiment.placement, xla)
        times = []
        for _ in range(_WARM_UP + _STEPS):
            began = time.perf_counter()
            state, metrics = compiled.program(state, batch)
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - began)
        memory = memory_of(compiled.program)
        label, values = f"{program}, {case}", {"step_s": statistics.median(times[_WARM_UP:])}
        values |= {"compile_s": compiled.seconds, "bytes": bytes_at_once(memory) if memory else None}
        print(json.dumps({f"{label}: {key}": value for key, value in values.items()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "toy" in sys.argv[2:])
