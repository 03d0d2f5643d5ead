"""Programs of an older XLA as today's reads them. The compile itself needs that XLA: benchmarks/older_xla."""

import ctypes
import dataclasses
import shutil
from pathlib import Path

import pytest

from benchmarks.older_xla import programs
from benchmarks.older_xla.__main__ import image_of, scores
from benchmarks.older_xla.programs import in_fp8, with_groups
from benchmarks.published.experiments import resolve
from benchmarks.published.replay import Prediction
from benchmarks.published.rows import read_rows
from benchmarks.published.summary import _of_their_time, read_older
from meshkit.config.experiment import load
from meshkit.hlo import proto as wire
from meshkit.hlo.costs import Cost, Matmul
from meshkit.hlo.schedule import Instruction, Schedule


def _key(n: int) -> bytes:
    return bytes((n,)) if n < 128 else bytes((n & 127 | 128, n >> 7))


def _field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return _key(number << 3) + bytes((value,))
    return _key(number << 3 | 2) + bytes((len(value),)) + value


def _module(device_list: bytes) -> bytes:
    instruction = _field(1, b"all-gather") + _field(87, device_list) + _field(2, b"all-gather-start")
    computation = _field(1, b"main") + _field(2, _field(1, b"p") + _field(35, 7)) + _field(2, instruction)
    return _field(1, _field(1, b"jit_step") + _field(3, computation) + _field(2, b"main"))


def _groups(module: bytes) -> list[list[int]]:
    (computation,) = wire.messages(wire.read_fields(module), 3)
    *_, fields = wire.messages(computation, 2)
    assert wire.text(fields, 1) == "all-gather"
    assert wire.text(fields, 2) == "all-gather-start"
    return [wire.ints(group, 1) for group in wire.messages(fields, 49)]


