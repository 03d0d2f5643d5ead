"""Compiles a program of today's jax with the XLA of an older one, which runs this file: `PYTHON child.py FOLDER`.

FOLDER holds module.bin (StableHLO as portable bytecode) and request.json; the scheduled program is left in
FOLDER/dump. It imports nothing of meshkit, which the older Python does not have.
"""

import json
import os
import sys
import time
from pathlib import Path

# Attributes of cuDNN attention that came later; at these values they say nothing.
LATER = ", \\22max_seg_per_batch\\22: {}, \\22is_paged_attention\\22: false"


def main(folder):
    """Reads the request, compiles, and prints the seconds."""
    request = json.loads((folder / "request.json").read_text())
    dump = folder / "dump"
    dump.mkdir(exist_ok=True)
    for file in dump.iterdir():
        file.unlink()
    flags = [f"--xla_dump_to={dump}", "--xla_dump_hlo_as_proto"]
    if request["disabled_passes"]:  # a compile option takes no list in the older XLA
        flags.append(f"--xla_disable_hlo_passes={request['disabled_passes']}")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(f"compiled in {compile_program(folder, request):.1f} s")
    for file in dump.iterdir():
        if not file.name.endswith("after_optimizations.hlo.pb"):
            file.unlink()


def compile_program(folder, request):
    """Compiles; returns the seconds."""
    import jax
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax.experimental import topologies
    from jaxlib import xla_client

    jax.config.update("jax_enable_compilation_cache", False)
    artifact = (folder / "module.bin").read_bytes()
    with mlir.make_ir_context():
        text = str(ir.Module.parse(xla_client._xla.mlir.deserialize_portable_artifact(artifact)))
        for segments in ("1", "\\221\\22"):
            text = text.replace(LATER.format(segments), "")
        module = mlir.module_to_bytecode(ir.Module.parse(text))
    name = request["topology"]
    topology = topologies.get_topology_desc(
        name.replace("x", "_"), "cuda", target_config=request["target_config"], topology=name
    )
    count = len(topology.devices)
    options = compiler.get_choices_for(1, count, np.arange(count).reshape(1, count))
    options.env_option_overrides = list(request["options"].items())
    start = time.perf_counter()
    topology.devices[0].client.compile(module, options)
    return time.perf_counter() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]))
