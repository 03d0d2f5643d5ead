"""Compiles a program of today's jax with the XLA of an older one, which runs this file: `PYTHON child.py FOLDER`.

FOLDER holds module.bin (StableHLO as portable bytecode) and request.json; the scheduled program becomes scheduled.pb
in it. It imports nothing of meshkit, which the older Python does not have. Its CUDA libraries are driver.c.
"""

import json
import os
import sys
import time
from pathlib import Path

SCHEDULED = "*after_optimizations.hlo.pb"
# An XLA with a GPU builds cuDNN's kernels while it compiles: attention goes by a name of the same length that it does
# not know, as Transformer Engine's does.
CUDNN, UNKNOWN = "__cudnn$fmha", "__other$fmha"


def main(folder):
    """Reads the request, compiles, and prints the seconds."""
    request = json.loads((folder / "request.json").read_text())
    dump = folder / "dump"
    dump.mkdir(exist_ok=True)
    for file in dump.iterdir():
        file.unlink()
    flags = [f"--xla_dump_to={dump}", "--xla_dump_hlo_as_proto"]
    flags += [f"--{name}={value}" for name, value in request["flags"].items()]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    try:
        print(f"compiled in {compile_program(folder, request):.1f} s", flush=True)
    except RuntimeError:  # of what it does not know, when the schedule is written already
        if not any(dump.glob(SCHEDULED)):
            raise
    for file in dump.glob(SCHEDULED):
        (folder / "scheduled.pb").write_bytes(file.read_bytes().replace(UNKNOWN.encode(), CUDNN.encode()))
    os._exit(0)  # nothing to release on GPUs that are not there


def compile_program(folder, request):
    """Compiles; returns the seconds."""
    import jax
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib import xla_client

    jax.config.update("jax_enable_compilation_cache", False)
    artifact = (folder / "module.bin").read_bytes()
    with mlir.make_ir_context():
        text = str(ir.Module.parse(xla_client._xla.mlir.deserialize_portable_artifact(artifact)))
        module = mlir.module_to_bytecode(ir.Module.parse(text.replace(CUDNN, UNKNOWN)))
    try:
        from jax._src import hardware_utils

        hardware_utils.has_visible_nvidia_gpu = lambda: True
    except ImportError:  # before jax looked for one
        pass
    devices = jax.devices("cuda")
    options = compiler.get_compile_options(1, len(devices), np.arange(len(devices)).reshape(1, len(devices)))
    options.env_option_overrides = list(request["options"].items())
    start = time.perf_counter()
    devices[0].client.compile(module, options)
    return time.perf_counter() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]))
