"""Test stragglers of a running job: they are judged by what each process does itself, and named in a gang of two."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import jax
import pynvml
import pytest

from meshkit.errors import RunError
from meshkit.verbs.train import watch as live
from meshkit.verbs.train.watch import SlowSteps, StepCaptures, Stragglers, judge, slowest_clock_mhz

STEP = {"data_wait_s": 1e-3, "host_s": 2e-3, "step_time_s": 0.1, "host": "n0", "clock_mhz": 1755}


@pytest.mark.parametrize(
    ("third", "message"),
    [
        (
            {"host": "n3", "data_wait_s": 9e-3},
            "process 2 on n3 takes 8.00 ms longer than the others for its data: they wait 8.0 % of each step",
        ),
        ({"host_s": 2.2e-2, "data_wait_s": 0.0}, "on its host, outside of the step: they wait 19.0 % of each step"),
        ({"data_wait_s": 1e-2, "clock_mhz": 1410}, "of each step; its GPU at 1,410 MHz, the others at 1,755"),
        ({"clock_mhz": 1410}, "process 2 on n0 may keep the others waiting: its GPU at 1,410 MHz, the others at 1,755"),
        ({"data_wait_s": 5e-3}, None),  # The wait is 4 %.
        ({"step_time_s": 0.2}, None),  # All take equally long, in truth.
        ({"clock_mhz": None}, None),
        ({"clock_mhz": 1700}, None),
    ],
)
def test_a_straggler_is_known_by_what_it_does_itself(third, message):
    found = judge([STEP, STEP, STEP | third, STEP])
    assert [late.message[-len(message or "") :] for late in found] == ([message] if message else [])


def test_the_worst_comes_first():
    found = judge([STEP, STEP | {"host_s": 0.05}, STEP, STEP | {"host_s": 0.03}, STEP])
    assert [late.process for late in found] == [1, 3]


@pytest.mark.parametrize(("visible", "clock"), [(None, 1000), ("2,3", 1002), ("3,1", 1001), ("1", None)])
def test_the_clock_is_that_of_the_gpus_that_this_process_drives(visible, clock, monkeypatch):
    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1000 + handle,
    }.items():
        monkeypatch.setattr(pynvml, name, value)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(local_hardware_id=i) for i in (0, 1)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert slowest_clock_mhz() == clock


def test_steps_that_become_slower_for_all_are_reported_once_until_they_are_faster_or_slower_again():
    steps = SlowSteps()
    found = [
        steps.look([STEP | {"step_time_s": s, "host": f"n{i}"} for i in (0, 1)])
        for s in (0.12, 0.1, 0.14, 0.3, 0.4, 0.5, 0.1, 0.2)
    ]
    assert [bool(line) for line in found] == [False, False, False, True, False, True, False, True]
    assert found[3] == (
        "a step takes 300 ms, 3.0 times as long as the fastest before, and no process is late: a link between hosts "
        "may be slow, or others use it"
    )
    assert steps.look([STEP | {"step_time_s": 0.4, "clock_mhz": 1200}]).endswith("clocks fell from 1,755 to 1,200 MHz")


def test_one_process_alone_watches_its_error_counters():
    """The second comparison waits for the first one, which takes longer than a window."""
    said, counts = [], iter([(1, 0.3), (3, 0.0)])

    def errors():
        count, pause_s = next(counts)
        time.sleep(pause_s)
        return {"GPU 0: x": count}

    alone = Stragglers(1, said.append, errors=errors)
    for _ in range(2):
        alone.note(STEP)
    alone.join(10.0)
    assert "straggler" not in alone.news()
    assert len(said) == 1
    assert "GPU 0: x rose by 2" in said[0]


GANG = """
import functools, time
import meshkit as mk
process, _ = mk.init_distributed()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from meshkit.trace.capture import CapturedStep
from meshkit.verbs.train.watch import StepCaptures
from meshkit.verbs.train.watch import Stragglers

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
late = None

