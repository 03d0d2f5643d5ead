"""Ten models that do not use meshkit are sharded, trained, profiled and planned.

`python -m benchmarks.third_party FLAX_CHECKOUT` prints the table and writes it to models.md beside this file. Without a
checkout, it does the same with the models of kinds.py and kinds.md. `--only NAME` runs one model and prints its row.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace as with_changes
from fnmatch import fnmatchcase
from importlib import metadata
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType

import meshkit as mk

HERE = Path(__file__).parent
HEADER = ("model", "meshkit lines", "loss", "difference", "measured", "planned for 8 H100", "findings")


def measure(foreign: Any, folder: str) -> dict[str, Any]:
    """Return the results of everything that meshkit does with a model.

    The lines of meshkit's API in this function, and in the model's own, are counted.
    """
    cpus, h100s = mk.Cluster.load("cpu8"), mk.Cluster.load("dgx_h100")
    spec, rules = mk.MeshSpec.parse(dict(foreign.axes)), foreign.rules
    types = AxisType.Explicit if foreign.explicit else AxisType.Auto
    mesh = mk.build_mesh(spec, cpus, axis_types=types)
    absent = mk.build_mesh(spec, h100s, devices=mk.describe_devices(h100s), axis_types=types)
    own, loss, tx = foreign.step, foreign.loss, foreign.optimizer
    bare = own is not None and not hasattr(own, "lower")
    ready = lambda on: (
        nnx.jit(mk.keep_shardings(on, rules)(own)) if bare else own or mk.sharded_step(loss, on, rules, optimizer=tx)
    )
    batch = _batch(foreign, mesh)
    state = _as_arguments(mk.shard_model(foreign.make, mesh, rules))
    cut = _bytes_on_a_device(state, foreign, mesh)
    compiled = ready(mesh).lower(*state, *batch).compile()
    with mk.profile(folder, program=compiled, mesh=mesh, cluster=cpus, mesh_spec=spec) as capture:
        found = _losses(compiled, state, _batches(foreign, mesh))
    args = (*_as_arguments(mk.abstract(foreign.make, absent, rules)), *_batch(foreign, absent))
    predicted = mk.plan(ready(absent), args, mesh=absent, cluster=h100s)
    codes = [f.code for f in mk.lint(ready(absent), args, mesh=absent, cluster=h100s, rules=rules)]
    return {"found": found, "measured": capture.report, "predicted": predicted, "codes": codes, "cut": cut}


def row_of(name: str, flax: Path | None = None) -> list[str]:
    """Return one row of a table: of a model in a checkout of flax, or of one of kinds.py with its bytes on a device."""
    mk.prepare_platform(mk.Cluster.load("cpu8"))
    from benchmarks.third_party import kinds, models

    given = () if flax is None else (flax,)
    make = getattr(models if given else kinds, name)
    whole = make(*given)
    with nnx.use_eager_sharding(False):  # Otherwise names of axes need a mesh.
        state = _as_arguments(whole.make())
    before = _bytes_on_a_device(state)
    expected = _losses(_plain(whole), state, _batches(whole))
    with tempfile.TemporaryDirectory() as folder:
        done = measure(make(*given), folder)
    worst = max(abs(a - b) / abs(a) for a, b in zip(expected, done["found"]))
    lines = [line for part in (measure, make) for line in inspect.getsource(part).splitlines() if "mk." in line]
    measured, predicted = done["measured"], done["predicted"]
    kinds = sorted({row.collective for row in predicted.communication})
    row = [
        whole.what,
        str(len(lines)),
        f"{expected[-1]:.6f}",
        f"{worst:.1e}",
        f"{measured.window.steps} steps, {', '.join(sorted({row.collective for row in measured.communication}))}",
        f"{predicted.step.time_s * 1e6:.0f} us, {', '.join(kinds) or 'no collective'}",
        ", ".join(sorted(set(done["codes"]))) or "-",
    ]
    return row if given else [*row, f"{before:,} to {done['cut']:,}"]


def _as_arguments(state: Any) -> tuple[Any, ...]:
    return state if isinstance(state, tuple) else (state,)


def _batch(foreign: Any, mesh: Any) -> tuple[Any, ...]:
    """Return the first batch as it arrives on the mesh."""
    return _cut(foreign.batch, mesh, foreign.rules) if foreign.explicit or foreign.placed else foreign.batch


def _batches(foreign: Any, mesh: Any = None) -> Iterator[tuple[Any, ...]]:
    """Yield the batches of four steps, on one device or as they arrive on the mesh."""
    for batch in islice(foreign.loader() if foreign.loader else repeat(foreign.batch), 4):
        yield batch if mesh is None else _batch(with_changes(foreign, batch=batch), mesh)


def _bytes_on_a_device(state: Any, foreign: Any = None, mesh: Any = None) -> int:
    """Return the bytes of a state on its first device.

    Raises:
        ValueError: an array is not sharded as the first override that matches it says.
    """
    total = 0
    modules = any(isinstance(member, nnx.Module) for member in state)
    for path, x in jax.tree.leaves_with_path(nnx.state(state) if modules else state):
        shape = x.sharding.shard_shape(x.shape)
        total += math.prod(shape) * x.dtype.itemsize
        if foreign is not None and foreign.placed:
            name = f"/{jax.tree_util.keystr(path, simple=True, separator='/').removesuffix('/value')}"
            globs = [(glob.removeprefix("**/"), spec) for glob, spec in foreign.rules.overrides]
            spec = next((s for glob, s in globs if fnmatchcase(name, f"*/{glob}")), ((),) * x.ndim)
            ruled = tuple(n // math.prod(mesh.shape[a] for a in axes) for n, axes in zip(x.shape, spec, strict=True))
            if shape != ruled:
                raise ValueError(f"{name} has {shape} on a device, and the rules say {ruled}")
    return total


def _losses(step: Any, state: tuple[Any, ...], batches: Iterable[tuple[Any, ...]]) -> list[float]:
    """Return the losses of steps from a state, one for each batch."""
    found = []
    for batch in batches:
        value = step(*state, *batch)
        if isinstance(value, tuple):
            state, value = (value[0],), value[1]
        found.append(float(value))
    return found


def _plain(foreign: Any) -> Any:
    """Return the same training without meshkit."""
    if foreign.step is not None:
        return foreign.step if hasattr(foreign.step, "lower") else nnx.jit(foreign.step)
    if foreign.optimizer is None:

        @nnx.jit
        def of_modules(model, optimizer, *batch):
            value, gradients = nnx.value_and_grad(foreign.loss)(model, *batch)
            optimizer.update(model, gradients)
            return value

        return of_modules

    @jax.jit
    def of_arrays(state, *batch):
        value, gradients = jax.value_and_grad(foreign.loss)(state["params"], *batch)
        updates, moments = foreign.optimizer.update(gradients, state["opt_state"], state["params"])
        params = jax.tree.map(lambda p, u: p + u, state["params"], updates)
        return {"params": params, "opt_state": moments}, value

    return of_arrays


def _cut(batch: tuple[Any, ...], mesh: Any, rules: Any) -> tuple[Any, ...]:
    """Return the arrays of a batch, sharded over the mesh."""
    lies = jax.NamedSharding(mesh, jax.P(tuple(rules.logical["act_batch"])))
    if isinstance(mesh, jax.sharding.Mesh):
        return tuple(jax.device_put(x, lies) for x in batch)
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies) for x in batch)


def main() -> None:
    """Run each model in a process of its own, because several call their module `models`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flax", nargs="?", help="a checkout of https://github.com/google/flax; without it, kinds.py")
    parser.add_argument("--only", help="name of the one model to run")
    given = parser.parse_args()
    checkout = [given.flax] if given.flax else []
    if given.only:
        print(json.dumps(row_of(given.only, *map(Path, checkout))))
        return
    from benchmarks.third_party.kinds import KINDS
    from benchmarks.third_party.models import MODELS

    rows = []
    for model in MODELS if checkout else KINDS:
        command = [sys.executable, "-m", "benchmarks.third_party", *checkout, "--only", model.__name__]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            sys.exit(f"{model.__name__} failed")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(" | ".join(rows[-1]), flush=True)
    header = HEADER if checkout else (*HEADER, "bytes on a device")
    text = "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])
    packages = ("keras",) if checkout else ("optax", "grain", "dm-haiku", "equinox", "transformers")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax", *packages))
    title, file = ("Ten models of others", "models.md") if checkout else ("Ten of other kinds", "kinds.md")
    about = inspect.getdoc(sys.modules[__name__ if checkout else "benchmarks.third_party.kinds"])
    (HERE / file).write_text(f"# {title}\n\n{about}\n\nMade with {versions}.\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
