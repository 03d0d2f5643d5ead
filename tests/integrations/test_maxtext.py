"""Test MaxText's own training step, unedited, on absent GPUs; `make check-maxtext` installs it and runs this."""

import json
import math
import time
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding

import meshkit as mk
from meshkit.config.experiment import load_any
from meshkit.planning.planner import plan_experiment, plan_program
from meshkit.sharding.resolve import array_of
from meshkit.step.given import group_arguments
from meshkit.verbs.rehearse import rehearsal

pytest.importorskip("maxtext", reason="needs MaxText: `make check-maxtext`")
pytestmark = [pytest.mark.deviceless, pytest.mark.slow]
PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "your-own-program.md").read_text(encoding="utf-8")

from meshkit.integrations import maxtext  # noqa: E402

CUDNN = {"attention": "cudnn_flash_jax", "per_device_batch_size": 1, "max_target_length": 4096}
PLAIN = {"attention": "dot_product"}
EIGHT, ACROSS = {"infiniband": 2, "nvlink": 8}, {"infiniband": 2}
CASES = {
    "llama3-8b, fsdp": (2, {"data": ACROSS, "fsdp": 8}, {}),
    "llama3-70b, fsdp": (16, {"fsdp": {"infiniband": 16, "nvlink": 8}}, {"remat_policy": "save_qkv_proj"}),
    "llama3-8b, fsdp x tensor": (2, {"fsdp": {"infiniband": 2, "nvlink": 4}, "tensor": 2}, {}),
    "mixtral-8x7b, expert": (8, {"fsdp": {"infiniband": 8}, "expert": 8}, {}),
    "gemma2-9b, fsdp": (2, {"fsdp": EIGHT}, PLAIN),
    "deepseek2-16b, fsdp x expert": (2, {"fsdp": ACROSS, "expert": 8}, PLAIN),
    "llama3-8b, context": (2, {"fsdp": {"infiniband": 2, "nvlink": 2}, "context": 4}, PLAIN),
}


def held(leaves):
    """Return the bytes of one GPU by the closed form: elements over shards, times the bytes of each."""
    total = 0
    for array in map(array_of, leaves):
        if not isinstance(array.sharding, NamedSharding) or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            continue
        total += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return total


@pytest.mark.parametrize("case", CASES)
def test_its_step_is_planned_as_it_is(case):
    hosts, axes, said = CASES[case]
    cluster = mk.Cluster.load("dgx_h100", hosts=hosts)
    mesh = mk.build_mesh(mk.MeshSpec.parse(axes), cluster, devices=mk.describe_devices(cluster))
    start = time.perf_counter()
    program = maxtext.make(mesh, **{**CUDNN, "model_name": case.partition(",")[0], **said})
    plan = plan_program(program, mesh=mesh, cluster=cluster)
    report, traced = plan.report, plan.compiled.traced_flops
    groups = group_arguments(program.args)
    assert report.memory.parameters_bytes == held(groups.parameters.values())
    assert report.memory.optimizer_bytes == pytest.approx(held(groups.optimizer.values()), abs=64)
    parts = ("parameters", "optimizer", "gradients", "activations", "temporary")
    found = sum(getattr(report.memory, f"{part}_bytes") or 0 for part in parts)
    assert found == report.memory.peak_bytes
    ops = [op for row in report.communication for op in row.ops]
    lines = [op.line or "" for op in sorted(ops, key=lambda op: -(op.exposed_s or 0.0))[:10]]
    assert ["maxtext" in line or "meshkit" not in line for line in lines] == [True] * len(lines), lines
    ratio = traced.model_causal / report.step.model_flops if traced else math.nan
    print(
        f"\nROW | {report.step.time_s:.3f} s | fits {report.memory.fits} | MFU {report.step.mfu or math.nan:.3f} "
        f"| traced/theirs {ratio:.4f} | {time.perf_counter() - start:.0f} s"
    )


TINY = {"model_name": "default", "base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 16,
        "base_mlp_dim": 128, "base_num_decoder_layers": 2, "per_device_batch_size": 2, "max_target_length": 128,
        "attention": "dot_product"}  # fmt: skip


def test_its_step_runs_and_is_captured_as_a_rehearsal_does(tmp_path):
    """The rehearsal runs on eight virtual devices instead of one GPU of many."""
    options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY.items())
    cluster = 'cluster = { name = "x", gpu = "cpu", hosts = 1, gpus_per_host = 8 }\nmesh = { data = 2, fsdp = 4 }\n'
    program = f'[program]\nmake = "meshkit.integrations.maxtext:make"\noptions = {{ {options} }}\n'
    (tmp_path / "mine.toml").write_text(cluster + program)
    rehearsal.rehearse(load_any(tmp_path / "mine.toml"), list(jax.devices()), tmp_path / "run", 2)
    record = json.loads((tmp_path / "run" / "trace" / "capture-p0.json").read_text())
    assert (record["num_steps"], record["work"]["tokens"]) == (2, 8 * 2 * 128)


def test_the_function_of_the_guide_is_planned_with_its_lines_in_maxtext(tmp_path):
    """The guide's function has at most thirty lines, MaxText's own mesh, and nothing of the integration."""
    source = PAGE.split("# my_maxtext.py\n")[1].split("```")[0]
    assert len([line for line in source.splitlines() if line.strip()]) <= 30
    (tmp_path / "my_maxtext.py").write_text(source)
    (tmp_path / "mine.toml").write_text(
        'cluster = { name = "dgx_h100", hosts = 2 }\nmesh = { fsdp = { nvlink = 8, infiniband = 2 } }\n'
        '[program]\nmake = "my_maxtext:make"\noptions = { model_name = "llama3-8b", '
        'attention = "cudnn_flash_jax", per_device_batch_size = 1, max_target_length = 4096 }\n'
    )
    report = plan_experiment(load_any(tmp_path / "mine.toml")).report
    ops = sorted((op for row in report.communication for op in row.ops), key=lambda op: -(op.exposed_s or 0.0))
    assert [op.line for op in ops[:10] if "my_maxtext" in (op.line or "").partition(" from ")[2]] == []
    assert report.memory.parameters_bytes
