"""An experiment -> its step, lowered by today's jax, compiled by an older XLA, read by ours."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax import export

from meshkit.compile.lowering import export_for_cuda
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment
from meshkit.hlo import proto as wire
from meshkit.hlo.module import load_module, read_schedule
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.sharding.mesh import DescribedMesh, build_mesh, describe_devices, use_no_accelerator
from meshkit.step.train_step import make_train_step

_PIPELINED = ("all_gather", "reduce_scatter", "all_reduce")
_RENAMED = {f"xla_gpu_pipeline_{op}": f"xla_gpu_enable_pipelined_{op}" for op in _PIPELINED}
_ALWAYS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_latency_hiding_scheduler": True}
_GRADIENTS = "f8e5m2_highest"  # their matmuls in fp8, which sum with promotion
_TIMEOUT_S = 900.0  # of a compile
_BUS_BITS = 5120  # of a GPU's memory; with the clock that is made of it, its rate
_CUDA = {"0.4.25": (12040, 8907), "0.4.26": (12040, 8907), "": (12080, 90600)}  # CUDA and cuDNN of an XLA; "": later
_LIBRARIES = ("cuda.so.1", "cudart.so.12", "cudnn.so.8", "cudnn.so.9", "cublas.so.12", "cublasLt.so.12", "cufft.so.11",
              "cusolver.so.11", "cusparse.so.12", "cupti.so.12", "nccl.so.2")  # fmt: skip
# Field numbers of xla/service/hlo.proto.
_MODULE, _COMPUTATIONS, _INSTRUCTIONS, _REPLICA_GROUPS, _DEVICE_LIST = 1, 3, 2, 49, 87


def schedule_by(
    python: Path,
    experiment: Experiment,
    folder: Path,
    *,
    flags: Mapping[str, Any],
    profile: Path | None = None,
) -> Schedule:
    """The step of an experiment as the XLA of another Python schedules it.

    Args:
        python: interpreter with jax, jaxlib, jax-cuda12-plugin and jax-cuda12-pjrt of one version.
        experiment: as for plan.
        folder: for the program on its way.
        flags: XLA's options beside the experiment's; those that this XLA does not have are left out.
        profile: costs of its instructions, which the scheduler then goes by.

    Raises:
        subprocess.CalledProcessError: the older XLA refuses it; what it said is in `stderr`.
    """
    use_no_accelerator()
    folder.mkdir(parents=True, exist_ok=True)
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    assert isinstance(mesh, DescribedMesh)
    with _gspmd():
        program = make_train_step(experiment, mesh)
        arguments = (program.abstract_state, program.abstract_batch)
        exported = export_for_cuda(program.step, arguments, mesh, experiment.cluster)
        (folder / "module.bin").write_bytes(_portable(exported.program, exported.donated, versions(python)[1]))
    options = {**program.xla_options, **experiment.xla}
    passes = options.pop("xla_disable_hlo_passes", "")
    renamed = {_RENAMED.get(k, k): v == 2 if k in _RENAMED else v for k, v in options.items()}
    if profile is not None:
        renamed["xla_gpu_pgle_profile_file_or_directory_path"] = str(profile)
    known = _plugin(python).read_bytes()
    asked = {name: json.dumps(value) for name, value in flags.items() if name.encode() in known}
    if passes:  # a compile option takes no list there
        asked["xla_disable_hlo_passes"] = passes
    (folder / "request.json").write_text(json.dumps({"options": {**renamed, **_ALWAYS}, "flags": asked}))
    _run(python, "child.py", folder, experiment)
    return in_fp8(_read(folder, experiment))


def praxis_schedule(python: Path, experiment: Experiment, folder: Path, flags: Mapping[str, Any]) -> Schedule:
    """praxis.py's step on the GPUs of an experiment, as the XLA of a Python schedules it; scheduled.pb stays.

    Raises:
        subprocess.CalledProcessError: it was not compiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked = {name: json.dumps(value) for name, value in {**experiment.xla, **_ALWAYS, **flags}.items()}
    (folder / "request.json").write_text(json.dumps({"flags": asked}))
    _run(python, "praxis.py", folder, experiment)
    return _read(folder, experiment)


