"""meshkit's own verbs on one GPU: what a user would run, and what it says."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.sampling import Sampler

ROOT = Path(__file__).resolve().parents[2]
LLAMA_1B = ROOT / "benchmarks/gpu/experiments/llama_1b.toml"
DEBUG = ROOT / "configs/experiments/llama_debug_cpu.toml"
_CLUSTER = "{{ gpu='{gpu}', hosts=1, gpus_per_host=1, scale_up='nvlink', nic='ib_ndr', nics_per_host=1 }}"
_COMPARED = ("time_s", "compute_s", "exposed_s", "other_s", "idle_s", "mfu", "mfu_causal", "hfu")


def meshkit(*arguments: object, log: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`meshkit ARGUMENTS`, its stderr added to a log."""
    command = [sys.executable, "-m", "meshkit", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ meshkit {' '.join(map(str, arguments))}\n{done.stderr}\nexit code {done.returncode}\n")
    if check and done.returncode:
        raise RuntimeError(f"meshkit {arguments[0]} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done


def card(folder: Path, toy: bool) -> dict[str, Any]:
    """The machine: driver, clocks, limits, packages; what topo and doctor say."""
    log = folder / "verbs.log"
    topo = json.loads(meshkit("topo", "--json", log=log).stdout)
    doctor = json.loads(meshkit("doctor", "--json", log=log, check=False).stdout)
    query = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,power.max_limit,memory.total,vbios_version"
    try:
        smi = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], **_TEXT).stdout.strip()
    except FileNotFoundError:
        smi = "no nvidia-smi"
    versions = meshkit("--version", log=log).stdout.strip()
    return {"nvidia_smi": smi, "versions": versions, "cpus": os.cpu_count(), "topo": topo, "doctor": doctor}


def train(folder: Path, toy: bool, settings: Sequence[str] = ()) -> dict[str, Any]:
    """A training of Llama 1B with a trace of some steps: what was measured, and the plan of the same file beside it."""
    run, log, sets = folder / "run", folder / "verbs.log", _training(toy, () if toy else settings)
    with Sampler() as sampler:
        began = time.perf_counter()
        meshkit("train", DEBUG if toy else LLAMA_1B, *sets, "--out", run, log=log)
        wall_s = time.perf_counter() - began
    measured = json.loads(meshkit("profile", run, "--json", log=log).stdout)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step_time_s"] for row in rows[len(rows) // 2 :]]
    found = {
        "wall_s": wall_s,
        "step_time_s": statistics.median(steps),
        "losses": [row["loss"] for row in rows],
        **{f"measured {key}": measured["step"][key] for key in _COMPARED},
        "measured peak_bytes": measured["memory"]["peak_bytes"],
        **sampler.summary(),
    }
    if not toy:
        planned = _plan(folder, LLAMA_1B, sets)
        found |= {f"predicted {key}": planned["step"][key] for key in _COMPARED}
        found |= {
            "predicted peak_bytes": planned["memory"]["peak_bytes"],
            "step ratio": found["step_time_s"] / planned["step"]["time_s"],
            "compute ratio": measured["step"]["compute_s"] / planned["step"]["compute_s"],
        }
    return found


def rehearse(folder: Path, toy: bool, experiment: str, settings: Sequence[str]) -> dict[str, Any]:
    """One process's program of a large job, NCCL mocked, beside the plan of the same file."""
    file, log = ROOT / f"configs/experiments/{experiment}.toml", folder / "verbs.log"
    sets = [word for setting in settings for word in ("--set", setting)]
    if toy:
        return _toy_rehearsal(folder)
    run = folder / "run"
    with Sampler() as sampler:
        report = json.loads(
            meshkit("rehearse", file, *sets, "--steps", 4, "--out", run, "--json", log=log).stdout,
        )
    planned = _plan(folder, file, sets)
    found = {f"rehearsed {key}": report["step"][key] for key in _COMPARED}
    found |= {f"predicted {key}": planned["step"][key] for key in _COMPARED}
    classes = [{c["kind"]: c["time_s"] for c in (r["kernels"] or {})["classes"]} for r in (planned, report)]
    found |= {f"{kind} ratio": classes[1][kind] / s for kind, s in classes[0].items() if s and kind in classes[1]}
    rows = [
        {(tuple(c["axes"]), c["collective"]): c["payload_bytes"] for c in r["communication"]} for r in (planned, report)
    ]
    return found | {
        "compute ratio": report["step"]["compute_s"] / planned["step"]["compute_s"],
        "rehearsed peak_bytes": report["memory"]["peak_bytes"],
        "predicted peak_bytes": planned["memory"]["peak_bytes"],
        "same collectives": rows[0] == rows[1],
        "warnings": [w["code"] for w in report["warnings"]],
        **sampler.summary(),
    }


def options(folder: Path, toy: bool) -> dict[str, Any]:
    """Steps of Llama 1B with options of XLA switched, each a training of its own."""
    cases = {
        "as meshkit sets them": (),
        "without Triton matmuls": ("xla.xla_gpu_enable_triton_gemm=false",),
        "cuDNN fusions": ("xla.xla_gpu_cudnn_gemm_fusion_level=2",),
        "no command buffers": ("xla.xla_gpu_enable_command_buffer=''",),
    }
    found = {}
    for name, settings in cases.items():
        sets = _training(toy, ("train.steps=12", "profile.steps=", *(() if toy else settings)))
        run, log = folder / name.replace(" ", "_"), folder / "verbs.log"
        if meshkit("train", DEBUG if toy else LLAMA_1B, *sets, "--out", run, log=log, check=False).returncode == 0:
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            found[f"{name} step_time_s"] = statistics.median(row["step_time_s"] for row in rows[6:])
    return found


