"""Compile a program in a child process (`meshkit.children.Child`), because XLA aborts its process on some programs.

The child reads program.bin (a `jax.export` program) from the folder of its request, compiles it for GPUs that this
machine does not have, and writes module.pb (the scheduled HLO) to the same folder. XLA reads compiled kernels from the
file `kernels` there and adds new ones to it.

XLA also dumps its live ranges (`xla_dump_to`). The dump lists the buffers at the peak:

    Live ranges at 92 (peak):
    param.2{2}: 1572864 bytes (cumulative: 5767168 bytes)

The `op_name` of an instruction tells which model code made the buffer, and autodiff leaves its mark there: the forward
pass is below `jvp(...)`, the backward pass below `transpose(jvp(...))`.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshkit.children import serve
from meshkit.compile.options import RefusedOption, compile_lowered, memory_of
from meshkit.hlo.proto import Module

_PEAK = re.compile(r"^\s*Live ranges at \d+ \(peak\):")
_COLLECTIVE_MEMORY = re.compile(r"^allocation \d+: size (\d+), color 7,")
_BUFFER = re.compile(r"^\s*(\S+?)\{([\d,]*)\}: (\d+) bytes")
FORWARD, BACKWARD, CARRIED, ARGUMENT, OTHER = "forward", "backward", "carried", "argument", "other"
KERNELS_FILE = "kernels"
_OURS = "the process that plans sets it itself, and reads what XLA writes there"
KINDS: tuple[str, ...] = (FORWARD, BACKWARD, CARRIED, ARGUMENT, OTHER)


def live_bytes(folder: Path, module: Module) -> dict[str, int] | None:
    """Return the bytes at the peak for each of KINDS, from an XLA dump; None if the dump has no live ranges.

    `forward`: made by the forward pass, for itself or for the backward pass. `backward`: made by the backward pass,
    including recomputed activations. `carried`: the carry of a loop in the backward pass, such as sums of gradients.
    `argument`: an argument of the program. `other`: not made by code of the model.

    Args:
        folder: the folder of the dump.
        module: the compiled module.
    """
    files = sorted(folder.glob("*live-range.txt"))
    if not files:
        return None
    kinds = _kinds(module)
    found = dict.fromkeys(KINDS, 0)
    for name, size in _at_peak(files[-1]):
        found[kinds.get(name, OTHER)] += size
    return found


def symmetric_bytes(folder: Path) -> int:
    """Return the bytes that XLA allocates in collective memory (color 7), from the buffer assignment in its dump."""
    files = sorted(folder.glob("*buffer-assignment.txt"))
    lines = files[-1].read_text(encoding="utf-8", errors="replace").splitlines() if files else []
    return sum(int(found[1]) for line in lines if (found := _COLLECTIVE_MEMORY.match(line)))


def _at_peak(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the instruction and the bytes of each buffer that is live at the peak."""
    inside = False
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if inside:
                buffer = _BUFFER.match(line)
                if not buffer:
                    return
                yield buffer[1], int(buffer[3])
            elif _PEAK.match(line):
                inside = True


def _kinds(module: Module) -> dict[str, str]:
    """Return the kind of each instruction by name.

    A parameter of a loop body has the kind of the loop, but `carried` for a loop of the backward pass.
    """
    kinds: dict[str, str] = {}
    parameters: dict[str, list[str]] = {}
    loops: dict[str, str] = {}
    for computation in module.computations.values():
        for i in computation.order:
            kind = _of_path(i.source)
            if i.opcode == "parameter":
                parameters.setdefault(computation.name, []).append(i.name)
                kind = ARGUMENT if computation is module.entry else OTHER
            if i.opcode == "while":
                loops[i.called[0].name] = kind
            kinds[i.name] = kind
    for body, kind in loops.items():
        for name in parameters.get(body, ()):
            kinds[name] = CARRIED if kind == BACKWARD else kind
    return kinds