def _run(python: Path, child: str, folder: Path, experiment: Experiment) -> None:
    environment = os.environ | stand_in(python, experiment.cluster, experiment.train.memory_fraction)
    command = [python, Path(__file__).with_name(child), folder]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)


def _read(folder: Path, experiment: Experiment) -> Schedule:
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    assert isinstance(mesh, DescribedMesh)
    module = load_module(with_groups((folder / "scheduled.pb").read_bytes()))
    return read_schedule(module, mesh.placement(experiment.cluster))


def stand_in(python: Path, cluster: Cluster, memory_fraction: float) -> dict[str, str]:
    """Environment in which CUDA's libraries are driver.c, built beside XLA's plugin, and describe a cluster's GPUs.

    Args:
        python: whose XLA asks.
        cluster: every GPU of it, as if in one host.
        memory_fraction: share of a GPU's memory that the client may take.
    """
    plugin = _plugin(python)
    folder = plugin.with_name("stand_in")
    if not (folder / "libcuda.so.1").exists():
        folder.mkdir(exist_ok=True)
        source = Path(__file__).with_name("driver.c").read_text()
        names = {
            name.decode() for name in re.findall(rb"\0(_{0,2}cu[a-zA-Z]*[A-Z]\w{2,60})(?=\0)", plugin.read_bytes())
        }
        others = names - set(re.findall(r"\w+", source))
        answers = (f"int {name}(void) {{ return 0; }}\n" for name in sorted(others))
        (folder / "all.c").write_text("".join((source, *answers)))
        build = ["cc", "-w", "-shared", "-fPIC", "-o", folder / "stand_in.so", folder / "all.c"]
        subprocess.run(build, check=True, capture_output=True, text=True)
        for library in _LIBRARIES:
            (folder / f"lib{library}").symlink_to("stand_in.so")
    cuda, cudnn = _CUDA.get(versions(python)[0], _CUDA[""])
    gpu = cluster.gpu
    assert gpu.compute_capability is not None
    t = gpu.target
    attributes = {
        8: t["shared_memory_per_block_bytes"],
        13: gpu.clock_hz / 1e3,
        16: gpu.sms,
        36: gpu.memory_bytes_per_s / (2 * _BUS_BITS / 8) / 1e3,
        37: _BUS_BITS,
        38: gpu.l2_bytes,
        39: t["max_threads_per_sm"],
        75: gpu.compute_capability[0],
        76: gpu.compute_capability[1],
        81: t["shared_memory_per_sm_bytes"],
        82: t["registers_per_sm"],
        97: t["shared_memory_per_block_optin_bytes"],
    }
    return {
        **{f"GPU_ATTRIBUTE_{number}": str(int(value)) for number, value in attributes.items()},
        "GPU_COUNT": str(cluster.num_gpus),
        "GPU_NAME": gpu.name,
        "CUDA_VERSION": str(cuda),
        "CUDNN_VERSION": str(cudnn),
        "GPU_BYTES": str(int(gpu.memory_bytes)),
        "JAX_PLATFORMS": "cuda",
        "LD_LIBRARY_PATH": str(folder),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(memory_fraction),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def _plugin(python: Path) -> Path:
    return next(python.parent.parent.glob("lib/python3*/site-packages/jax_plugins/xla_cuda12/xla_cuda_plugin.so"))


@functools.cache
def versions(python: Path) -> tuple[str, str]:
    """Of jaxlib in a Python, and of the StableHLO that it reads."""
    code = "import jaxlib, jaxlib.mlir.dialects.stablehlo as s; print(jaxlib.__version__, s.get_current_version())"
    found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return found[0], found[1]


@contextmanager
def _gspmd() -> Iterator[None]:
    """The older XLA reads no Shardy of today."""
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def _portable(program: bytes, donated: list[int], version: str) -> bytes:
    """An exported program as StableHLO of an earlier version; each donated argument's sharding is its output's too."""
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jaxlib.mlir import ir

    exported = export.deserialize(bytearray(program))
    with mlir.make_ir_context():
        module = ir.Module.parse(exported.mlir_module())
        (main,) = (f for f in module.body.operations if str(f.attributes["sym_name"]) == '"main"')
        arguments = [{a.name: a.attr for a in described} for described in cast(Any, main.attributes["arg_attrs"])]
        left = list(donated)
        results = []
        for out in exported.out_avals:
            kind = out.shape, out.dtype
            k = next((k for k in left if (exported.in_avals[k].shape, exported.in_avals[k].dtype) == kind), None)
            sharding = None if k is None else arguments[k].get("mhlo.sharding")
            results.append({} if sharding is None else {"mhlo.sharding": sharding})
            if k is not None:
                left.remove(k)
                arguments[k]["jax.buffer_donor"] = ir.BoolAttr.get(True)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in arguments])
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(r) for r in results])
        return _jax.mlir.serialize_portable_artifact(mlir.module_to_bytecode(module), version)


