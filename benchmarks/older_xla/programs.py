"""An experiment -> its step, lowered by today's jax, compiled by an older XLA, read by ours."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax import export

from meshkit.compile.lowering import export_for_cuda, target_config, topology_name
from meshkit.config.experiment import Experiment
from meshkit.hlo import proto as wire
from meshkit.hlo.module import load_module, read_schedule
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.sharding.mesh import DescribedMesh, build_mesh, describe_devices, use_no_accelerator
from meshkit.step.train_step import make_train_step

# Of jaxlib 0.4.38 (December 2024), the oldest that compiles without a GPU.
STABLEHLO = "1.8.0"
_LATER_FIELDS = (
    "thread_dim_limit",
    "runtime_version",
    "driver_version",
    "compile_time_toolkit_version",
    "dnn_version",
    "device_interconnect_info",
    "device_vendor",
    "platform_version",
    "  name:",
    "device_address_bits",
)
_PIPELINED = ("all_gather", "reduce_scatter", "all_reduce")
_RENAMED = {f"xla_gpu_pipeline_{op}": f"xla_gpu_enable_pipelined_{op}" for op in _PIPELINED}
_ALWAYS = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
}
# Field numbers of xla/service/hlo.proto.
_MODULE, _COMPUTATIONS, _INSTRUCTIONS, _REPLICA_GROUPS, _DEVICE_LIST = 1, 3, 2, 49, 87


def schedule_by(
    python: Path,
    experiment: Experiment,
    folder: Path,
    *,
    profile: Path | None = None,
    timeout_s: float = 900.0,
) -> Schedule:
    """The step of an experiment as the XLA of another Python schedules it.

    Args:
        python: interpreter with jax, jaxlib, jax-cuda12-plugin and jax-cuda12-pjrt of version 0.4.38.
        experiment: as for plan.
        folder: for the program on its way.
        profile: costs of its instructions, which the scheduler then goes by.
        timeout_s: for the compiler.

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
        (folder / "module.bin").write_bytes(_portable(exported.program, exported.donated))
    options = {**program.xla_options, **experiment.xla}
    passes = options.pop("xla_disable_hlo_passes", "")
    renamed = {_RENAMED.get(k, k): v == 2 if k in _RENAMED else v for k, v in options.items()}
    if profile is not None:
        renamed["xla_gpu_pgle_profile_file_or_directory_path"] = str(profile)
    (folder / "request.json").write_text(
        json.dumps(
            {
                "topology": topology_name(experiment.cluster),
                "target_config": _older(target_config(experiment.cluster.gpu)),
                "options": {**renamed, **_ALWAYS},
                "disabled_passes": passes,
            }
        )
    )
    child = Path(__file__).with_name("child.py")
    subprocess.run([python, child, folder], check=True, capture_output=True, text=True, timeout=timeout_s)
    (found,) = (folder / "dump").iterdir()
    return read_schedule(load_module(with_groups(found.read_bytes())), mesh.placement(experiment.cluster))


@contextmanager
def _gspmd() -> Iterator[None]:
    """The older XLA reads no Shardy of today."""
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def _portable(program: bytes, donated: list[int]) -> bytes:
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
        return _jax.mlir.serialize_portable_artifact(mlir.module_to_bytecode(module), STABLEHLO)


def _older(config: str) -> str:
    """A target description without the fields that came later."""
    lines = [line for line in config.splitlines() if not any(later in line for later in _LATER_FIELDS)]
    return re.sub(r" feature_extension: \w+", "", "\n".join(lines))


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


def in_fp8(schedule: Schedule, head: int) -> Schedule:
    """The layers' matmuls priced in fp8.

    Without a GPU that XLA does not know its CUDA version, and multiplies what is quantized to fp8 in bf16.

    Args:
        schedule: of an fp8 program.
        head: width of the output head, which is not quantized.
    """

    def priced(i: Instruction) -> Instruction:
        cost = i.cost
        if cost is None or not cost.matmuls or any(head in (m.m, m.n, m.k) for m in cost.matmuls):
            return i
        matmuls = tuple(replace(m, dtype="f8e4m3fn") for m in cost.matmuls)
        flops = {"f8e4m3fn": sum(cost.matmul_flops.values())}
        return replace(i, cost=replace(cost, matmuls=matmuls, matmul_flops=flops))

    return replace(schedule, computations={n: tuple(map(priced, c)) for n, c in schedule.computations.items()})