@pytest.mark.parametrize(
    ("iota", "expected"),
    [
        # [2,4]<=[8] and [4,2]<=[2,4]T(1,0), as XLA prints them
        (_field(1, 2) + _field(2, 4) + _field(3, b"\x08") + _field(4, b"\x00"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (
            _field(1, 4) + _field(2, 2) + _field(3, b"\x02\x04") + _field(4, b"\x01\x00"),
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
    ],
    ids=["in order", "transposed"],
)
def test_iota_device_lists_are_written_out(iota, expected):
    assert _groups(with_groups(_module(_field(2, iota)))) == expected


def test_explicit_device_lists_are_kept():
    explicit = _field(1, _field(1, b"\x00\x02")) + _field(1, _field(1, b"\x01\x03"))
    assert _groups(with_groups(_module(explicit))) == [[0, 2], [1, 3]]


def test_matmuls_of_gradients_are_priced_in_fp8():
    def matmul(dtype: str) -> Instruction:
        m = Matmul(dtype, 1, 64, 256, 128)
        return Instruction("dot", "custom-call", "kernel", cost=Cost({dtype: m.flops}, matmuls=(m,)))

    copy = Instruction("copy", "copy", "kernel", cost=Cost(bytes_accessed=8.0))
    schedule = Schedule("step", {"main": (matmul("f16"), matmul("f8e4m3fn"), matmul("bf16"), copy)}, "main", "f")
    gradient, *others = in_fp8(schedule).computations["main"]
    assert gradient.cost == dataclasses.replace(
        matmul("f8e5m2_highest").cost,  # pyright: ignore[reportArgumentType]
        matmul_flops={"f8e5m2_highest": 2.0 * 64 * 256 * 128},
    )
    assert others == [matmul("f8e4m3fn"), matmul("bf16"), copy]


DATA = Path(__file__).parents[1] / "data"
RUNS = [
    run
    for name in ("published_runs", "blind_jax_runs")
    for row in read_rows(DATA / f"{name}.csv")
    if not isinstance(run := resolve(row), str) and run.handling == "none"
]


def test_every_row_that_is_a_plan_of_its_file_is_predicted_by_the_xla_of_its_image():
    predicted = {row["id"]: row for row in read_older()}
    images = {run.row.id: image_of(run.row.id) for run in RUNS}
    assert set(predicted) == set(images)
    for name, image in images.items():
        assert image is not None
        assert predicted[name]["jaxlib"] == image["jaxlib"]
        assert (predicted[name]["profiled"] == "yes") == image["profiled"] == bool(predicted[name]["unprofiled_s"])


def test_scores_have_every_row_and_the_medians_of_groups(tmp_path):
    text = "\n".join(scores([run for run in RUNS if "a3-llama2-7b" in run.row.id], _file(tmp_path, scale=1.1)))
    assert text.count("| maxtext-a3-llama2-7b") == 5
    assert text.splitlines()[-1].endswith("| 5 | -10.0% | +10.0% |")


def test_the_summary_has_both_xlas_of_the_stated_rows(tmp_path, monkeypatch):
    rows = {run.row.id: run.row for run in RUNS}
    monkeypatch.setattr("benchmarks.published.summary.read_older", lambda: read_older(_file(tmp_path, scale=1.1)))
    found = [
        Prediction(
            run.row.id, "", "MaxText", run.precision, measured_s=1.454, predicted_s=1.0, configured=run.configured
        )
        for run in RUNS
        if run.row.id == "maxtext-a3-llama2-7b-8"
    ]
    today, then = _of_their_time(found, rows)[-3:-1]
    assert today == "| today's | 1 | 1 | -31.2% | 31.2% | maxtext-a3-llama2-7b-8 -31.2% |"
    assert then.startswith("| of their time | 1 | 1 | +10.")
    assert _of_their_time([], rows) == []


def _file(folder: Path, scale: float) -> Path:
    """A3's rows: today's XLA 10 % too fast, the older one `scale` times what was measured."""
    measured = {8: 1.4537, 16: 1.6948, 32: 1.7573, 64: 1.7487, 128: 1.9072}
    lines = [f"maxtext-a3-llama2-7b-{n},0.4.26,no,{s * 0.9},0.1,{s * scale},0.2,," for n, s in measured.items()]
    header = "id,jaxlib,profiled,today_s,today_exposed_s,older_s,older_exposed_s,unprofiled_s,unprofiled_exposed_s"
    (folder / "older.csv").write_text("\n".join((header, *lines)))
    return folder / "older.csv"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_stand_in_for_cuda_shows_a_clusters_gpus(tmp_path, monkeypatch):
    plugin = tmp_path / "lib/python3.12/site-packages/jax_plugins/xla_cuda12/xla_cuda_plugin.so"
    plugin.parent.mkdir(parents=True)
    plugin.write_bytes(b"\0cuMemAdvise\0cuDeviceGetCount\0curious words\0")
    monkeypatch.setattr(programs, "versions", lambda _: ("0.4.26", "0.19.4"))
    experiment = load(programs.__file__.replace("older_xla/programs.py", "published/experiments/pax-5b-A100-256.toml"))
    for name, value in programs.stand_in(tmp_path / "bin/python", experiment.cluster, 0.9).items():
        monkeypatch.setenv(name, value)
    cuda = ctypes.CDLL(str(plugin.parent / "stand_in/libcuda.so.1"))
    number = ctypes.c_int()
    for ask, expected in (
        (lambda: cuda.cuDeviceGetCount(ctypes.byref(number)), 256),
        (lambda: cuda.cuDeviceGetAttribute(ctypes.byref(number), 16, 0), 108),  # multiprocessors
        (lambda: cuda.cuDeviceGetAttribute(ctypes.byref(number), 10, 0), 32),  # threads of a warp
        (lambda: cuda.cudaRuntimeGetVersion(ctypes.byref(number)), 12040),
    ):
        assert ask() == 0
        assert number.value == expected
    assert cuda.cuMemAdvise() == 0
    assert cuda.cudnnGetVersion() == 8907
