"""Stragglers of a running job: judged by what each process does itself, and told in a gang of two."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pynvml
import pytest

from meshkit.verbs.train.stragglers import Stragglers, judge, slowest_clock_mhz

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
        ({"data_wait_s": 5e-3}, None),  # 4 %
        ({"step_time_s": 0.2}, None),  # all take equally long, in truth
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


def test_one_process_alone_has_nobody_to_wait_for():
    said = []
    alone = Stragglers(1, said.append)
    alone.note(STEP)
    assert alone.news() == {}
    assert said == []


def test_a_gang_names_the_process_whose_data_are_late(tmp_path):
    (tmp_path / "train.py").write_text(
        "import meshkit as mk\n"
        "process, _ = mk.init_distributed()\n"
        "from meshkit.verbs.train.stragglers import Stragglers\n"
        "watch = Stragglers(10, print)\n"
        "for step in range(1, 21):\n"
        "    mk.progress(step)\n"
        "    watch.note({'data_wait_s': 0.02 * process, 'host_s': 0.001, 'step_time_s': 0.1})\n"
        "    if step % 10 == 0: watch.join(60)\n"
        "print(watch.news())\n"
    )
    command = [sys.executable, "-m", "meshkit", "launch", "local", "--processes", "2", "--devices", "1", "--out", "out"]
    done = subprocess.run(
        [*command, "--", sys.executable, "train.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "out" / "logs" / "attempt0" / "rank0.log").read_text()
    warnings = [line for line in log.splitlines() if line.startswith("warning: process")]
    assert len(warnings) == 1  # the second window costs no more than the first
    assert "takes 10.0 ms longer than the others for its data: they wait 10.0 % of each step" in warnings[0]
    assert "{'straggler': 1, 'straggler_share': 0." in log
