"""Ten models that meshkit does not know: sharded, trained, profiled and planned.

`python -m benchmarks.third_party FLAX_CHECKOUT` prints the table and writes it to models.md beside this file;
`--only NAME` runs one in this process and prints its row.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType

import meshkit as mk

HERE = Path(__file__).parent
HEADER = ("model", "meshkit lines", "loss", "difference", "measured", "planned for 8 H100", "findings")


def measure(foreign: Any, folder: str) -> dict[str, Any]:
    """Everything that meshkit does with a model of others: its lines here, and of the model's function, are counted."""
    cpus, h100s = mk.Cluster.load("cpu8"), mk.Cluster.load("dgx_h100")
    spec, rules = mk.MeshSpec.parse(dict(foreign.axes)), foreign.rules
    types = AxisType.Explicit if foreign.explicit else AxisType.Auto
    mesh = mk.build_mesh(spec, cpus, axis_types=types)
    absent = mk.build_mesh(spec, h100s, devices=mk.describe_devices(h100s), axis_types=types)
    ready = lambda mesh: foreign.step or mk.sharded_step(foreign.loss, mesh, rules, optimizer=foreign.optimizer)
    batch = _cut(foreign.batch, mesh, rules) if foreign.explicit else foreign.batch
    state = _as_arguments(mk.shard_model(foreign.make, mesh, rules))
    compiled = ready(mesh).lower(*state, *batch).compile()
    with mk.profile(folder, program=compiled, mesh=mesh, cluster=cpus, mesh_spec=spec) as capture:
        found = _losses(compiled, state, batch, 4)
    batch = _cut(foreign.batch, absent, rules) if foreign.explicit else foreign.batch
    args = (*_as_arguments(mk.abstract(foreign.make, absent, rules)), *batch)
    predicted = mk.plan(ready(absent), args, mesh=absent, cluster=h100s)
    codes = [f.code for f in mk.lint(ready(absent), args, mesh=absent, cluster=h100s, rules=rules)]
    return {"found": found, "measured": capture.report, "predicted": predicted, "codes": codes}


def row_of(name: str, flax: Path) -> list[str]:
    """One row of the table."""
    mk.prepare_platform(mk.Cluster.load("cpu8"))
    from benchmarks.third_party import models

    make = getattr(models, name)
    whole = make(flax)
    with nnx.use_eager_sharding(False):  # names of axes need a mesh else
        state = _as_arguments(whole.make())
    expected = _losses(_plain(whole), state, whole.batch, 4)
    with tempfile.TemporaryDirectory() as folder:
        done = measure(make(flax), folder)
    worst = max(abs(a - b) / abs(a) for a, b in zip(expected, done["found"]))
    lines = [line for part in (measure, make) for line in inspect.getsource(part).splitlines() if "mk." in line]
    measured, predicted = done["measured"], done["predicted"]
    kinds = sorted({row.collective for row in predicted.communication})
    return [
        whole.what,
        str(len(lines)),
        f"{expected[-1]:.6f}",
        f"{worst:.1e}",
        f"{measured.window.steps} steps, {', '.join(sorted({row.collective for row in measured.communication}))}",
        f"{predicted.step.time_s * 1e6:.0f} us, {', '.join(kinds) or 'no collective'}",
        ", ".join(sorted(set(done["codes"]))) or "-",
    ]


def _as_arguments(state: Any) -> tuple[Any, ...]:
    return state if isinstance(state, tuple) else (state,)


def _losses(step: Any, state: tuple[Any, ...], batch: tuple[Any, ...], steps: int) -> list[float]:
    """The losses of some steps from a state."""
    found = []
    for _ in range(steps):
        value = step(*state, *batch)
        if isinstance(value, tuple):
            state, value = (value[0],), value[1]
        found.append(float(value))
    return found


def _plain(foreign: Any) -> Any:
    """The same training without meshkit."""
    if foreign.step is not None:
        return foreign.step
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
    """Arrays of a batch whose types say how it is cut."""
    lies = jax.NamedSharding(mesh, jax.P(tuple(rules.logical["act_batch"])))
    if isinstance(mesh, jax.sharding.Mesh):
        return tuple(jax.device_put(x, lies) for x in batch)
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies) for x in batch)


def main() -> None:
    """Runs each model in a process of its own, as several call their module `models`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flax", type=Path, help="a checkout of https://github.com/google/flax")
    parser.add_argument("--only", help="the name of one")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(row_of(given.only, given.flax)))
        return
    from benchmarks.third_party.models import MODELS

    rows = []
    for model in MODELS:
        command = [sys.executable, "-m", "benchmarks.third_party", str(given.flax), "--only", model.__name__]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            sys.exit(f"{model.__name__} failed")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(" | ".join(rows[-1]), flush=True)
    table = [HEADER, ["---"] * len(HEADER), *rows]
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax", "keras"))
    page = f"# Ten models of others\n\n{inspect.getdoc(sys.modules[__name__])}\n\nMade with {versions}.\n\n{text}\n"
    (HERE / "models.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