def slow(x):
    if process == late:
        time.sleep(0.02)
    return x

@functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
def step(x):
    for _ in range(4):
        x = jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.tanh(x))
        x = jax.lax.psum(x, "data") / 2
    return x

value = np.full((16, 8), 1e-3, np.float32)
x = jax.make_array_from_callback(value.shape, NamedSharding(mesh, P("data")), lambda i: value[i])
compiled = jax.jit(step).lower(x).compile()
watch, news = Stragglers(16, lambda line: print(line, flush=True)), []
live = StepCaptures(2, CapturedStep(compiled, mesh), watch, lambda line: print(line, flush=True),
                    budget_s=10.0, budget=1e9)
for number in range(1, 17):
    mk.progress(number)
    late = number // 2 % 2 if number < 12 else 1  # now one, now the other; then always the same
    if due := live.is_due(number, number):
        live.start(x)
    x = jax.block_until_ready(compiled(x))
    if due:
        live.stop(number, x)
        live.join(60)
    news.append((number, watch.news()))
    watch.note({"data_wait_s": 0.02 * process, "host_s": 0.001, "step_time_s": 0.1})
watch.join(60)
print("news", [*news, (17, watch.news())])
print("captured", watch.captured, jax.devices()[1].id)
live.close()
"""


def test_a_gang_names_the_process_that_is_late(tmp_path):
    (tmp_path / "train.py").write_text(GANG)
    command = [sys.executable, "-m", "meshkit", "launch", "local", "--processes", "2", "--devices", "1", "--out", "out"]
    done = subprocess.run(
        [*command, "--", sys.executable, "train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "out" / "logs" / "attempt0" / "rank0.log").read_text()
    # The captured step names it once, and not the data, which cost less.
    (warning,) = [line for line in log.splitlines() if line.startswith("warning: ")]
    assert re.search(r"process 1 on \S+ computes \d+\.\d % longer than the median and makes 1 other wait", warning)
    news = dict(ast.literal_eval(log.split("news ")[1].splitlines()[0]))
    assert [number for number, new in news.items() if "straggler_cpu_s" in new] == [2, 4, 6, 8, 10, 12, 14, 16, 17]
    # It is late in two captures in a row: in those of steps 10 (5th) and 12 it is process 1.
    assert [number for number, new in news.items() if "straggler" in new] == [12, 14, 16, 17]
    assert news[17]["straggler_share"] == pytest.approx(0.1)
    assert news[16]["straggler"] == 1
    assert 0.3 < news[16]["straggler_share"] < 1
    # Each process has one device, so what is said of the process is true of its device.
    captured, device = log.split("captured ")[1].splitlines()[0].rsplit(" ", 1)
    captured = ast.literal_eval(captured)
    assert (captured["captured_step"], captured["late_device"]) == (16, int(device))
    assert captured["late_share"] == pytest.approx(news[16]["straggler_share"])
    assert captured["late_share"] < 2 * captured["exposed_share"]  # This is a mean over both, of which one waits.


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(live, "Agreement", lambda name: SimpleNamespace(size=4, rank=0))
    said = []
    watch = Stragglers(0, said.append)
    found = StepCaptures(100, cast(Any, None), watch, said.append, first_step=1)
    yield found, watch, said
    found.close()


def tables(shares, cpu_s=0.0, step=100):
    """Return what four processes say, and what their tables say of who is late; process 2's GPU is slow."""
    said = [{"host": f"n{p}", "clock_mhz": 1410 if p == 2 else 1755, "cpu_s": cpu_s, "step": step} for p in range(4)]
    late = [{"process": p, "share": s, "of_all": s / sum(shares.values()), "others": 3, "longer": 0.12 * (p == 2)}
            for p, s in sorted(shares.items(), key=lambda item: -item[1])]  # fmt: skip
    return said, {"line": {"exposed_share": 0.2}, "late": next(iter(late), None)}