def resume(folder: Path, toy: bool) -> dict[str, Any]:
    """A training killed with SIGKILL and resumed, beside one that nobody killed: their losses, bit for bit."""
    log, file = folder / "verbs.log", DEBUG
    sets = _debug(toy, "train.steps=40", "checkpoint.every=10")
    meshkit("train", file, *sets, "--out", folder / "whole", log=log)
    killed = folder / "killed"
    _interrupt(file, sets, killed, signal.SIGKILL, after=25)
    meshkit("train", file, *sets, "--out", killed, log=log)
    losses = [_losses(run) for run in (folder / "whole", killed)]
    differ = [step for step in losses[0] if losses[0][step] != losses[1].get(step)]
    return {"steps": len(losses[0]), "losses that differ": differ, "equal": not differ}


def preempt(folder: Path, toy: bool) -> dict[str, Any]:
    """A training told to end: its exit code, how long it took, and whether the checkpoint is whole."""
    log, file, run = folder / "verbs.log", DEBUG, folder / "run"
    sets = _debug(toy, "train.steps=2000", "checkpoint.every=1000")
    code, seconds = _interrupt(file, sets, run, signal.SIGTERM, after=10)
    verified = meshkit("checkpoint", "verify", run, log=log, check=False).returncode
    return {"exit code": code, "seconds": seconds, "verify exit code": verified}


def exhaust(folder: Path, toy: bool) -> dict[str, Any]:
    """A step that does not fit: exit code, message and what plan would have said."""
    if toy:
        return {"skipped": "a CPU has no limit to run into"}
    log, sets = folder / "verbs.log", _training(toy, ("train.remat=none", "train.global_batch=16"))
    done = meshkit("train", LLAMA_1B, *sets, "--out", folder / "run", log=log, check=False)
    planned = _plan(folder, LLAMA_1B, sets)
    return {
        "exit code": done.returncode,
        "message": done.stderr.strip().splitlines()[-6:],
        "plan says it fits": planned["memory"]["fits"],
        "traceback": "Traceback" in done.stderr,
    }


_TEXT: dict[str, Any] = {"capture_output": True, "text": True, "check": False}


def _training(toy: bool, settings: Sequence[str]) -> list[str]:
    own = ("train.steps=6", "profile.steps=[3,4]", "train.evaluate_every=0") if toy else (f"cluster.gpu={_gpu()}",)
    return [word for setting in (*own, *settings) for word in ("--set", setting)]


def _debug(toy: bool, *settings: str) -> list[str]:
    """The debug Llama: on the GPU as one device, else on virtual ones."""
    one_gpu = (f"cluster={_CLUSTER.format(gpu=_gpu())}", "mesh={ data = 1, fsdp = 1, tensor = 1 }")
    all_ = (*(() if toy else one_gpu), "profile.steps=", "train.evaluate_every=0", *settings)
    return [word for setting in all_ for word in ("--set", setting)]


def _gpu() -> str:
    """The catalog's key of the GPU here."""
    log = Path(os.devnull)
    found = json.loads(meshkit("topo", "--json", log=log, check=False).stdout)["cluster"]
    return found["gpu"] if found else "h100_sxm"


def _plan(folder: Path, file: Path, sets: Sequence[str]) -> dict[str, Any]:
    text = meshkit("plan", file, *sets, "--no-remedies", "--json", log=folder / "verbs.log").stdout
    (folder / "plan.json").write_text(text, encoding="utf-8")
    return json.loads(text)


def _losses(run: Path) -> dict[int, float]:
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}


def _interrupt(file: Path, sets: Sequence[str], run: Path, signal_: signal.Signals, after: int) -> tuple[int, float]:
    """Starts a training, sends a signal when `after` steps are logged; its exit code, and seconds from the signal."""
    command = [sys.executable, "-m", "meshkit", "train", str(file), *sets, "--out", str(run)]
    with (run.parent / f"{run.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= after:
                break
            time.sleep(0.02)
        began = time.monotonic()
        process.send_signal(signal_)
        return process.wait(60), time.monotonic() - began


def _toy_rehearsal(folder: Path) -> dict[str, Any]:
    """The process that would own the GPU, on virtual CPU devices: its capture, read back."""
    code = (
        "import sys; from pathlib import Path; from meshkit.config.experiment import load\n"
        "from meshkit.sharding.mesh import prepare_platform\n"
        "experiment = load(sys.argv[1], ['profile.steps=']); prepare_platform(experiment.cluster)\n"
        "import jax; from meshkit.verbs.rehearse.rehearsal_gpu import rehearse\n"
        "rehearse(experiment, jax.devices(), Path(sys.argv[2]), 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(DEBUG), str(folder / "run")], cwd=ROOT, **_TEXT)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    report = json.loads(meshkit("profile", folder / "run", "--json", log=folder / "verbs.log").stdout)
    return {f"measured {key}": report["step"][key] for key in _COMPARED}