def with_groups(proto: bytes) -> bytes:
    """The module of an older HloProto, its collectives' iota device lists written out, which today's XLA ignores."""
    (module,) = wire.read_fields(proto)[_MODULE]
    return _mapped(cast(bytes, module), _COMPUTATIONS, lambda c: _message(3, _mapped(c, _INSTRUCTIONS, _instruction)))


def _instruction(instruction: bytes) -> bytes:
    return _message(_INSTRUCTIONS, _mapped(instruction, _DEVICE_LIST, _groups))


def _groups(devices: bytes) -> bytes:
    fields = wire.read_fields(devices)
    for f in wire.messages(fields, 2):
        ids = np.arange(np.prod(wire.ints(f, 3))).reshape(wire.ints(f, 3)).transpose(wire.ints(f, 4))
        rows = ids.reshape(wire.integer(f, 1), wire.integer(f, 2))
        packed = (_message(1, b"".join(_varint(int(i)) for i in row)) for row in rows)
        return b"".join(_message(_REPLICA_GROUPS, p) for p in packed)
    return b"".join(_message(_REPLICA_GROUPS, group) for group in cast(list[bytes], fields.get(1, [])))


def _mapped(message: bytes, number: int, change: Any) -> bytes:
    """A message with every value of one field replaced by the bytes that a function makes of it."""
    parts = []
    position = 0
    while position < len(message):
        start = position
        tag, position = _read_varint(message, position)
        if tag & 7 == 2:
            size, position = _read_varint(message, position)
            value, position = message[position : position + size], position + size
            parts.append(change(value) if tag >> 3 == number else message[start:position])
            continue
        position = _read_varint(message, position)[1] if tag & 7 == 0 else position + {1: 8, 5: 4}[tag & 7]
        parts.append(message[start:position])
    return b"".join(parts)


def _message(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes((*out, n))


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def in_fp8(schedule: Schedule) -> Schedule:
    """Matmuls of gradients priced in fp8, which XLA of early 2024 runs in fp16.

    It matches no matmul of f8e5m2 by f8e4m3fn; the runs of its day had Transformer Engine's, which are in fp8. What it
    converts around them stays.
    """

    def priced(i: Instruction) -> Instruction:
        cost = i.cost
        if cost is None or "f16" not in cost.matmul_flops:
            return i
        matmuls = tuple(replace(m, dtype=_GRADIENTS) if m.dtype == "f16" else m for m in cost.matmuls)
        flops = {(_GRADIENTS if dtype == "f16" else dtype): n for dtype, n in cost.matmul_flops.items()}
        return replace(i, cost=replace(cost, matmuls=matmuls, matmul_flops=flops))

    return replace(schedule, computations={n: tuple(map(priced, c)) for n, c in schedule.computations.items()})
