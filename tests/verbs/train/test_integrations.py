"""Test a run folder as TensorBoard and XProf search it, and a whole run whose sinks misbehave."""

import json
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.experiment import load
from meshkit.trace.capture import Capture, CapturedStep
from meshkit.verbs.profile.profiler import measure_run

EXPERIMENT = """
cluster = "cpu8"
model = { class = "models.llama:Llama", preset = "llama_debug", layers = 1 }
[mesh]
data = 2
fsdp = 4
[rules]
preset = "fsdp"
[train]
global_batch = 8
sequence_length = 32
steps = 8
metrics = "hanging_sink:write"
[data]
source = "python-stdlib"
[profile]
steps = [3, 5]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run folder with two captured steps of a sum over eight devices."""
    folder = tmp_path_factory.mktemp("run")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, PartitionSpec("data")))
    compiled = jax.jit(lambda x: x * (x @ x.T).sum()).lower(x).compile()
    capture = Capture(folder / "trace", CapturedStep(compiled, mesh), steps=(1, 3))
    for step in range(1, 5):
        capture.before(step, x)
        capture.after(step, compiled(x))
    return folder


def test_the_trace_lies_where_tensorboard_looks_for_it(run):
    # XProf takes each folder LOGDIR/**/plugins/profile/SESSION with HOST.xplane.pb files as a session.
    files = list(run.glob("**/plugins/profile/*/*.xplane.pb"))
    assert [f.relative_to(run).parts[:-1] for f in files] == [("trace", "plugins", "profile", "p0")]


def test_what_xprof_leaves_in_the_trace_disturbs_nothing(run):
    session = run / "trace" / "plugins" / "profile" / "p0"
    for name in ("NO_MODULE.hlo_proto.pb", "ALL_HOSTS.op_stats_v2.pb", "cache_version.txt"):
        (session / name).write_bytes(b"\x08\x01")
    assert measure_run(run).report.step.communication_s > 0


@pytest.mark.slow
def test_xprof_opens_the_run(run):
    plugin = pytest.importorskip("xprof.profile_plugin", reason="the extra `tensorboard` is not installed")
    from types import SimpleNamespace

    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.base_plugin import TBContext

    flags = SimpleNamespace(master_tpu_unsecure_channel="", logdir=str(run))
    found = plugin.ProfilePlugin(TBContext(logdir=str(run), multiplexer=EventMultiplexer(), flags=flags))
    assert found.is_active()
    assert list(found.generate_runs()) == ["trace/p0"]


@pytest.mark.slow
def test_a_sink_that_hangs_does_not_hold_a_run_up(tmp_path, capsys):
    from meshkit.verbs.train.trainer import train

    (tmp_path / "x.toml").write_text(EXPERIMENT)
    (tmp_path / "hanging_sink.py").write_text("import time\ndef write(record):\n    time.sleep(3600)\n")
    began = time.perf_counter()
    train(load(tmp_path / "x.toml"), tmp_path / "run", show_progress=False)
    assert time.perf_counter() - began < 1800  # One record alone would take an hour.
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, 9))
    captured = [r for r in records if "exposed_s" in r]
    assert [r["step"] for r in captured] == [3, 4]  # The last one has no end in the trace.
    assert all(0 <= r["overlapped_share"] <= 1 and r["bytes_nvlink"] > 0 for r in captured)
