"""The process that compiles: `python -m meshkit.compile.child FOLDER PARENT`, a process number.

It reads FOLDER/request.json and FOLDER/program.bin (a `jax.export` program), compiles it for GPUs that are not there,
and leaves FOLDER/module.pb (the scheduled HLO) and FOLDER/result.json. XLA aborts the process on some programs; then
only this process dies. What XLA refuses with an exception is in result.json under `error`.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from meshkit.compile.live import live_bytes
from meshkit.compile.options import RefusedOption, compile_lowered, memory_of
from meshkit.compile.scratch import die_with_parent
from meshkit.hlo.proto import ModuleAttributes


def main(folder: Path) -> None:
    """Compiles the request in folder."""
    die_with_parent()
    request = json.loads((folder / "request.json").read_text())
    result: dict[str, Any] = {}
    try:
        result = compile_program(request, (folder / "program.bin").read_bytes(), folder / "module.pb")
    except RefusedOption as e:
        result = {"error": str(e), "option": e.name, "reason": e.reason}
    except Exception as e:  # whatever jax or XLA raises is the answer to the request
        result = {"error": f"{type(e).__name__}: {e}"}
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    partial = folder / "result.json.tmp"
    partial.write_text(json.dumps(result))
    partial.rename(folder / "result.json")


def compile_program(request: dict[str, Any], program: bytes, module_path: Path) -> dict[str, Any]:
    """Deserializes, lowers and compiles; writes the scheduled module and returns memory and times."""
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
    options = {**request["planners_options"], "xla_dump_to": str(dump), **request["compiler_options"]}
    compiled, left_out = compile_lowered(lowered, options, request["users_options"])
    done = time.perf_counter()
    executable: Any = compiled.runtime_executable()
    module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    module_path.write_bytes(module)
    return {
        "left_out": {name: why for name, why in left_out.items() if name in request["compiler_options"]},
        "lower_s": lowered_at - start,
        "compile_s": done - lowered_at,
        "memory": memory_of(compiled),
        "host_memory": memory_of(compiled, "host_"),
        "live": live_bytes(dump, ModuleAttributes(module)),
        "partitioner": "shardy" if jax.config.jax_use_shardy_partitioner else "gspmd",
    }


def _sharding(mesh: Any, described: dict[str, Any] | None) -> Any:
    """The NamedSharding that the request describes; None leaves it to XLA."""
    from jax.sharding import NamedSharding, PartitionSpec

    if described is None:
        return None
    spec = PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in described["spec"]))
    return NamedSharding(mesh, spec, memory_kind=described["memory_kind"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
