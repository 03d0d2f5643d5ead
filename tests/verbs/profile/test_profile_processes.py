"""Test two processes of four devices over gloo, captured and merged exactly by the runtime's run id."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from meshkit.report.schema import Report
from meshkit.report.summarize import check_invariants
from meshkit.verbs.profile.profiler import measure_run

pytestmark = pytest.mark.multiprocess

PROGRAM = """
import json, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
import meshkit as mk
folder, process, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, process)
from jax.sharding import NamedSharding, PartitionSpec as P
from meshkit.config.cluster import Cluster
from meshkit.trace.capture import Capture, CapturedStep

mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
cluster = Cluster.load({"name": "two", "gpu": "cpu", "hosts": 2, "gpus_per_host": 4, "scale_up": "shared_memory"})

def put(shape, *spec):
    value = np.full(shape, 0.01, np.float32)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P(*spec)), lambda index: value[index])

w = (put((32, 64), "fsdp", "tensor"), put((64, 32), "tensor", "fsdp"))
x = put((16, 32), ("data", "fsdp"), None)

def loss(w, x):
    return ((x + jax.nn.gelu(x @ w[0]) @ w[1]) ** 2).mean()

def train_step(w, x):
    value, gradients = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, w, gradients), value

compiled = jax.jit(train_step).lower(w, x).compile()
capture = Capture(folder, CapturedStep(compiled, mesh, cluster), steps=(3, 6))
for number in range(2, 8):
    capture.before(number, w)
    w, value = compiled(w, x)
    capture.after(number, (w, value))

with mk.live(every=2, mesh=mesh, cluster=cluster) as live:
    for number in range(1, 4):
        with live.step(number):
            time.sleep(0.3 * process)
            w, value = compiled(w, x)
    line = live.wait()
devices = [d.device for d in live.report.stragglers.devices], [d.id for d in jax.local_devices()]
Path(folder, f"live-p{process}.json").write_text(json.dumps([line, *devices, live.report.model_dump_json()]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    command = [sys.executable, "-c", PROGRAM, str(folder / "trace")]
    processes = [
        subprocess.Popen([*command, str(p), port], env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for p in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output.decode()[-3000:]
    return folder


@pytest.fixture(scope="module")
def measured(run):
    return measure_run(run)


def test_both_processes_left_their_files_on_one_host(run):
    found = sorted(str(f.relative_to(run / "trace").parent.name) for f in (run / "trace").rglob("*.xplane.pb"))
    assert found == ["p0", "p1"]


def test_all_communication_is_on_its_axis(measured):
    report = measured.report
    assert (report.quality.mapped_share, report.quality.axis_mapped_share) == (1, 1)
    assert {axis for row in report.communication for axis in row.axes} == {"data", "fsdp", "tensor"}
    for row in report.communication:
        assert row.link == ("infiniband" if "data" in row.axes else "nvlink")
    assert {w.code for w in report.warnings} <= {"clocks"}  # On a starved machine, the ends of collectives scatter.
    check_invariants(report)


def test_the_processes_are_merged_by_run_id(measured):
    steps = measured.trace.steps.steps
    assert (measured.report.window.processes_seen, measured.report.window.devices) == (2, 8)
    assert {s.step for s in steps} == {3, 4, 5}  # Four steps were captured; what follows the last is not in the trace.
    # Every instance of every collective was seen on all of its members.
    instances = 3 * sum(row.count * row.num_groups for row in measured.report.communication)
    assert measured.trace.skew.instances == instances
    assert all(row.transfer_s is not None for row in measured.report.communication)


def test_clocks_of_one_host_need_no_offset(measured):
    # Both processes read the same clock, so no more is taken out than the scatter of collectives' ends.
    quality = measured.report.quality
    assert quality.clocks == 2
    assert quality.clock_offset_s < 10 * quality.clock_residual_s


def test_each_process_can_be_measured_alone(run):
    report = measure_run(run, only_process=1).report
    assert report.window.devices == 4
    # Groups along data have members in both processes.
    unknown = {row.axes for row in report.communication if row.transfer_s is None}
    assert unknown == {row.axes for row in report.communication if "data" in row.axes}


def test_in_a_loop_each_process_hears_of_its_own_devices_and_of_the_late_process(run):
    for process in range(2):
        line, late, own, report = json.loads((run / "trace" / f"live-p{process}.json").read_text())
        assert re.match(r"captured step 2: .*, process 1 is late by \d+\.\d % of the step$", line), line
        assert sorted(late) == own  # Devices have their ids in the job.
        report = Report.model_validate_json(report)
        assert (report.window.steps, report.window.devices) == (1, 4)
        known = {row.axes for row in report.communication if row.transfer_s is not None}
        assert known == {row.axes for row in report.communication if "data" not in row.axes}


def test_of_a_subset_the_missing_are_not_missed(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    for process in range(2):
        file = folder / "trace" / f"capture-p{process}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"captured_processes": [0]}))
    (folder / "trace" / "capture-p1.json").unlink()
    report = measure_run(folder).report
    assert (report.window.processes_seen, report.window.processes_expected, report.window.devices) == (1, 1, 4)
    assert report.quality.missing_processes == ()
    (message,) = (w.message for w in report.warnings if w.code == "process_subset")
    assert message.startswith("1 of 2 processes captured")