def _of_path(path: str) -> str:
    if "transpose(" in path:
        return BACKWARD
    return FORWARD if "jvp(" in path else OTHER


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `compile_program` for the program in `request["folder"]`.

    If XLA refuses an option that the user set, return its name as `option`, and the `reason`.
    """
    folder = Path(request["folder"])
    import jax

    try:
        return compile_program(request, (folder / "program.bin").read_bytes(), folder / "module.pb")
    except RefusedOption as e:
        return {"option": e.name, "reason": e.reason}
    finally:
        jax.clear_caches()  # the next request is for another program


def compile_program(request: dict[str, Any], program: bytes, module_path: Path) -> dict[str, Any]:
    """Deserialize, lower and compile a program, write its scheduled module, and return its memory and times.

    Args:
        request: the request of `program.compile_absent`: topology and target, the mesh and the order of its devices,
            shardings and donations of the arguments, options by name, and the names of the options that the user set.
        program: the bytes that `jax.export` serialized.
        module_path: the file for the serialized HloModuleProto; XLA dumps into the folder `dump` beside it.

    Returns:
        Fields of `program.CompiledProgram` as JSON values (bytes of one GPU, seconds), and `left_out`: the name of
        each option that was not used -> the reason.

    Raises:
        RefusedOption: XLA refuses an option that the user set.
    """
    import jax
    import numpy as np
    from jax import export
    from jax.experimental import topologies

    start = time.perf_counter()
    jax.config.update("jax_enable_x64", request["enable_x64"])
    topology = topologies.get_topology_desc(
        platform="cuda", topology=request["topology"], target_config=request["target_config"]
    )
    order = np.array(request["device_order"]).reshape(request["mesh_shape"])
    devices = np.empty(len(topology.devices), dtype=object)
    devices[:] = sorted(topology.devices, key=lambda d: d.id)
    types = tuple(jax.sharding.AxisType[name] for name in request["axis_types"])
    mesh = jax.sharding.Mesh(devices[order], request["axis_names"], axis_types=types)
    from meshkit.compile.partitioned import restored

    partitioned = {key: base64.b64decode(said) for key, said in request["partitioned"].items()}
    answering = restored(partitioned, mesh)
    exported = export.deserialize(bytearray(program))
    # Use the abstract mesh: described devices have no memories, so a mesh of them would drop memory kinds.
    shardings = [_sharding(mesh.abstract_mesh, described) for described in request["arguments"]]
    flat = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(exported.in_avals, shardings)]
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_shardings_jax(mesh))
    jitted = jax.jit(exported.call, donate_argnums=tuple(request["donated"]), out_shardings=outputs, keep_unused=True)
    with jax.set_mesh(mesh):
        lowered = jitted.trace(*flat).lower(lowering_platforms=("cuda",))
    lowered_at = time.perf_counter()
    dump = module_path.parent / "dump"
    kernels = module_path.parent / KERNELS_FILE
    asked = request["compiler_options"]
    own = {"xla_dump_to": str(dump), "xla_gpu_kernel_cache_file": str(kernels)}  # these override the user's options
    options, had_kernels = {**request["planners_options"], **asked, **own}, kernels.exists()
    try:
        compiled, left_out = compile_lowered(lowered, options, request["users_options"])
    except Exception as e:  # jax wraps XLA's errors in several types
        if not had_kernels or isinstance(e, RefusedOption):
            raise
        kernels.unlink(missing_ok=True)  # this XLA may be unable to read the kept file
        compiled, left_out = compile_lowered(lowered, options, request["users_options"])
    del answering
    done = time.perf_counter()
    executable: Any = compiled.runtime_executable()
    module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    module_path.write_bytes(module)
    return {
        "left_out": {name: why for name, why in {**left_out, **dict.fromkeys(own, _OURS)}.items() if name in asked},
        "lower_s": lowered_at - start,
        "compile_s": done - lowered_at,
        "memory": memory_of(compiled),
        "host_memory": memory_of(compiled, "host_"),
        "live": live_bytes(dump, Module(module)),
        "symmetric_bytes": symmetric_bytes(dump),
        "partitioner": "shardy" if jax.config.jax_use_shardy_partitioner else "gspmd",
    }


def _sharding(mesh: Any, described: dict[str, Any] | None) -> Any:
    """Return the NamedSharding that the request describes; None leaves the choice to XLA."""
    from jax.sharding import NamedSharding, PartitionSpec

    if described is None:
        return None
    spec = PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in described["spec"]))
    return NamedSharding(mesh, spec, memory_kind=described["memory_kind"])


if __name__ == "__main__":
    serve(answer)
