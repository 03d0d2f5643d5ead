"""Run meshkit's own verbs on one GPU as a user would, and yield what they report; scoring.py makes the plans."""

from __future__ import annotations

import datetime
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.sampling import Sampler
from meshkit.config.experiment import load
from meshkit.predict.kernels import measured_rates

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "configs/experiments"
LLAMA_1B = ROOT / "benchmarks/gpu/experiments/llama_1b.toml"
DEBUG = EXPERIMENTS / "llama_debug_cpu.toml"
# By its plan, Llama 1B with these settings fits no known GPU.
TOO_LARGE = ("model.layers=2", "train.remat=none", "train.global_batch=64")
_TOO_LARGE_TOY = ("train.steps=2", "train.global_batch=4096", "train.sequence_length=2048")  # 426 GiB at once
_TOY_ADDRESSES = 12 * 2**30
# Without this option XLA times kernels anew in each process, and two runs may choose different ones.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}
MEASURED = "measured.json"  # The report of what ran, which scoring.py compares with a plan.
_CLUSTER = "{{ gpu='{gpu}', hosts=1, gpus_per_host=1, scale_up='nvlink', nic='ib_ndr', nics_per_host=1 }}"
_SHOWN = ("time_s", "compute_s", "exposed_s", "other_s", "idle_s", "mfu", "mfu_causal", "hfu")
_TEXT: dict[str, Any] = {"capture_output": True, "text": True, "check": False}


