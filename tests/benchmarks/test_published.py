"""Test how published runs of JAX become experiment files, why some stay blank, and what the command writes."""

import csv
import json
import statistics
import tomllib

import pytest

from benchmarks.published.__main__ import COLUMNS, main, plan
from benchmarks.published.experiments import KEPT, Unplannable, experiment_of
from benchmarks.published.intervals import read_own, stratum_name
from benchmarks.published.own import own_rows
from benchmarks.published.rows import measured_step_s, parse_row, read_rows, trainer_of
from meshkit.config.experiment import load
from meshkit.planning.planner import plan_experiment

OWN = KEPT.with_name("rows.csv")
LLAMA = {"id": "x", "framework": "axlearn", "model": "llama2-7b", "params_b": "6.74", "layers": "32", "hidden": "4096",
         "heads": "32", "kv_heads": "32", "ffn": "11008", "vocab": "32000", "seq_len": "4096", "gpu": "H100-80GB SXM",
         "n_gpus": "64", "gpus_per_node": "8", "network": "InfiniBand NDR 8x400G", "tp": "1", "pp": "1", "fsdp": "64",
         "micro_batch": "2", "global_batch_seqs": "128", "recompute": "full", "precision": "bf16"}  # fmt: skip


def row(**cells):
    return parse_row({**LLAMA, **cells}, "row-1")


def document(**cells):
    return experiment_of(row(**cells)).document


def loaded(tmp_path, **cells):
    path = tmp_path / "x.toml"
    path.write_text(experiment_of(row(**cells)).text, encoding="utf-8")
    return load(path)


def test_every_row_of_ours_has_a_file_and_every_file_a_row():
    rows = read_rows(OWN)
    assert {row.id for row in rows} == {path.stem for path in KEPT.glob("*.toml")}
    for own in rows:
        run = experiment_of(own)
        assert run.kept, own.id
        assert "calibration" not in run.document["cluster"]
        assert trainer_of(own)[0] in ("maxtext", "paxml")


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.toml"))[::7], ids=lambda path: path.stem)
def test_kept_files_are_experiments(path):
    assert load(path).cluster.num_gpus == experiment_of(_own(path.stem)).document["cluster"]["hosts"] * 8


def _own(name):
    return next(row for row in read_rows(OWN) if row.id == name)


def test_a_file_is_kept_for_its_own_row_alone():
    own = _own("maxtext-llama2-70b-bf16-64")
    assert experiment_of(own).kept
    other = parse_row({**own.text, "n_gpus": "128", "fsdp": "128", "global_batch_seqs": "256"}, own.id)
    run = experiment_of(other)
    assert not run.kept
    assert run.document["mesh"] == {"fsdp": {"nvlink": 8, "infiniband": 16}}


def test_a_generated_file_has_the_mesh_the_model_and_the_batch_of_its_row(tmp_path):
    found = loaded(tmp_path, tp="4", fsdp="8", dp="2", micro_batch="2", global_batch_seqs="64")
    sizes = {axis.name: (axis.nvlink, axis.infiniband) for axis in found.mesh.axes}
    assert sizes == {"data": (1, 2), "fsdp": (2, 4), "tensor": (4, 1)}
    assert found.cluster.nic is not None
    assert (found.cluster.gpu.key, found.cluster.hosts, found.cluster.nic.key) == ("h100_sxm", 8, "ib_ndr")
    assert (found.train.global_batch, found.train.accumulate, found.train.remat) == (64, 2, "full")
    options = found.model.options
    assert (options["layers"], options["embed"], options["mlp"], options["tied"]) == (32, 4096, 11008, False)