WAIT, SLOW = "makes 3 others wait 8.0 % of the step", "its GPU at 1,410 MHz, the others at 1,755"


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({2: 0.08}, {2: 0.08, 1: 0.01}, f"process 2 on n2 computes 12.0 % longer than the median and {WAIT}; {SLOW}"),
        ({1: 0.08}, {1: 0.08, 0: 0.02}, f"process 1 on n1 {WAIT}"),
        ({1: 0.08}, {2: 0.08}, None),  # The late process changes.
        ({1: 0.04}, {1: 0.04}, None),  # This is too little.
        ({0: 0.08, 1: 0.09, 3: 0.08}, {0: 0.08, 1: 0.09, 3: 0.08}, None),  # Everybody waits for everybody.
        ({}, {}, None),
    ],
)
def test_captures_name_who_is_late_twice_in_a_row(captures, monkeypatch, first, second, named):
    found, watch, said = captures
    for shares in (first, second):
        words, answer = tables(shares)
        monkeypatch.setattr(found, "ask_reader", lambda _, answer=answer: answer)
        found.decide(words)
    assert said == ([f"warning: {named}"] if named else [])
    assert watch.news().get("straggler") == (int(named.split()[1]) if named else None)


@pytest.mark.parametrize(
    ("cpu_s", "now", "following"),
    [
        (0.05, 100, 200),  # With another like it, captures take 0.1 s by step 200, 0.22 s by 400, and 1.2 s by 1600.
        (0.11, 100, 400),
        (0.6, 100, 1600),
        (0.05, 180, 300),  # 80 steps ran until all had answered; after as many again, all have the answer.
    ],
)
def test_captures_become_rarer_until_they_take_a_millisecond_a_step(captures, monkeypatch, cpu_s, now, following):
    found, _, said = captures
    monkeypatch.setattr(found, "ask_reader", lambda _: None)
    found.is_due(now, now)
    assert found.decide(tables({}, cpu_s)[0]) == following
    assert 2 * cpu_s <= 1e-3 * following
    assert not said


@pytest.mark.parametrize(
    ("lost_s", "each_s", "following"),
    [
        (0.0446, 0.206, 200),  # As on an H100, with another like it this is 0.2 % of the steps' time by step 200.
        (0.0446, 0.005, 3200),  # This is 89 ms of 16 s: where steps are short, the profiler's start weighs more.
        (0.0, 0.0, 200),  # Nothing was read.
    ],
)
def test_captures_become_rarer_until_they_add_a_hundredth_to_the_steps(
    captures, monkeypatch, lost_s, each_s, following
):
    found, _, _ = captures
    monkeypatch.setattr(found, "ask_reader", lambda _: None)
    found.is_due(100, 100)
    said, _ = tables({})
    said[3] |= {"lost_s": lost_s, "each_s": each_s}
    assert found.decide(said) == following
    assert 2 * lost_s <= 0.01 * each_s * following


def test_who_is_not_heard_from_ends_the_captures_of_all(captures, monkeypatch):
    found, _, said = captures

    def missing(*_, **__):
        raise RunError("process 3 of 4 did not answer within 120 s.")

    monkeypatch.setattr(found, "line", SimpleNamespace(reach=missing))
    assert [step for step in range(1, 150) if found.is_due(step, step)] == [100]
    found.exchange(100, "no trace")
    (message,) = said
    assert message.startswith("warning: no more steps are captured: process 3 of 4 did not answer within 120 s.")
    assert not [step for step in range(150, 1000) if found.is_due(step, step)]


def test_a_trace_that_cannot_be_read_is_said_once(captures, monkeypatch):
    found, watch, said = captures
    for _ in range(2):
        words, _ = tables({2: 0.08})
        words[3]["error"] = "the trace holds no planes at all."
        found.decide(words)
    (message,) = said
    assert message.startswith("warning: the captured step 100 of process 3 cannot be read: the trace holds no planes")
    assert "straggler" not in watch.news()
