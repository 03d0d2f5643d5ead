"""Test what a run says of its steps: captured ones get what was measured, and no failure reaches training."""

import io
import json
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from meshkit.report.schema import CommunicationPart, Report, StepPart, StepSample, WindowPart
from meshkit.runs.metrics import SinkCode, read_metrics
from meshkit.verbs.train import session
from meshkit.verbs.train.session import RunLog, StepProgress, metrics_of


def sample(step, exposed_s):
    return StepSample(
        step=step,
        time_s=1.0,
        compute_s=0.5,
        communication_s=0.4,
        overlapped_s=0.4 - exposed_s,
        exposed_s=exposed_s,
        other_s=0.0,
        idle_s=0.5 - exposed_s,
        slowest_device=0,
        slowest_time_s=1.0,
    )


@pytest.fixture
def report():
    rows = [
        CommunicationPart(axes=("fsdp",), count=1, wire_bytes_nvlink=300, wire_bytes_infiniband=100),
        CommunicationPart(axes=("tensor",), count=1, wire_bytes_nvlink=50, wire_bytes_infiniband=0),
        CommunicationPart(axes=(), count=1),
    ]
    window = WindowPart(steps=2, devices=1)
    samples = (sample(2, 0.1), sample(3, 0.3))
    return Report(source="profile", window=window, step=StepPart(), communication=tuple(rows), per_step=samples)


@pytest.fixture
def log(tmp_path):
    said = []
    log = RunLog(SinkCode(), tmp_path, 0, said.append)
    log.said = said
    return log


def test_metrics_of_a_measured_report(report):
    assert metrics_of(report) == {
        2: {"exposed_s": 0.1, "overlapped_share": pytest.approx(0.75), "bytes_nvlink": 350, "bytes_infiniband": 100},
        3: {"exposed_s": 0.3, "overlapped_share": pytest.approx(0.25), "bytes_nvlink": 350, "bytes_infiniband": 100},
    }


def test_captured_steps_get_their_numbers_while_training_goes_on(log, report, tmp_path, monkeypatch):
    release = threading.Event()

    def measure(folder, only_process):
        assert (folder, only_process) == (tmp_path, 0)
        assert release.wait(60)
        return SimpleNamespace(report=report)

    monkeypatch.setattr(session, "measure_run", measure)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
    log.measure_capture()
    log.write({"step": 4, "loss": 1.0})  # Writing does not wait.
    release.set()
    log.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert [r.get("exposed_s") for r in records] == [None, 0.1, 0.3, None]
    assert [r["loss"] for r in records] == [1.0] * 4
    assert log.said == []


@pytest.mark.parametrize("error", [RuntimeError("no trace"), SystemExit(2), MemoryError()])
def test_a_capture_that_cannot_be_measured_is_a_warning(log, tmp_path, monkeypatch, error):
    def measure(folder, only_process):
        raise error

    monkeypatch.setattr(session, "measure_run", measure)
    log.write({"step": 1})
    log.measure_capture()
    log.close()
    assert len(log.said) == 1
    assert type(error).__name__ in log.said[0]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1}


def test_a_full_disk_is_said_once(log, monkeypatch):
    def full(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session.MetricsLog, "write", full)
    for step in range(3):
        log.write({"step": step})
    log.close()
    assert log.said == ["warning: metrics.jsonl cannot be written: No space left on device. Training goes on."]


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(session.jax, "process_index", lambda: 1)
    unopened = SimpleNamespace()  # These are neither a function nor a type of writer.
    log = RunLog(SinkCode(unopened, unopened), tmp_path, 0, print)
    log.write({"step": 1})
    log.measure_capture()
    log.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "waits"), [(ValueError, False), (KeyboardInterrupt, True)])
def test_of_several_processes_one_that_fails_waits_for_no_measurement(log, monkeypatch, error, waits):
    """The others wait in a collective until it is gone; a signal that the run has honoured is no failure."""
    asked = []
    monkeypatch.setattr(session.jax, "process_count", lambda: 2)
    log.measuring = SimpleNamespace(join=asked.append)
    with pytest.raises(error):  # noqa: PT012
        try:
            raise error
        finally:
            log.close()
    assert asked == [session.MEASURE_S if waits else 0]


def test_brackets_are_no_markup():
    out = io.StringIO()
    progress = StepProgress(Console(file=out, width=80), 10, enabled=True)
    for text in ("resuming runs/[/x] after step 3", "[red]", "KeyError: '[/bold]'"):
        progress.say(text)
    assert out.getvalue().splitlines() == ["resuming runs/[/x] after step 3", "[red]", "KeyError: '[/bold]'"]