@pytest.mark.parametrize(
    ("cells", "table", "found"),
    [
        ({"pp": "2", "fsdp": "32", "vpp": "4"}, "mesh", {"pipeline": {"nvlink": 1, "infiniband": 2},
                                                         "fsdp": {"nvlink": 8, "infiniband": 4}}),
        ({"cp": "8", "fsdp": "8"}, "mesh", {"fsdp": {"nvlink": 1, "infiniband": 8}, "context": 8}),
        ({"model": "mixtral-8x7b", "ffn": "14336", "kv_heads": "8", "ep": "8", "fsdp": "8"}, "mesh",
         {"fsdp": {"nvlink": 1, "infiniband": 8}, "expert": 8}),
        ({"gpu": "GB200", "gpus_per_node": "4", "n_gpus": "72", "fsdp": "72", "global_batch_seqs": "144"}, "cluster",
         {"gpu": "gb200", "hosts": 18, "gpus_per_host": 4, "nvlink_domain_size": 72}),
        ({"network": "AWS EFA 3200 Gbps"}, "cluster",
         {"gpu": "h100_sxm", "hosts": 8, "gpus_per_host": 8, "nic": "efa_100", "nics_per_host": 32}),
        ({"network": "GCP A3 (GPUDirect-TCPX, 4x200G per node)"}, "cluster",
         {"gpu": "h100_sxm", "hosts": 8, "gpus_per_host": 8, "nic": "tcpx_200", "nics_per_host": 4}),
    ],
)  # fmt: skip
def test_columns_become_tables(cells, table, found):
    assert document(**cells)[table] == found


@pytest.mark.parametrize(
    ("words", "remat"),
    [
        ("none", "none"),
        ("full", "full"),
        ("custom remat: save q,k,v,qkv,out proj (save_dot_except_mlp)", ["query", "key", "value", "output"]),
        ("SAVE_QKV_OUT_PROJ", ["query", "key", "value", "output"]),
        ("save qkv", ["query", "key", "value"]),
        ("SAVE_DOT_ONLY", ["projection"]),
        ("minimal", ["projection"]),
        ("", ["projection"]),
    ],
)
def test_words_for_recomputation(words, remat):
    run = experiment_of(row(recompute=words))
    assert run.document["train"]["remat"] == remat
    assert run.configured == ("fully" if words else "partly")


def test_what_a_row_leaves_unsaid_is_assumed_and_said():
    run = experiment_of(row(layers="", hidden="", ffn="", network="", fsdp="", precision=""))
    assert run.document["model"]["layers"] == 32
    assert run.configured == "partly"
    for words in ("degree of sharding", "precision: bf16", "network not stated", "of the public model"):
        assert words in run.note


def test_the_number_of_parameters_decides_what_a_name_does_not():
    gated = document(model="unheard-of", params_b="5.3", vocab="32000")["model"]
    # Two matrices of 11,008 in 32 layers give 5.3e9 parameters; three would give 6.7e9.
    assert gated["class"] == "models.gpt:GPT"
    assert document(model="llama7b")["model"]["class"] == "models.llama:Llama"
    assert document(model="gpt3-5b", params_b="5", layers="24", ffn="16384", vocab="51200")["model"]["tied"]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"n_gpus": ""}, "the column n_gpus is missing"),
        ({"seq_len": ""}, "the column seq_len is missing"),
        ({"gpu": ""}, "the column gpu is missing"),
        ({"gpu": "TPU v5p"}, "not in the catalog"),
        ({"model": "unheard-of", "layers": ""}, "the column layers is missing"),
        ({"model": "dbrx-moe", "ep": "8"}, "the column experts is missing"),
        ({"global_batch_seqs": "", "micro_batch": ""}, "global_batch_seqs and micro_batch are missing"),
        ({"layers": "1e9"}, "column layers = 1e\\+09 is not between 0 and 2,000"),
        ({"n_gpus": "-8"}, "column n_gpus = -8 is not between"),
        ({"tp": "3"}, "64 GPUs do not divide by tp 3"),
        ({"precision": "nvfp4"}, "precision 'nvfp4'"),
        ({"model": "t5-xxl"}, "no decoder"),
    ],
)
def test_a_row_that_says_too_little_or_too_much_is_refused(cells, reason):
    with pytest.raises(Unplannable, match=reason):
        experiment_of(row(**cells))


