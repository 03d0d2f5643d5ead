"""Test `mk.live`: a step of any loop is captured and measured while the loop goes on, which no fault of it ends."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.report.summarize import check_invariants
from meshkit.verbs.profile.live import describe_report, late_process
from meshkit.verbs.profile.profiler import TracedJob, measure_traces
from tests.interrupted import processes_of
from tests.trace.trace_files import gpu_op, plane_text, profile_traces, write_planes

ANY_TIME = 1e6  # Every capture fits in this budget.


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def step(mesh):
    """Return a jitted step with an all-reduce over both axes, compiled, and its argument."""
    x = jax.device_put(jnp.full((8, 64), 0.01), NamedSharding(mesh, PartitionSpec("data", "tensor")))
    jitted = jax.jit(lambda x: jnp.tanh(x) - x.mean(1, keepdims=True) - x.mean(0), out_shardings=x.sharding)
    return jitted, jax.block_until_ready(jitted(x))


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Keep the folders of processes beside the loop in one place, and check that they are gone at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_its_docstring_prints_a_line_on_a_step_of_the_loop(mesh, step):
    (example,) = re.findall(r"\n\n((?:        .*\n)+)", mk.live.__doc__ or "")
    jitted, x = step

    def batches():
        for number in range(10_000):
            yield x
            if number > 500:  # The step is captured, and the process that reads it needs one of the cores.
                time.sleep(0.02)
            if number % 100 == 1 and names["live"].line:  # The line was printed with the step before.
                return

    names = {"mk": mk, "mesh": mesh, "batches": batches(), "state": x, "train_step": lambda x, _: (jitted(x), 2.5)}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(textwrap.dedent(example), names)
    line = printed.getvalue().splitlines()[-1]
    words = r"(\d+\.\d) % of the step is exposed communication \((.+?)\)(, .*)?"
    found = re.fullmatch(rf"\d00 2.5 captured step 500: {words}", line)
    assert found, line
    report = names["live"].report
    check_invariants(report)
    assert (report.window.steps, report.window.devices) == (1, 8)
    assert float(found[1]) == pytest.approx(100 * report.step.exposed_s / report.step.time_s, abs=0.05)
    assert set(re.findall(r"[a-z]+", found[2])) <= {"data", "tensor"}
    assert {row.axes for row in report.communication} == {("data",), ("tensor",)}


def test_a_step_that_is_interrupted_leaves_no_profiler_behind_and_the_first_is_not_captured(step, capsys):
    jitted, x = step
    with mk.live(every=2, budget=ANY_TIME) as live:
        with live.step(2):
            jitted(x)
        assert not live.wait()
        with pytest.raises(KeyboardInterrupt), live.step(4):
            raise KeyboardInterrupt
        for number in range(5, 9):
            with live.step(number):
                x = jitted(x)
            live.wait()
        assert live.line.startswith("captured step 8: ")
    assert capsys.readouterr().err == ""


def test_captures_that_take_more_than_their_budget_become_rarer(step):
    jitted, x = step
    with mk.live(every=1, budget=1e-9) as live:
        for number in range(20):
            with live.step(number):
                x = jitted(x)
            live.wait()
        assert live.line.startswith("captured step 1: ")


def test_a_step_of_which_nothing_is_in_the_trace_is_said_once(capsys):
    with mk.live(every=1, budget=ANY_TIME) as live:
        for number in range(8):
            with live.step(number):
                pass
            live.wait()
        assert (live.line, live.report) == ("", None)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: the captured step 1 cannot be read: the trace has no operation of a GPU")
    assert said.endswith("The loop goes on; this is reported once.")


def test_somebody_elses_profiler_goes_on(step, tmp_path_factory, capsys):
    jitted, x = step
    theirs = tmp_path_factory.mktemp("theirs")
    with jax.profiler.trace(str(theirs)), mk.live(every=1, budget=ANY_TIME) as live:
        for number in range(8):
            with live.step(number):
                x = jitted(x)
        jax.block_until_ready(x)
        assert not live.wait()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: no step can be captured: ")
    assert profile_traces(theirs).window.steps == 7


LOOP = """
import time, jax, jax.numpy as jnp, meshkit as mk
step, x = jax.jit(jnp.tanh), jnp.ones((64, 64))
live = mk.live(every=1, budget=1e6)
for number in range(6):
    with live.step(number):
        x = step(x)
    print("step", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ends", ["interrupted", "by itself"])
def test_a_loop_that_ends_leaves_nothing_and_has_nothing_to_say(ends, tmp_path):
    code = LOOP if ends == "by itself" else f"{LOOP}time.sleep(60)"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(6)] == ["step\n"] * 6  # The reading process is starting.
        if ends == "interrupted":
            os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        until = time.monotonic() + 5
        while (left := processes_of(process.pid)) and time.monotonic() < until:
            time.sleep(0.02)
        assert left == []
    assert (process.returncode == 0) == (ends == "by itself")
    assert "warning" not in said


def test_a_late_device_goes_by_its_id_in_the_job(tmp_path_factory):
    """A process drives GPUs 4 and 5 of the job, which are 0 and 1 in its trace."""
    planes = []
    for gpu, computes in enumerate((500, 700)):  # Each GPU computes until this time, of 800 us.
        gather = gpu_op("all-gather-start", computes, 800, "ncclDevKernel_AllGather_RING_LL")
        planes.append(plane_text(f"/device:GPU:{gpu}", [gpu_op("loop_add_fusion", 0, computes), gather]))
    file = write_planes(tmp_path_factory.mktemp("late") / "late.xplane.pb", *planes)
    report = measure_traces(file, TracedJob(devices={0: 4, 1: 5})).report
    assert describe_report(7, report) == (
        # The means are of 300 and 100 us, and the GPU is 200 us later.
        "captured step 7: 25.0 % of the step is exposed communication, device 5 is late by 25.0 % of the step"
    )


@pytest.mark.parametrize(
    ("told", "said"),
    [
        # In seconds: 0.1 and 0.3 of exposed communication have the median 0.2, and the step is 1.
        ([(0.1, 1.0), (0.05, 0.8), (0.3, 1.0)], ", process 1 is late by 15.0 % of the step"),
        ([(0.1, 1.0), (0.06, 1.0)], ""),
        ([(0.1, 1.0), (None, 1.0)], ""),
        ([(0.0, 0.0), (0.0, 0.0)], ""),
    ],
)
def test_a_late_process_has_less_exposed_communication_than_those_that_wait_for_it(told, said):
    assert late_process(told) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": 0}, "every is 0, not a number of steps"),
        ({"every": 2.5}, "every is 2.5, not a number of steps"),
        ({"budget": 0}, "budget is 0, not a share of the loop's time"),
        ({"mesh": mk.MeshSpec.parse({"data": 8})}, "mesh is a MeshSpec, not a Mesh"),
    ],
)
def test_a_call_that_is_wrong_says_so_before_the_loop(arguments, said):
    with pytest.raises(mk.ConfigError, match=said):
        mk.live(**arguments)
