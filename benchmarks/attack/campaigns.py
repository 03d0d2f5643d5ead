"""Define the campaigns: what is attacked, in how many ways, and what must hold."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.attack import doors
from benchmarks.attack.harness import Attack, Broken, Campaign, captured, command
from benchmarks.attack.mutate import damage_bytes, damage_json, damage_text

_ROOT = Path(__file__).parents[2]
_DATA = _ROOT / "tests" / "data"
_EXPERIMENTS = ("llama_debug_cpu", "gpt_debug_cpu", "moe_debug_cpu", "llama3_8b")


def _sound(*words: str) -> None:
    """Run a command on undamaged input, and raise unless it is read."""
    if (said := command(*words)) != "read":
        raise RuntimeError(f"undamaged input is {said}: {' '.join(words)}")


def _experiments(folder: Path) -> Callable[[int], Attack]:
    """Prepare attacks that change a number, a string, a word, lines or bytes of experiment files."""
    files = [p for p in sorted((_ROOT / "configs" / "experiments").glob("*.toml")) if p.stem in _EXPERIMENTS]
    texts = {p.stem: p.read_text() for p in files}
    assert texts
    views = (("explain", "--no-compile", "--json"), ("explain", "--no-compile"), ("explain", "--rules"))
    for file in files:
        _sound("explain", "--no-compile", str(file))

    def make(number: int) -> Attack:
        chance = random.Random(f"experiments {number}")
        name = chance.choice(sorted(texts))
        how, text = damage_text(texts[name], chance)
        if chance.random() < 0.3:
            more, text = damage_text(text, chance)
            how = f"{how}, {more}"
        view = views[number % len(views)]

        def run() -> str:
            path = folder / "e.toml"
            path.write_text(text, errors="surrogatepass")
            return command(*view, str(path))

        return Attack(f"{name}: {how}", run)

    return make


def _captured_run(folder: Path) -> tuple[Path, Path]:
    """Return a run folder with a capture, metrics and goodput, and a plain jax.profiler trace with its program."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import meshkit as mk

    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((16, 64)), NamedSharding(mesh, PartitionSpec("data", "tensor")))
    program = jax.jit(lambda x: x + (x @ x.T).sum(), out_shardings=x.sharding).lower(x).compile()
    x = program(x).block_until_ready()
    run, traced = folder / "run", folder / "traced"
    with mk.profile(run, program=program, mesh=mesh):
        for _ in range(3):
            x = program(x).block_until_ready()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(traced), profiler_options=options):
        for _ in range(3):
            x = program(x).block_until_ready()
    lines = [{"step": i, "loss": 1 / (i + 1), "time_s": 0.1, "data_s": 0.01} for i in range(20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "goodput").mkdir()
    attempt = {"began": 1000.0, "resumed_step": 0, "last_step": 20, "seconds": {"start": 5, "step": 100}, "marks": []}
    (run / "goodput" / "1000.0.json").write_text(json.dumps(attempt))
    (trace,) = traced.rglob("*.xplane.pb")
    return run, trace


def _readers(folder: Path) -> Callable[[int], Attack]:
    """Prepare attacks that damage reports, traces, topologies, bundles and run folders.

    Some put pipes, devices and folders in the places of files.
    """
    from tests.trace.nsys_files import made

    run, trace = _captured_run(folder)
    good, bundle = folder / "good", folder / "bundle"
    traces = [
        trace,
        _DATA / "synthetic_2gpu_3step.xplane.pb",
        _DATA / "traces" / "tracelens_jax08_gemm.xplane.pb",
        made(range(20)).write(folder / "nsys.sqlite"),
        _DATA / "traces" / "maxtext_h100x4" / "nvtx_gpu_proj_trace" / "trace.parquet",
    ]
    for path in traces:
        _sound("profile", str(path), "--out", str(good))
    _sound("profile", str(run))
    _sound("compare", str(good), str(run))
    _sound("topo", "record", "--out", str(bundle))
    topologies = sorted((_DATA / "topo").glob("*/*.xml"))
    matrices = sorted((_DATA / "topo" / "text").glob("*.txt"))
    report, place = (run / "report.json").read_text(), folder / "place"
    inside = sorted(p.relative_to(run) for p in run.rglob("*") if p.is_file() and p.suffix not in (".html", ".gz"))

    def make(number: int) -> Attack:
        chance = random.Random(f"readers {number}")
        kind = ("report", "trace", "topology", "matrix", "run", "bundle", "special")[number % 7]
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if kind == "report":
            how, text = chance.choice((damage_json, damage_text))(report, chance)
            path = place / "report.json"
            path.write_text(text, errors="surrogatepass")
            pages = ("--html", str(place / "page.html"))
            words = ["compare", *chance.choice(([str(path), str(good)], [str(good), str(path)])), *pages]
        elif kind == "trace":
            which = chance.choice(traces)
            how, data = damage_bytes(which.read_bytes(), chance)
            path = place / "x.xplane.pb"
            path.write_bytes(data)
            how, words = f"{which.name}: {how}", ["profile", str(path), "--out", str(place / "out")]
        elif kind in ("topology", "matrix"):
            which = chance.choice(topologies if kind == "topology" else matrices)
            how, text = damage_text(which.read_text(), chance)
            path = place / which.name
            path.write_text(text, errors="surrogatepass")
            how = f"{which.name}: {how}"
            words = ["topo", "--xml" if kind == "topology" else "--matrix", str(path), "--gpu", "a100_80gb"]
        elif kind == "bundle":
            shutil.copytree(bundle, place / "bundle")
            how = _damage_one(place / "bundle", [p for p in (place / "bundle").rglob("*") if p.is_file()], chance)
            words = ["topo", "--bundle", str(place / "bundle")]
        else:
            shutil.copytree(run, place / "run")
            files = [place / "run" / name for name in inside]
            how = (_damage_one if kind == "run" else _replace_one)(place / "run", files, chance)
            verbs = (["profile", str(place / "run")], ["compare", str(place / "run"), str(good)])
            words = verbs[how.startswith("report.json")]
        return Attack(f"{kind}: {how}", lambda: command(*words))

    return make


def _damage_one(folder: Path, files: list[Path], chance: random.Random) -> str:
    """Damage one of some files below a folder, and return what was changed."""
    path = chance.choice(sorted(files))
    data = path.read_bytes()
    if path.suffix == ".json" and chance.random() < 0.6:
        how, text = damage_json(data.decode(), chance)
        path.write_text(text)
    else:
        how, changed = damage_bytes(data, chance)
        path.write_bytes(changed)
    return f"{path.relative_to(folder)}: {how}"


def _replace_one(folder: Path, files: list[Path], chance: random.Random) -> str:
    """Replace a file by something that is no regular file, or by a file of a tebibyte."""
    path = chance.choice(sorted(files))
    path.unlink()
    how = chance.choice(("a pipe", "/dev/zero", "a folder", "a link to itself", "a tebibyte", "nothing", "a socket"))
    if how == "a pipe":
        os.mkfifo(path)
    elif how == "/dev/zero":
        path.symlink_to("/dev/zero")
    elif how == "a folder":
        path.mkdir()
    elif how == "a link to itself":
        path.symlink_to(path.name)
    elif how == "a tebibyte":
        path.touch()
        os.truncate(path, 2**40)
    elif how == "a socket":
        path.symlink_to("/dev/tty")
    return f"{path.relative_to(folder)}: {how}"


def _weights(folder: Path) -> Callable[[int], Attack]:
    """Prepare attacks that damage the header or the length of safetensors files.

    Reading them must fail, or agree with another reader of the file.
    """
    import jax
    import numpy as np
    from safetensors.numpy import load

    from meshkit.errors import MeshkitError
    from meshkit.weights.files import write_weights
    from tests.weights.weight_files import make as make_model
    from tests.weights.weight_files import read

    model, params = make_model("llama")
    write_weights(params, folder / "good", model.hf_layout())
    whole = (folder / "good" / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    first = jax.tree.leaves(read(folder / "good"))

    def make(number: int) -> Attack:
        chance = random.Random(f"weights {number}")
        header = whole[8:end]
        if number % 4 == 0:
            how, data = damage_bytes(whole[:end], chance)
        else:
            damage = damage_json if number % 2 else damage_text
            how, text = damage(header.decode(), chance)
            changed = text.encode(errors="surrogatepass")
            data = len(changed).to_bytes(8, "little") + changed

        def run() -> str:
            place = folder / "place"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(folder / "good", place)
            (place / "model.safetensors").write_bytes(data + whole[end:])
            try:
                found = jax.tree.leaves(read(place))
            except MeshkitError as error:
                if error.exit_code != 2 or not error.message:
                    raise Broken(f"exit code {error.exit_code}: {error.message}") from None
                return "refused"
            theirs = load(data + whole[end:])
            known = sorted(np.asarray(t, np.float32).sum().item() for t in load(whole).values())
            if sorted(np.asarray(t, np.float32).sum().item() for t in theirs.values()) != known:
                raise Broken("other weights than another reader finds")
            if not all(np.array_equal(a, b) for a, b in zip(first, found, strict=True)):
                raise Broken("other weights than were written")
            return "read"

        return Attack(how, run)

    return make


def _checkpoints(folder: Path) -> Callable[[int], Attack]:
    """Prepare attacks that flip a bit of a checkpoint's file, truncate it or delete it.

    The warning must name the file, and the step before must be restored.
    """
    from benchmarks.corruption import campaign

    saved = folder / "saved"
    campaign.save_steps(saved)
    campaign.restore_damaged(saved, campaign.choose(saved, 0))

    def make(number: int) -> Attack:
        damage, verify = campaign.choose(saved, number), ("own", "full")[number % 2]

        def run() -> str:
            outcome = campaign.restore_damaged(saved, damage, verify=verify)
            if outcome != campaign.SAFE:
                raise Broken(outcome)
            return outcome

        return Attack(f"{damage.kind} {damage.file} at {damage.at}, verify = {verify}", run)

    return make


def save_for_ever(folder: Path) -> None:
    """Save one step after the other and print each; this is the process that `_kills` kills."""
    from benchmarks.corruption.campaign import random_state
    from meshkit.config.sections import CheckpointTable
    from meshkit.verbs.checkpoint.store import CheckpointStore

    store = CheckpointStore(folder, CheckpointTable(keep=2))
    for step in range(1, 1000):
        state = random_state(step)
        print("saving", step, flush=True)
        store.save(state)
        store.wait()
        print("saved", step, flush=True)


def _kills(folder: Path) -> Callable[[int], Attack]:
    """Prepare attacks that send SIGKILL at any moment of a save.

    The last saved step, or the one that was being saved, must be restored bit for bit.
    """
    from benchmarks.corruption.campaign import abstract, random_state, same_bits
    from meshkit.config.sections import CheckpointTable
    from meshkit.verbs.checkpoint.store import CheckpointStore

    def make(number: int) -> Attack:
        chance = random.Random(f"kills {number}")
        before, share = chance.randrange(2, 5), chance.random()

        def run() -> str:
            place = Path(tempfile.mkdtemp(dir=folder))
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.attack", "--saver", str(place)], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout
            saved, saving, began = 0, 0, 0.0
            for line in child.stdout:
                word, step = line.split()
                if word == "saving":
                    took, began, saving = time.monotonic() - began, time.monotonic(), int(step)
                    if saving == before:
                        time.sleep(share * took)
                        break
                saved = int(step) if word == "saved" else saved
            child.send_signal(signal.SIGKILL)
            saved = max([saved, *(int(line.split()[1]) for line in child.stdout if line.startswith("saved"))])
            child.wait()
            state = CheckpointStore(place, CheckpointTable()).restore_latest(abstract(random_state(0)))
            step = int(state.step) if state is not None else 0
            if state is None or step < saved or not same_bits(state, random_state(step)):
                raise Broken(f"step {step} restored, {saved} was saved")
            return "the last saved step" if step == saved else "the step that was being saved"

        return Attack(f"killed after {share:.0%} of save {before}", run)

    return make


_CANARY = "canary"
_INJECTED = (
    "$(touch {})", "`touch {}`", "; touch {};", "| touch {}", "&& touch {}", "\n touch {}\n", "' ; touch {} ; '",
    '" ; touch {} ; "', "$(>{})", "${{x:=$(touch {})}}", "\\$(touch {})", "<(touch {})", "> {}", "'$(touch {})'",
    "{{touch,{}}}", "!touch {}", "-- touch {}", "é ü", "a b", "~", "*", "--help", "-x", "#", "%t", "{{}}", "\t", "\\",
    "\x1b[31m", "a" * 300, "", "'", '"', "a: b", "- a", "&a *a", "!!python/object/apply:os.system ['touch {}']",
    "${{{{ env.X }}}}", "\r", "\x00", "\u2028", "yes", "1e3", "null", "[", "{{",
)  # fmt: skip
_STUBS = ("srun", "scontrol", "mpirun", "python", "python3", "sbatch", "kubectl", "sleep", "nvidia-smi", "ssh")
# A stub records its arguments and then runs the command that it would start, so that a shell sees them again.
_STUB = """#!/bin/bash
printf '%s\\n' "$@" >> "$SEEN"
while [ $# -gt 0 ] && [ "$1" != bash ]; do shift; done
[ $# -eq 0 ] || OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 SLURM_LOCALID=0 exec "$@"
"""


def _renderings(folder: Path) -> Callable[[int], Attack]:
    """Prepare attacks that render launch scripts with names that mean something to a shell or to YAML.

    They must be refused or quoted; a rendered script must do nothing else when it runs.
    """
    import yaml

    experiment = _ROOT / "configs" / "experiments" / "llama3_70b.toml"
    stubs, place = folder / "stubs", folder / "place"
    stubs.mkdir()
    for name in _STUBS:
        (stubs / name).write_text(_STUB if name in ("srun", "mpirun") else _STUB.split("while")[0])
        (stubs / name).chmod(0o755)
    launchers = {
        "slurm": ([], ("--out", "--python", "--sbatch", "--container-image", "--container-mount", "--set")),
        "mpi": (["--hostfile", "hosts"], ("--out", "--python", "--hostfile", "--set")),
        "jobset": (
            ["--image", "i", "--claim", "runs=/runs", "--out", "/runs/a"],
            ("--out", "--python", "--image", "--claim", "--resource", "--namespace", "--set"),
        ),
    }
    for name, (words, _) in launchers.items():
        _sound("launch", name, str(experiment), *words, "--dry-run")

    def make(number: int) -> Attack:
        chance = random.Random(f"renderings {number}")
        name = sorted(launchers)[number % 3]
        words, options = launchers[name]
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        option = chance.choice((*options, "FILE"))
        text = chance.choice(_INJECTED).format(_CANARY)
        value = chance.choice(("", "/runs/", "a=", "x")) + text
        path = experiment
        if option == "FILE" and "\0" not in text:
            path = place / f"{text.replace('/', '_')[:100]}.toml"
            shutil.copy(experiment, path)
        more = [f"train.data={json.dumps(value)}"] if option == "--set" and chance.random() < 0.5 else [value]
        said = [] if option == "FILE" else [option, *more]

        def run() -> str:
            code, script = captured(["launch", name, str(path), *words, *said, "--dry-run"])
            if code == 1 or "Traceback (most" in script:
                raise Broken(f"a traceback: {script[-800:]}")
            if code == 0:
                (_check_yaml if name == "jobset" else check_script)(script, place, stubs)
                seen = (place / "seen").read_text() if (place / "seen").exists() else str(path)
                if option == "FILE" and str(path) not in seen:
                    raise Broken("another name than was given")
            return "rendered" if code == 0 else "refused"

        return Attack(f"{name} {option} {value[:60]!r}", run)

    def _check_yaml(text: str, *_: Path) -> None:
        for document in yaml.safe_load_all(text):
            if set(document or ()) - {"apiVersion", "kind", "metadata", "spec", "data", "stringData", "type"}:
                raise Broken(f"keys of nobody's: {sorted(document)}")

    return make


def check_script(script: str, place: Path, stubs: Path) -> None:
    """Run a script with stubs for everything that it starts; raise `Broken` if it is no script or runs a name in it."""
    file = place / "script.sh"
    file.write_text(script)
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "SEEN": str(place / "seen"), "HOME": str(place)}
    environment |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "64", "SLURM_PROCID": "0"}
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Broken(f"no script: {done.stderr[-300:]}")
    with open(place / "log", "w") as log:
        subprocess.run(
            ["timeout", "20", "bash", str(file)],
            cwd=place,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    if any(_CANARY in p.name and p.suffix != ".toml" and p.is_file() for p in place.rglob("*")):
        raise Broken("a name was run")


CAMPAIGNS = {
    "experiments": Campaign(1100, _experiments),
    "readers": Campaign(700, _readers),
    "checkpoints": Campaign(360, _checkpoints),
    "weights": Campaign(400, _weights),
    "kills": Campaign(15, _kills, limit_s=60.0),
    "renderings": Campaign(980, _renderings),
    "settings": Campaign(600, doors.settings),
    "modules": Campaign(200, doors.modules),
    "caches": Campaign(100, doors.caches),
    "inputs": Campaign(200, doors.inputs),
    "interrupts": Campaign(60, doors.interrupts, limit_s=60.0),
}
SHOWN = {
    "experiments": "mutated experiments: `explain`",
    "readers": "damaged reports, traces, topologies, bundles, run folders: `compare`, `profile`, `topo`",
    "checkpoints": "damages to checkpoints, `verify` own and full: restore",
    "weights": "safetensors headers: weights read",
    "kills": "SIGKILL in a save: restore",
    "renderings": "launch scripts of hostile names: rendered, and run against stubs",
    "settings": "texts for XLA's options, functions of installed packages: loaded",
    "modules": "code that others may write, own or link: loaded",
    "caches": "files of a user's in or below MESHKIT_CACHE: all stay",
    "inputs": "pipes, devices, loops, a tebibyte, bombs in the place of files: every verb that reads",
    "interrupts": "SIGINT in a plan: 130 within 2 s, nothing left",
}