@pytest.mark.parametrize(
    ("cells", "trainer", "why"),
    [
        ({"framework": "MaxText"}, "maxtext", ""),
        ({"framework": "jax/flax"}, "flax", ""),
        ({"framework": "torch", "source": "MaxText beside it"}, "", "another framework: torch"),
        ({"framework": "", "source": "JAX-Toolbox Pax"}, "paxml", ""),
        ({"framework": "", "source": "MLPerf Training v4.1", "notes": "NeMo"}, "", "names nemo"),
        ({"framework": "", "source": "MaxText against Megatron"}, "", "the column framework is missing"),
        ({"framework": "", "source": "a page"}, "", "not known to be JAX"),
    ],
)
def test_what_ran_is_said_and_not_guessed(cells, trainer, why):
    found, reason = trainer_of(row(**cells))
    assert found == trainer
    assert why in reason


def test_the_measured_step():
    assert measured_step_s(row(step_time_s="2.5", tokens_per_s_per_gpu="1")) == (2.5, "")
    assert measured_step_s(row(tokens_per_s_per_gpu="4096"))[0] == pytest.approx(128 / 64)
    assert measured_step_s(row(tflops_per_gpu="500"), 64e15)[0] == pytest.approx(2.0)
    assert measured_step_s(row(mfu_pct="50"), 64e15, 1e15)[0] == pytest.approx(2.0)
    assert measured_step_s(row(step_time_s="inf")) == (None, "no measured time")