def meshkit(
    *arguments: object, log: Path, check: bool = True, addresses: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `meshkit ARGUMENTS`, append its stderr to a log, and return the completed process.

    Args:
        arguments: the arguments of the command line.
        log: the file for the command and its stderr.
        check: whether to raise if the command fails.
        addresses: the bytes of address space that it may use; None for no limit.

    Raises:
        RuntimeError: the command failed, and `check` is true.
    """
    command = [sys.executable, "-m", "meshkit", *map(str, arguments)]
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (addresses, addresses)) if addresses else None
    done = subprocess.run(command, cwd=ROOT, preexec_fn=limit, **_TEXT)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ meshkit {' '.join(map(str, arguments))}\n{done.stderr}\nexit code {done.returncode}\n")
    if check and done.returncode:
        raise RuntimeError(f"meshkit {arguments[0]} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done


def card(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Yield facts of the machine (driver, clocks, limits, packages), and what topo and doctor report."""
    log = folder / "verbs.log"
    query = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,power.max_limit,memory.total,vbios_version"
    smi = shutil.which("nvidia-smi")
    said = subprocess.run([smi, f"--query-gpu={query}", "--format=csv,noheader"], **_TEXT).stdout.strip() if smi else ""
    yield {
        "nvidia_smi": said or "no nvidia-smi",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "versions": meshkit("--version", log=log).stdout.strip(),
    }
    topo = json.loads(meshkit("topo", "--json", log=log).stdout)
    yield {"gpu": (topo.get("cluster") or {}).get("gpu"), "topo": topo}
    yield {"doctor": json.loads(meshkit("doctor", "--json", log=log, check=False).stdout)}
    from benchmarks.gpu.checks import QUICK, outcome

    yield {"checks": {name: outcome(check) for name, check in QUICK.items()}}


def train(folder: Path, toy: bool, settings: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Train Llama 1B with a trace of some steps, and yield its times and its profile."""
    sets = _debug(toy, *_TRACED, *settings) if toy else _sets(f"cluster.gpu={gpu_here()}", *settings)
    yield from _trained(folder, DEBUG if toy else LLAMA_1B, sets)


def trace(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Train the debug Llama with a trace small enough to keep, and yield its times, its profile and the trace size."""
    traced = _TRACED if toy else ("train.steps=40", "profile.steps=[30,33]")
    yield from _trained(folder, DEBUG, _debug(toy, *traced))
    files = list((folder / "run").rglob("*.xplane.pb"))
    yield {"trace bytes": sum(p.stat().st_size for p in files), "trace files": len(files)}


def rehearse(folder: Path, toy: bool, experiment: Path, settings: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rehearse one process's program of a large job with NCCL mocked, and yield its times, its peak and warnings."""
    if toy:
        yield _toy_rehearsal(folder)
        return
    sets = _sets(f"cluster.gpu={gpu_here()}", *settings)
    with Sampler() as sampler:
        arguments = ("rehearse", experiment, *sets, "--steps", 4, "--out", folder / "run", "--json")
        text = meshkit(*arguments, log=folder / "verbs.log").stdout
    (folder / MEASURED).write_text(text, encoding="utf-8")
    report = json.loads(text)
    yield _shown(report) | sampler.summary() | {"warnings": [w["code"] for w in report["warnings"]]}


def bench(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Run `meshkit bench` on one device, and yield its rates.

    They are a calibration; a plan must read the same rates from it.
    """
    gpu = "cpu" if toy else gpu_here()
    cluster = "cluster={ gpu='cpu', hosts=1, gpus_per_host=1 }" if toy else f"cluster.gpu={gpu}"
    log, run = folder / "verbs.log", folder / "run"
    sizes = ("--sizes", "65536" if toy else "1048576,67108864")
    text = meshkit("bench", LLAMA_1B, *_sets(cluster), *sizes, "--out", run, "--json", log=log).stdout
    rates = json.loads(text)["rates"]
    yield {"memory": rates["memory_bytes_per_s"]}
    yield {f"matmul {name}": rate for name, rate in rates["matmul_flops_per_s"].items()}
    yield {f"attention {name}": rate for name, rate in rates["attention_flops_per_s"].items()}
    named = load(LLAMA_1B, [cluster, f"cluster.calibration={run / 'calibration.toml'}"])
    taken = measured_rates(named.cluster).matmul_flops_per_s
    if taken != rates["matmul_flops_per_s"]:
        raise RuntimeError(f"a plan reads {taken} instead of the rates of the calibration")


def resume(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Kill a training with SIGKILL and resume it; yield whether its losses equal an uninterrupted run's bit for bit."""
    same = () if toy else [f"xla.{name}={str(value).lower()}" for name, value in DETERMINISTIC.items()]
    log, sets = folder / "verbs.log", _debug(toy, "profile.steps=", "train.steps=40", "checkpoint.every=10", *same)
    whole, killed = folder / "whole", folder / "killed"
    meshkit("train", DEBUG, *sets, "--out", whole, log=log)
    code, _ = _interrupt(sets, killed, signal.SIGKILL, after=25)
    meshkit("train", DEBUG, *sets, "--out", killed, log=log)
    losses = [_losses(run) for run in (whole, killed)]
    differ = [step for step in losses[0] if losses[0][step] != losses[1].get(step)]
    equal = len(losses[0]) > 0 and not differ
    yield {"killed exit code": code, "steps": len(losses[0]), "losses that differ": differ, "equal": equal}


def preempt(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Send SIGTERM to a training, and yield its exit code, how long it took, and whether the checkpoint is whole."""
    run = folder / "run"
    sets = _debug(toy, "profile.steps=", "train.steps=2000", "checkpoint.every=1000")
    code, seconds = _interrupt(sets, run, signal.SIGTERM, after=10)
    yield {"exit code": code, "seconds": seconds}
    verified = meshkit("checkpoint", "verify", run, log=folder / "verbs.log", check=False).returncode
    yield {"verify exit code": verified}


def exhaust(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Run a step that does not fit, and yield its exit code and message; at toy size, address space is limited."""
    sets = _debug(toy, "profile.steps=", *_TOO_LARGE_TOY) if toy else _sets(f"cluster.gpu={gpu_here()}", *TOO_LARGE)
    command = ("train", DEBUG if toy else LLAMA_1B, *sets, "--out", folder / "run")
    done = meshkit(*command, log=folder / "verbs.log", check=False, addresses=_TOY_ADDRESSES if toy else None)
    said = done.stderr.strip().splitlines()[-6:]
    words = {"traceback": "Traceback" in done.stderr, "remedy": "\n  try " in done.stderr}
    yield {"exit code": done.returncode, "message": said, **words}


_TRACED = ("train.steps=6", "profile.steps=[3,4]")


def _trained(folder: Path, file: Path, sets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Train, and yield what the training measured of itself and what the profile of its trace reports."""
    run, log = folder / "run", folder / "verbs.log"
    with Sampler() as sampler:
        began = time.perf_counter()
        meshkit("train", file, *sets, "--out", run, log=log)
        wall_s = time.perf_counter() - began
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    yield {
        "wall_s": wall_s,
        "step_time_s": statistics.median(row["step_time_s"] for row in rows[len(rows) // 2 :]),
        "losses": [row["loss"] for row in rows],
        **sampler.summary(),
    }
    text = meshkit("profile", run, "--json", log=log).stdout
    (folder / MEASURED).write_text(text, encoding="utf-8")
    yield _shown(json.loads(text))


def _shown(report: dict[str, Any]) -> dict[str, Any]:
    goodput = report.get("goodput") or {}
    found = {key: report["step"][key] for key in _SHOWN} | {"peak_bytes": report["memory"]["peak_bytes"]}
    return found | ({"compile_s": goodput["compile_s"]} if goodput.get("compile_s") else {})


def _sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _debug(toy: bool, *settings: str) -> list[str]:
    """Return the settings of the debug Llama: on the GPU as one device, or on virtual devices at toy size."""
    one_gpu = () if toy else (f"cluster={_CLUSTER.format(gpu=gpu_here())}", "mesh={ data = 1, fsdp = 1, tensor = 1 }")
    return _sets(*one_gpu, "train.evaluate_every=0", *settings)


def gpu_here() -> str:
    """Return the catalog's key of the GPU here."""
    found = json.loads(meshkit("topo", "--json", log=Path(os.devnull), check=False).stdout)["cluster"]
    return found["gpu"] if found else "h100_sxm"


def _losses(run: Path) -> dict[int, float]:
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}


def _interrupt(sets: Sequence[str], run: Path, signal_: signal.Signals, after: int) -> tuple[int, float]:
    """Start a training and send it a signal once `after` steps are logged.

    Returns:
        its exit code, and the seconds from the signal to its end.

    Raises:
        RuntimeError: it ended or hung before the signal.
    """
    command = [sys.executable, "-m", "meshkit", "train", str(DEBUG), *sets, "--out", str(run)]
    said = run.parent / f"{run.name}.log"
    with said.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= after):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"no {after} steps before the signal: {said.read_text(errors='replace')[-1500:]}")
            time.sleep(0.02)
        began = time.monotonic()
        process.send_signal(signal_)
        return process.wait(60), time.monotonic() - began


def _toy_rehearsal(folder: Path) -> dict[str, Any]:
    """Rehearse on virtual CPU devices in a process as the one with the GPU would, and return the capture, read back."""
    code = (
        "import sys; from pathlib import Path; from meshkit.config.experiment import load\n"
        "from meshkit.sharding.mesh import prepare_platform\n"
        "experiment = load(sys.argv[1], ['profile.steps=']); prepare_platform(experiment.cluster)\n"
        "import jax; from meshkit.verbs.rehearse.rehearsal import rehearse\n"
        "rehearse(experiment, jax.devices(), Path(sys.argv[2]), 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(DEBUG), str(folder / "run")], cwd=ROOT, **_TEXT)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    text = meshkit("profile", folder / "run", "--json", log=folder / "verbs.log").stdout
    (folder / MEASURED).write_text(text, encoding="utf-8")
    return _shown(json.loads(text))
