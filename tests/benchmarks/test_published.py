"""The replay of published runs: rows are read, matched and grouped without a compile; one tiny row goes all the way."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import math
import random
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.published import blind, corrections, pieces, programs, statistics
from benchmarks.published.__main__ import COLUMNS, experiment_files, main
from benchmarks.published.experiments import Run, place, resolve
from benchmarks.published.frameworks import FRAMEWORKS, find_framework
from benchmarks.published.kernels import Kernels, write_calibration
from benchmarks.published.plot import draw
from benchmarks.published.replay import Prediction, group_key, predict
from benchmarks.published.replica import SCHEDULED, layer_loops, replica_step_s
from benchmarks.published.rows import Row, measured_peak_bytes, measured_step_time_s, parse_row, read_rows
from benchmarks.published.runner import grouped
from benchmarks.published.summary import main as summarize
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.config.toml import NAME_PATTERN
from meshkit.errors import ConfigError
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.kernels import kernel_work, measured_rates
from meshkit.predict.network import collective_time_s

RUNS = Path(__file__).parent.parent / "data" / "published_runs.csv"
FILES = Path(blind.__file__).parent / "experiments"
ROWS = {row.id: row for row in read_rows(RUNS)}
JAX_RUNS = {row.id: row for row in read_rows(RUNS.with_name("blind_jax_runs.csv"))}
TINY = {
    "id": "tiny", "source": "MosaicML llm-foundry", "model": "mpt-tiny", "layers": "2", "hidden": "128", "heads": "4",
    "ffn": "256", "vocab": "256", "seq_len": "64", "gpu": "H100-80GB SXM", "n_gpus": "8", "gpus_per_node": "8",
    "tp": "1", "pp": "1", "fsdp": "8", "micro_batch": "1", "global_batch_seqs": "8", "recompute": "none",
    "precision": "bf16", "step_time_s": "0.01",
}  # fmt: skip


def matched(name: str) -> Run:
    run = resolve(ROWS[name])
    assert isinstance(run, Run), run
    return run


def test_every_published_row_is_matched_or_says_why():
    runs = [resolve(row) for row in ROWS.values()]
    reasons = [run for run in runs if isinstance(run, str)]
    assert len(runs) == 480
    assert len(runs) - len(reasons) > 350
    assert all(len(reason) > 20 for reason in reasons)


def test_committed_experiment_files_are_those_of_the_rows():
    """`python -m benchmarks.published --rows tests/data/published_runs.csv --out DIR --files` writes them, and likewise
    those of blind_jax_runs.csv."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in FILES.iterdir()}
    assert committed == experiment_files((*ROWS.values(), *JAX_RUNS.values()))
    experiments = [path for path in FILES.iterdir() if not path.name.startswith("cudnn_")]
    assert all(load(path).train.derived_options is False for path in experiments)


def test_a_file_of_the_products_own_names_the_attention_of_its_image():
    """cuDNN 9.1.0 on an H200, 542 and 444 TFLOP/s at the full clock (NVIDIA/cudnn-frontend@b740542)."""
    run, cost = matched("maxtext-a3-llama2-7b-8"), Cost(attention_flops=1e12, attention_queries=2048 * 128)
    found = load(FILES / "maxtext-a3-llama2-7b-8.toml").cluster
    today = found.model_copy(update={"calibration": None})
    assert run.kernels == Kernels()
    for backward, rate, by_the_catalog in ((False, 542e12, 0.597 * 989.4e12), (True, 444e12, 0.479 * 989.4e12)):
        way = dataclasses.replace(cost, attention_backward=backward)
        older, newer = (kernel_work(way, c.gpu, measured_rates(c)).arithmetic_s for c in (found, today))
        assert older / newer == pytest.approx(by_the_catalog / rate, rel=2e-3)  # rounding of shares to three places