def written(tmp_path, rows, *options):
    source = tmp_path / "rows.csv"
    with source.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, LLAMA | {"step_time_s": "", "source": ""})
        writer.writeheader()
        writer.writerows(rows)
    assert main(["--rows", str(source), "--out", str(tmp_path / "out"), *options]) == 0
    with (tmp_path / "out" / "predictions.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_file_never_seen_is_planned_row_by_row(tmp_path, monkeypatch, capsys):
    """The table repeats what `meshkit plan` says, here a fixed answer, with a line for every row."""
    step = {"time_s": 2.2, "exposed_s": 0.1, "model_flops": 1e15, "time_interval_reason": None,
            "time_interval": {"p50_s": [2.1, 2.3], "p80_s": [1.9, 2.5]}}  # fmt: skip
    planned = []
    monkeypatch.setattr(
        "benchmarks.published.__main__.plan",
        lambda path: (planned.append(load(path)), ({"step": step, "memory": {"peak_bytes": 7}}, ""))[1],
    )
    rows = [
        {**LLAMA, "step_time_s": "2.0"},
        {**LLAMA, "id": "../../up", "step_time_s": "2.2", "recompute": ""},
        {**LLAMA, "id": "torch", "framework": "torch", "step_time_s": "3"},
        {**LLAMA, "id": "less", "seq_len": ""},
        {**LLAMA, "id": "x"},
    ]
    found = written(tmp_path, rows)
    assert tuple(found[0]) == COLUMNS
    assert [p["id"] for p in found] == ["x", "../../up", "torch", "less", "x#2"]
    assert [p["predicted_step_time_s"] for p in found] == ["2.2", "2.2", "", "", "2.2"]
    assert [p["configured"] for p in found] == ["fully", "partly", "", "", "fully"]
    assert (found[0]["interval_low_s"], found[0]["interval_high_s"], found[0]["program"]) == ("1.9", "2.5", "ours")
    assert "another framework" in found[2]["note"]
    assert "the column seq_len is missing" in found[3]["note"]
    assert len({p.name for p in planned}) == len(planned) == 3
    assert sorted(path.parent for path in (tmp_path / "out").rglob("*.toml")) == [tmp_path / "out" / "experiments"] * 3
    said = capsys.readouterr().out
    assert "3 of 4 JAX rows predicted (75%); 1 rows of other or unknown frameworks." in said
    assert "median |error| 5.0% by row" in said
    assert "interval of 50 %: covers 50% of 2 rows" in said
    assert "interval of 80 %: covers 100% of 2 rows" in said


@pytest.mark.slow
def test_the_plan_of_a_file_is_what_meshkit_says(tmp_path):
    """One GPU and one layer make the smallest program that can be planned."""
    cells = {"n_gpus": "1", "gpus_per_node": "1", "fsdp": "1", "micro_batch": "1", "global_batch_seqs": "1",
             "layers": "1", "hidden": "256", "heads": "2", "kv_heads": "2", "ffn": "512", "vocab": "512",
             "seq_len": "256", "params_b": "", "step_time_s": "1"}  # fmt: skip
    found = written(tmp_path, [{**LLAMA, **cells}])
    report = plan_experiment(load(tmp_path / "out" / "experiments" / "x.toml")).report
    assert float(found[0]["predicted_step_time_s"]) == pytest.approx(report.step.time_s, rel=1e-5)
    assert float(found[0]["predicted_peak_bytes"]) == report.memory.peak_bytes


def test_what_plan_refuses_is_a_reason(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(experiment_of(row()).text.replace("hosts = 8", "hosts = 7"), encoding="utf-8")
    report, why = plan(path)
    assert report is None
    assert "7" in why
    assert "Traceback" not in why


@pytest.mark.parametrize("content", [None, b"", b"\x00\xff\x80 not a table", b"name,step\na,1\n"])
def test_what_is_no_table_of_rows_is_one_message(tmp_path, capsys, content):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_bytes(content)
    assert main(["--rows", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("published: ")
    assert "Traceback" not in said


def test_generated_files_say_where_their_row_is_from():
    text = experiment_of(row(source="A page", network="")).text
    assert text.startswith("# x: A page")
    assert "# Assumed: network not stated: 8 x ib_ndr a host." in text
    assert tomllib.loads(text)["name"] == "x"


def test_own_trainings_are_their_blind_predictions_beside_the_median_of_both_times(tmp_path):
    for name, values in {
        "fp8": {"gpu": "h200", "before_s": 0.2, "after_s": 0.4},
        "moe": {"gpu": "h200", "before_s": 0.5},
        "lora": {"gpu": "h200", "compile_s": 20.0},
    }.items():
        (tmp_path / f"row_{name}").mkdir()
        (tmp_path / f"row_{name}" / "result.json").write_text(json.dumps({"values": values}), encoding="utf-8")
    blind = {"fp8": {"step_s": 0.27}, "moe": {"step_s": 0.6}, "lora": {"step_s": 1.0}, "gpt2": {"step_s": 1.0}}
    fp8, moe = own_rows(tmp_path, blind, "2026-11-27", "here")
    assert (fp8["id"], fp8["precision"], fp8["experts"]) == ("h200-2026-11-27-fp8", "fp8", "no")
    assert (fp8["measured_step_time_s"], fp8["predicted_step_time_s"]) == ("0.3", "0.27")
    assert (moe["precision"], moe["experts"], moe["measured_step_time_s"]) == ("bf16", "yes", "0.5")


def test_own_trainings_are_one_group_of_a_card_in_strata_of_one_gpu():
    found = read_own(OWN.with_name("own.csv"))
    assert all(r.stratum.startswith("one GPU, ") for r in found)
    of_card = {group: [abs(r.error) for r in found if r.group == group] for group in {r.group for r in found}}
    assert {gpu: (len(e), statistics.median(e), max(e)) for (_, gpu), e in of_card.items()} == {
        "h200": pytest.approx((16, 0.0793, 0.5022), abs=5e-5),
        "h100_sxm": pytest.approx((21, 0.0331, 0.2795), abs=5e-5),
    }
    assert read_own(OWN.with_name("none.csv")) == []


def test_one_gpu_is_a_stratum_of_its_own():
    cluster = {"gpu": "h200", "hosts": 1, "gpus_per_host": 1}
    document = {"model": {"class": "models.llama:Llama"}, "train": {"precision": "bf16"}, "cluster": cluster}
    assert stratum_name(document) == "one GPU, dense, hopper, 16 bit"
    assert stratum_name({**document, "cluster": {**cluster, "gpus_per_host": 8}}) == "dense, hopper, 16 bit"
