"""Test sinks of metrics: they get every record, and training goes on whatever they do."""

import sys
import threading
import time
import types

import pytest

from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.resolved import find_sinks
from meshkit.runs.metrics import Sink, open_sinks

EXPERIMENT = """
cluster = "cpu8"
model = { class = "models.mlp:Mlp" }
[mesh]
data = 8
[train]
global_batch = 8
"""


def test_a_sink_gets_every_record_in_order_and_in_its_own_thread():
    got, threads, said = [], set(), []

    def write(record):
        got.append(record["step"])
        threads.add(threading.current_thread())

    sink = Sink("mine", write, said.append, finish=lambda: got.append("end"))
    for step in range(100):
        sink.put({"step": step})
    sink.close(10)
    assert got == [*range(100), "end"]
    assert threading.current_thread() not in threads
    assert said == []


@pytest.mark.parametrize("error", [ValueError("no such host"), SystemExit(1), KeyboardInterrupt()])
def test_what_a_sink_raises_is_said_once(error):
    said, got = [], []

    def write(record):
        got.append(record["step"])
        raise error

    sink = Sink("mine", write, said.append)
    for step in range(5):
        sink.put({"step": step})
    sink.close(10)
    assert got == [0, 1, 2, 3, 4]  # The sink is asked again, because an error may pass.
    assert len(said) == 2
    assert type(error).__name__ in said[0]
    assert "Training goes on" in said[0]
    assert said[1].endswith("records that did not reach mine: 5 failed")


def test_a_sink_that_hangs_costs_nothing(monkeypatch):
    monkeypatch.setattr("meshkit.runs.metrics.CAPACITY", 4)
    release, said = threading.Event(), []
    sink = Sink("mine", lambda record: release.wait(60), said.append)
    began = time.perf_counter()
    for step in range(1000):
        sink.put({"step": step})
    sink.close(0.2)
    assert time.perf_counter() - began < 30  # Waiting would take 60 s a record.
    release.set()
    assert "slower than training" in said[0]
    # One record is being written, and four wait.
    assert sink.dropped in (995, 996)
    assert f"{sink.dropped} dropped, 4 left behind" in said[-1]


def test_a_terminal_that_is_closed_stops_nothing():
    def say(text):
        raise BrokenPipeError

    sink = Sink("mine", lambda record: 1 / 0, say)
    sink.put({"step": 1})
    sink.close(10)
    assert sink.failed == 1


def test_a_record_is_the_sinks_own():
    got = []
    sink = Sink("mine", lambda record: (got.append(dict(record)), record.clear()), print)
    record = {"step": 1}
    sink.put(record)
    sink.close(10)
    assert (got, record) == ([{"step": 1}], {"step": 1})


@pytest.fixture
def experiment(tmp_path):
    def make(line):
        file = tmp_path / "x.toml"
        file.write_text(EXPERIMENT + line)
        (tmp_path / "my_sink.py").write_text("got = []\ndef write(record):\n    got.append(record)\nvalue = 3\n")
        return load(file)

    yield make
    sys.modules.pop("my_sink", None)


def test_the_users_function_is_called(experiment, tmp_path):
    sinks = open_sinks(find_sinks(experiment('metrics = "my_sink:write"')), tmp_path, print)
    sinks.put({"step": 1, "loss": 2.0})
    sinks.close()
    assert sys.modules["my_sink"].got == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('metrics = "my_sink:wrong"', r"(?s)wrong.*x\.toml"),
        ('metrics = "no_such_module:write"', "no_such_module"),
        ('metrics = "my_sink:value"', "my_sink:value is an int, not a function"),
    ],
)
def test_a_function_that_does_not_exist_is_said_before_the_first_step(experiment, line, message):
    with pytest.raises(ConfigError, match=message):
        find_sinks(experiment(line))


def test_without_tensorboard_the_extra_is_named(experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(ConfigError, match=r"meshkit\[tensorboard\]"):
        find_sinks(experiment("tensorboard = true"))


def test_numbers_go_to_tensorboard(experiment, monkeypatch, tmp_path):
    calls = []

    class Writer:
        def __init__(self, folder):
            calls.append(folder)

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("close")

    monkeypatch.setitem(sys.modules, "tensorboard.summary", types.SimpleNamespace(Writer=Writer))
    sinks = open_sinks(find_sinks(experiment("tensorboard = true")), tmp_path, print)
    sinks.put({"step": 3, "loss": 2.0, "mfu": None, "grad_norm": float("nan"), "note": "text", "exposed_s": 0.5})
    sinks.close()
    assert calls == [str(tmp_path / "tensorboard"), ("loss", 2.0, 3), ("exposed_s", 0.5, 3), "close"]


def test_a_real_tensorboard_reads_what_was_written(experiment, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(find_sinks(experiment("tensorboard = true")), tmp_path, print)
    for step in (1, 2):
        sinks.put({"step": step, "exposed_s": step / 4})
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    (tag,) = events.Tags()["tensors"]
    assert tag == "exposed_s"
    assert [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)] == [(1, 0.25), (2, 0.5)]
