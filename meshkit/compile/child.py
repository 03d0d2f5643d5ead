"""The process that compiles: a `meshkit.children.Child`, since XLA aborts its process on some programs.

It reads program.bin (a `jax.export` program) in the folder of its request, compiles it for GPUs that are not there, and
leaves module.pb (the scheduled HLO) there. Kernels are taken from the folder's `kernels`, and new ones added.

XLA also writes its live ranges down (`xla_dump_to`), where the peak is a list of buffers:

    Live ranges at 92 (peak):
    param.2{2}: 1572864 bytes (cumulative: 5767168 bytes)

The module says which model code made each of them (`op_name`), and autodiff marks that: what the forward pass made is
below `jvp(...)`, what the backward pass made below `transpose(jvp(...))`.
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
    """Return the bytes at the peak by kind of KINDS, from a dump of XLA, or None where it has no live ranges.

    `forward`: made by the forward pass: what it keeps for the backward pass, or works on. `backward`: made by the
    backward pass, recomputed activations among them. `carried`: what a loop of the backward pass carries along, as
    sums of gradients. `argument`: of the program. `other`: no code of the model made it.

    Args:
        folder: of the dump.
        module: that was compiled.
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
    """Bytes that XLA keeps in collective memory, by the buffers that it wrote down: `size 1024, color 7, ...`."""
    files = sorted(folder.glob("*buffer-assignment.txt"))
    lines = files[-1].read_text(encoding="utf-8", errors="replace").splitlines() if files else []
    return sum(int(found[1]) for line in lines if (found := _COLLECTIVE_MEMORY.match(line)))


def _at_peak(file: Path) -> Iterator[tuple[str, int]]:
    """Instruction and bytes of each buffer that is alive at the peak."""
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
    """Instruction -> kind; a parameter of a loop's body has that of the loop."""
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
    """Return what `compile_program` says of the program in `request["folder"]`; of an option of the user's that XLA
    refuses its name, as `option`, and the `reason`."""
    folder = Path(request["folder"])
    import jax

    try:
        return compile_program(request, (folder / "program.bin").read_bytes(), folder / "module.pb")
    except RefusedOption as e:
        return {"option": e.name, "reason": e.reason}
    finally:
        jax.clear_caches()  # the next program is another one


def compile_program(request: dict[str, Any], program: bytes, module_path: Path) -> dict[str, Any]:
    """Deserializes, lowers and compiles; writes the scheduled module and returns memory and times.

    Args:
        request: what `program.compile_absent` writes down: topology and target, the mesh and the order of its devices,
            shardings and donations of the arguments, options by name and which of them are the user's.
        program: as `jax.export` serializes it.
        module_path: file for the serialized HloModuleProto; what XLA dumps goes into the folder `dump` beside it.

    Returns:
        Fields of `program.CompiledProgram` as JSON has them, bytes of one GPU and seconds, and `left_out`: name of an
        option that this XLA does not take -> its reason.

    Raises:
        RefusedOption: XLA refuses an option of the user's.
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
    # On the abstract mesh: devices that are not there have no memories, so on theirs a memory kind would be dropped.
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
    own = {"xla_dump_to": str(dump), "xla_gpu_kernel_cache_file": str(kernels)}  # what is read here: the user's yield
    options, had_kernels = {**request["planners_options"], **asked, **own}, kernels.exists()
    try:
        compiled, left_out = compile_lowered(lowered, options, request["users_options"])
    except Exception as e:  # jax wraps XLA's errors in several types
        if not had_kernels or isinstance(e, RefusedOption):
            raise
        kernels.unlink(missing_ok=True)  # of a form that this XLA does not take
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
    """Return the NamedSharding that the request describes; None leaves it to XLA."""
    from jax.sharding import NamedSharding, PartitionSpec

    if described is None:
        return None
    spec = PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in described["spec"]))
    return NamedSharding(mesh, spec, memory_kind=described["memory_kind"])


if __name__ == "__main__":
    serve(answer)