def test_a_kept_program_is_not_that_of_other_code(tmp_path, monkeypatch):
    toml = matched("maxtext-llama2-70b-fp8-512").toml
    key = programs.program_key(toml)
    assert key == programs.program_key(toml.replace("maxtext-llama2-70b-fp8-512", "another"))
    for folder in programs._MAKERS:
        shutil.copytree(programs._ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(programs, "_ROOT", tmp_path)
    programs._digest.cache_clear()
    assert programs.program_key(toml) == key
    with (tmp_path / "models" / "llama.py").open("a") as file:
        file.write("# changed\n")
    programs._digest.cache_clear()
    assert programs.program_key(toml) != key


def test_rows_that_share_a_program_are_grouped_once_each():
    groups = grouped(ROWS.values())
    assert sorted(row.id for group in groups for row in group) == sorted(ROWS)
    together = next(g for g in groups if any(row.id == "internevo-7b-tp1-z8-8" for row in g))
    assert {"internevo-7b-tp1-z8-1024", "internevo-7b-tp1-z-1-1024"} <= {row.id for row in together}
    assert all(group_key(row) == "" for g in groups for row in g if isinstance(resolve(row), str))


@pytest.mark.parametrize("name", ["maxtext-llama2-70b-fp8-512", "vtrain-multi-036", "internevo-7b-tp1-z8-1024",
                                  "tt2506-llama3-70b-256-bf16-asyncTP", "nemo2504-llama3.1-70b-bf16-64",
                                  "nemo2505-llama3.1-405b-gb200-bf16-128", "kempner-10-7B-16"])  # fmt: skip
def test_the_experiment_of_a_row_is_a_file_that_loads(name, tmp_path):
    run = matched(name)
    (tmp_path / "experiment.toml").write_text(run.toml)
    write_calibration(run.toml, tmp_path)
    experiment = load(tmp_path / "experiment.toml")
    assert math.prod(experiment.mesh.shape) == experiment.cluster.num_gpus
    if run.whole:
        assert experiment.cluster.num_gpus == run.gpus
        assert experiment.train.global_batch == ROWS[name].count("global_batch_seqs")


def test_a_row_says_how_its_batch_is_cut():
    run = matched("vtrain-multi-036")  # 1024 sequences over 8 replicas in micro-batches of 2
    assert (run.data, run.micro_batch, run.micro_batches, run.stage_layers) == (8, 2, 64, 10)
    assert run.document["model"]["attention"] == "materialized"
    assert matched("maxtext-llama2-70b-bf16-512").document["mesh"] == {
        "data": {"nvlink": 1, "infiniband": 4},
        "fsdp": {"nvlink": 8, "infiniband": 16},
    }


def test_a3_has_the_network_and_the_options_of_its_page():
    one, sixteen = (matched(f"maxtext-a3-llama2-7b-{n}").document for n in (8, 128))
    thresholds = [f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_gather", "all_reduce", "reduce_scatter")]
    assert [[d["xla"][name] >> 20 for name in thresholds] for d in (one, sixteen)] == [[128, 128, 64], [128, 1024, 128]]
    assert (sixteen["cluster"]["nic"], sixteen["cluster"]["nics_per_host"]) == ("tcpx_200", 4)


def test_jax_models_have_the_parts_of_their_source():
    """One-hot look-ups, biases, the head's precision and 5B's dropout, by the page's own configurations."""
    parts = {"one_hot_lookup": 1, "bias": 2, "fp32_head": 4, "dropout": 8}
    names = ("maxtext-llama2-70b-fp8-64", "maxtext-a3-llama2-7b-8", "pax-5b-A100-256", "paxml-gpt3-175b-fp8-512",
             "pax-llama2-7b-sft-16-TE", "vtrain-multi-036")  # fmt: skip
    models = [matched(name).document["model"] for name in names]
    found = [sum(bit for key, bit in parts.items() if model.get(key)) for model in models]
    assert found == [1, 5, 11, 3, 0, 0]


def test_pax_runs_what_its_page_names():
    """google/paxml's configurations: recomputation, heads, and XLA options without pipelined collectives."""
    small, mid, large, tuned = (matched(f"pax-{name}") for name in (
        "126m-te-H100-64", "5b-A100-256", "175b-tefp8-H100-256", "llama2-7b-sft-16-TE"))  # fmt: skip
    assert [run.document["train"]["remat"] for run in (small, mid, large, tuned)] == ["none", "dots", "full", "none"]
    assert [run.configured for run in (small, mid, large, tuned)] == [False, True, True, False]
    assert (mid.shape.heads, small.document["model"]["attention"]) == (32, "materialized")
    key = "xla_gpu_all_reduce_combine_threshold_bytes"
    assert [(run.document["xla"][key], len(run.document["xla"])) for run in (small, large)] == [(2**25, 2), (51_200, 2)]


@pytest.mark.parametrize(("mib", "us"), [(64, 1432.6), (256, 5066.8), (1024, 20431), (8192, 160505)])
def test_all_gathers_over_tcpx_as_published(mib, us):
    """nccl-tests over two hosts of A3 High: dstackai/dstack@6f6b421, examples/clusters/a3high."""
    hosts = Cluster.load({"gpu": "h100_sxm", "hosts": 2, "gpus_per_host": 8, "nic": "tcpx_200", "nics_per_host": 4})
    found = collective_time_s("all-gather", payload_bytes=mib * 2**20, gpus_per_domain=8, domains=2, cluster=hosts)
    assert found == pytest.approx(us * 1e-6, rel=0.1)


def test_scores_of_the_blind_predictions():
    """Those of NVFP4 and JAX are in the README as the module prints them; blind.csv's as they were scored then."""
    known = {row.id: resolve(row) for row in read_rows(blind.ROWS[0])}
    whole = known["mlperf-v4.1-NVIDIA-eos_n32_ngc24.09_nemo-gpt3"]
    later = known["mlperf-v3.1-NVIDIA-eos_n64_ngc23.09_nemo-gpt3"]
    assert isinstance(whole, Run)
    assert isinstance(later, Run)
    assert (whole.chunks, whole.configured, later.chunks, later.configured) == (6, True, 12, True)
    readme = blind.PREDICTED.with_name("README.md").read_text()
    for predicted in (blind.NVFP4, blind.JAX):
        assert "\n".join(blind.lines(predicted)) in readme
    for predicted in (blind.PREDICTED, blind.NVFP4, blind.JAX):
        assert hashlib.sha256(predicted.read_bytes()).hexdigest() in readme
    assert "| dense, fully stated (7 rows, 4 groups) | 2.6% | 1.9% | 7 |" in "\n".join(blind.lines())


def test_innermost_axes_stay_inside_a_domain():
    assert place({"data": 4, "tensor": 8}, 8) == {"data": {"nvlink": 1, "infiniband": 4}, "tensor": 8}
    assert place({"data": 4, "tensor": 2}, 8) == {"data": 4, "tensor": 2}
    assert place({"data": 1, "tensor": 1}, 8) == {"data": 1}


def test_what_a_source_leaves_unsaid_is_said():
    assert matched("maxtext-llama2-70b-bf16-64").configured
    unsaid = matched("nemo2504-llama3.1-70b-bf16-64")
    assert not unsaid.configured
    assert any("recomputation not stated" in text for text in unsaid.assumed)
    assert "MLA" in str(resolve(ROWS["mbridge-26.08-DeepSeekV3-DGX-GB300-256-MXFP8"]))


def test_measured_times_and_peaks_are_read_from_what_there_is():
    assert measured_step_time_s(ROWS["maxtext-llama2-70b-bf16-64"]) == (6.999, "")
    seconds, how = measured_step_time_s(ROWS["tt-8b-fsdp8-eager"])  # 16 sequences of 8192 at 5762 tokens/s on 8 GPUs
    assert seconds == pytest.approx(16 * 8192 / (5762 * 8))
    assert "tokens/s" in how
    assert measured_step_time_s(ROWS["megatron-sc21-39B"])[0] == 14.453
    assert measured_peak_bytes("peak alloc 39.07 GiB; more") == (
        int(39.07 * 2**30),
        "allocated",
        "peak alloc 39.07 GiB",
    )
    assert measured_peak_bytes("x. Peak memory 82.4 GiB.") == (int(82.4 * 2**30), "reserved", "Peak memory 82.4 GiB")
    assert measured_peak_bytes("nothing of it") is None
    assert sum(measured_peak_bytes(row.notes) is not None for row in ROWS.values()) >= 28


def test_mutilated_rows_never_raise(tmp_path):
    """Cells blanked, negated, swapped for words: `predict` answers with a note, without a compile."""
    chosen = random.Random(0)
    with RUNS.open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    junk = ["", "-1", "0", "1e400", "nan", "many", "3.5", "²", "None", "x" * 300]
    for index in range(300):
        cells = dict(chosen.choice(table))
        for name in chosen.sample(list(cells), 4):
            cells[name] = chosen.choice(junk)
        row = parse_row(cells, f"row-{index}")
        found = predict(row, tmp_path, compile_missing=False)
        assert found.predicted_s is None
        assert found.note
        group_key(row)


def test_short_rows_and_odd_files(tmp_path, capsys):
    short = tmp_path / "short.csv"
    short.write_text("id,source,n_gpus\na\na,b,8,9,10\n,,\n", encoding="utf-8")
    assert [row.id for row in read_rows(short)] == ["a", "a#2", "row-3"]
    assert main(["--rows", str(short), "--out", str(tmp_path / "out"), "--jobs", "2"]) == 0
    with (tmp_path / "out" / "predictions.csv").open() as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == COLUMNS
    assert [row["predicted_step_time_s"] for row in table] == ["", "", ""]
    assert all(row["note"] for row in table)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    assert main(["--rows", str(tmp_path / "bad.csv"), "--out", str(tmp_path)]) == 2
    assert "no column 'id'" in capsys.readouterr().err


@pytest.mark.deviceless
def test_a_tiny_row_from_csv_to_picture(tmp_path, monkeypatch):
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, TINY)
        writer.writeheader()
        writer.writerows([TINY, TINY | {"id": "other", "step_time_s": ""}])
    out = tmp_path / "out"
    assert main(["--rows", str(tmp_path / "rows.csv"), "--out", str(out), "--only", "tiny"]) == 0
    with (out / "predictions.csv").open() as file:
        tiny, other = csv.DictReader(file)
    assert float(tiny["predicted_step_time_s"]) > 0
    assert float(tiny["predicted_peak_bytes"]) > 0
    assert tiny["measured_step_time_s"] == "0.01"
    assert other["predicted_step_time_s"] == tiny["predicted_step_time_s"]  # the same program
    assert summarize(["--rows", str(tmp_path / "rows.csv"), "--out", str(out)]) == 0
    assert "MosaicML" in (out / "summary.md").read_text()
    assert (out / "predicted.svg").read_text().startswith("<svg")


def _stage_program(layer_s: float, head_s: float, trips: int):
    """A stage of a forward and a backward loop, each kernel of so many seconds, as a stand-in for a compiled one."""
    forward, backward, head = (Instruction(n, "fusion", "kernel", cost=Cost()) for n in ("f", "b", "h"))
    loops = [Instruction(n, "while", "while", bodies=(b,), trip_count=trips) for n, b in (("w1", "fb"), ("w2", "bb"))]
    schedule = Schedule("m", {"fb": (forward,), "bb": (backward,), "e": (loops[0], head, loops[1])}, "e", "x")
    return schedule, {"f": layer_s / 3, "b": 2 * layer_s / 3, "h": head_s}


def test_a_pipeline_takes_its_micro_batches_and_its_bubble():
    """1F1B by hand: m micro-batches of the slowest stage, p - 1 fills and drains of the others, the sends."""
    run = matched("vtrain-multi-036")
    run = dataclasses.replace(run, framework=dataclasses.replace(run.framework, between="", bucket_copy_bytes=0))
    schedule, seconds = _stage_program(1e-3, 5e-3, trips=4)
    assert layer_loops(schedule) == ["w1", "w2"]

    class Program:
        def __init__(self):
            self.schedule, self.readers = schedule, {}

        def simulate(self, kernels, schedule, gpus):
            assert gpus == run.gpus, "the slowest GPU is that of the whole run"
            total = 0.0
            for i in schedule.computations["e"]:
                inner = sum(seconds[k.name] for b in i.bodies for k in schedule.computations[b])
                total += inner * (i.trip_count or 0) if i.bodies else seconds[i.name]
            return total

    cluster = Cluster.load(run.machines.table)
    view = dataclasses.replace(SCHEDULED, pick=lambda s: s, outside=False)
    step = replica_step_s(run, Program(), cluster, view)  # pyright: ignore[reportArgumentType]
    assert step == pytest.approx(64 * (10e-3 + 5e-3) + 3 * 10e-3)
    sends = replica_step_s(run, Program(), cluster, dataclasses.replace(view, outside=True)) - step  # pyright: ignore[reportArgumentType]
    reduction = collective_time_s(
        "all-reduce", payload_bytes=2 * (10 * run.shape.layer_parameters() + 51_200 * 6144) / 8, gpus_per_domain=1,
        domains=8, cluster=cluster,
    )  # fmt: skip
    assert sends > reduction


def test_every_framework_says_where_it_is_from():
    assert all(len(f.why) > 20 for f in FRAMEWORKS)
    assert find_framework(ROWS["mcore-h100-weak-7.1B"]).name == "Megatron-Core", "of 2024, in Megatron-LM's repository"
    assert find_framework(ROWS["megatron-sc21-39B"]).name == "Megatron-LM"
    assert find_framework(parse_row({"source": "new", "fsdp": "8", "pp": "1"}, "x")).whole
    assert not find_framework(parse_row({"source": "new", "tp": "8", "pp": "4"}, "x")).whole


def _prediction(name: str, family: str, measured: float, predicted: float, gpus: int) -> Prediction:
    return Prediction(name, "s", family, "bf16", "h100_sxm", gpus, measured, predicted, 0.0, 0.5, 9.0, configured=True,
                      model_flops=gpus * 989.4e12 * 0.4)  # fmt: skip


def test_statistics_count_correlated_rows_once():
    found = [_prediction(f"a{i}", "A", 1.0, 1.1, 8) for i in range(9)] + [_prediction("b", "B", 1.0, 1.3, 8)]
    rows = {p.id: Row(p.id, p.family, "", {"model": p.family}, {}) for p in found}
    grouped = statistics.groups(found, rows)
    assert len(grouped) == 2
    assert statistics.median_error(grouped, lambda p: p.error) == pytest.approx(0.2)  # not 0.1, which nine rows have
    trivial = statistics.trivial_predictor([*found, _prediction("c", "B", 2.0, 2.0, 8)], {**rows, "c": rows["b"]})
    # A runs at MFU 0.4, B at a median of 0.3: B from A is 0.4 / 0.4 - 1 and 0.2 / 0.4 - 1
    assert trivial["b"] == pytest.approx(0.0)
    assert trivial["c"] == pytest.approx(-0.5)


def test_a_trend_is_right_when_its_sign_is():
    found = [_prediction("a8", "A", 1.0, 1.0, 8), _prediction("a16", "A", 1.5, 1.1, 16)]
    rows = {p.id: Row(p.id, "A page", "", {"model": "m"}, {"global_batch_seqs": 8 * n, "seq_len": 128, "n_gpus": 8 * n})
            for n, p in enumerate(found, 1)}  # fmt: skip
    (trend,) = statistics.trends(found, rows)
    assert (trend.gpus, trend.right) == ((8, 16), True)
    assert trend.measured == pytest.approx(1 / 1.5 - 1)
    assert trend.predicted == pytest.approx(1 / 1.1 - 1)


def test_a_trend_below_its_own_scatter_is_still():
    """GPT-3 175B in fp8: 6.44, 6.72 and 6.24 s on 512, 1024 and 2048 GPUs, the same work on each."""
    times = {512: 6.44, 1024: 6.72, 2048: 6.24}
    found = [_prediction(str(n), "A", seconds, 6.0 + n / 1e5, n) for n, seconds in times.items()]
    rows = {p.id: Row(p.id, "A page", "", {"model": "m"}, {"global_batch_seqs": p.num_gpus or 0, "seq_len": 128})
            for p in found}  # fmt: skip
    (trend,) = statistics.trends(found, rows)
    assert trend.measured == pytest.approx(6.44 / 6.24 - 1)
    assert trend.scatter == pytest.approx(1 - 6.44 / 6.72)
    assert trend.right is None


def test_every_experiment_has_a_name_that_a_file_may_have():
    for row in ROWS.values():
        run = resolve(row)
        if isinstance(run, Run):
            assert re.fullmatch(NAME_PATTERN, run.document["name"]), row.id


def test_a_program_has_as_many_gpus_as_divide_the_model():
    """96 GPUs and a hidden size of 8192: 64, with the micro-batch of each; the run stays one of 96."""
    run = matched("fms-llama2-70b-H100")
    assert (run.gpus, run.sharded) == (96, 96)
    assert run.document["mesh"] == {"fsdp": {"nvlink": 8, "infiniband": 8}}
    assert run.document["train"]["global_batch"] == 64 * run.micro_batch * run.micro_batches


def test_the_picture_names_every_family():
    picture = draw([_prediction("a", "First & last", 1.0, 1.1, 8), _prediction("b", "B", 30.0, 10.0, 8)])
    assert "First &amp; last" in picture
    assert picture.count("<circle") == 2 * 2 + 2  # each row twice, two in the legend


def test_what_a_plan_does_not_get_is_left_out_piece_by_piece():
    names = [c.name for c in corrections.CORRECTIONS]
    assert len(set(names)) == len(names)
    found = map(resolve, [*ROWS.values(), *read_rows(RUNS.with_name("blind_runs.csv"))])
    runs = [run for run in found if isinstance(run, Run)]
    for c in corrections.CORRECTIONS:
        run = next(run for run in runs if c.of(run))
        applied = list(corrections.corrections_of(run))
        left = list(corrections.corrections_of(corrections.leave_out(run, c)))
        if not c.off:
            expected = [dataclasses.replace(c, **c.instead)] if c.instead else []
            assert [f for other in applied for f in (expected if other == c else [other])] == left, c.name
        assert corrections.leave_out(run, c) != run
    row = ROWS["internevo-7b-tp1-z-1-8"]
    p = Prediction(row.id, row.source, "InternEvo", "bf16", measured_s=4.0, predicted_s=3.0)
    line = pieces.table_line("all", [(p, 5.0)], ROWS)
    assert line == "| all | 1 | 1 | 25.0%, +25.0% | 25.0%, -25.0% | 25.0%, +25.0% | +66.7% to +66.7% |"
    assert pieces.table_line("nothing", [(p, 3.0)], ROWS) == "| nothing | 0 | 0 | | | | |"


def test_options_of_maxtext_are_those_of_the_launcher_beside_each_page():
    """Combined gathers, all-reduces and scatters in MiB; A3 Mega has eight adapters of 200 Gb/s and TCPXO."""
    for name, sizes in {"maxtext-llama3-70b-fp8-256": (2048, 2048, 64), "maxtext-llama3-70b-bf16-512": (2048, 2048, 16),
                        "maxtext-a4-llama31-405b-fp8-256": (16384, 16384, 16384),
                        "maxtext-a3mega-llama2-7b-bf16-256": (128, 512, 64)}.items():  # fmt: skip
        run = resolve(JAX_RUNS[name])
        assert isinstance(run, Run)
        kinds = ("all_gather", "all_reduce", "reduce_scatter")
        found = [run.document["xla"][f"xla_gpu_{kind}_combine_threshold_bytes"] for kind in kinds]
        assert found == [size * 2**20 for size in sizes]
        assert (run.handling, run.configured) == ("none", True)
    assert (run.machines.table["nic"], run.machines.table["nics_per_host"]) == ("tcpxo_200", 8)
