"""Test `train.pgle`: XLA receives the plan's prices, per instruction for a second compile or as a table."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshkit.children import Child
from meshkit.compile import program as compiler
from meshkit.compile.attached import compile_step
from meshkit.compile.choices import ROUNDS, device_key, table_text, unread
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.config.sections import PGLE_OPTION, TABLE_OPTION
from meshkit.errors import ConfigError
from meshkit.planning.planner import plan_experiment
from meshkit.planning.resolved import make_train_step
from meshkit.predict.network import collective_time_s
from meshkit.sharding.mesh import build_mesh, describe_devices

pytestmark = pytest.mark.deviceless
TINY = "configs/experiments/mlp.toml"
ON_16 = ('cluster={ name = "dgx_h100", hosts = 2 }', "mesh={ data = { infiniband = 2 }, fsdp = 8 }")
PREDICTED = 'train.pgle="predicted"'
MIXTRAL = ("configs/experiments/mixtral_8x7b.toml", ("model.layers=4",))


@pytest.fixture(scope="module")
def plans():
    return [plan_experiment(load(TINY, (*ON_16, *more))) for more in ((), (PREDICTED,))]


@pytest.mark.parametrize("path", ["pipe", "/dev/zero"])
def test_costs_that_are_no_file_are_refused_before_the_compiler_waits_for_them(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    named = load(TINY, (*ON_16, f"xla.{PGLE_OPTION}={tmp_path / path}"))
    with pytest.raises(ConfigError, match=rf"xla.{PGLE_OPTION}(.|\n)*") as refused:
        plan_experiment(named)
    assert "not a regular file" in refused.value.message


def moved(report):
    found = Counter()
    for row in report.communication:
        found[row.collective, row.axes, row.dtype] += row.count * row.payload_bytes
    return found


def test_the_program_is_never_slower_and_does_the_same(plans):
    own, told = (p.report for p in plans)
    assert told.step.time_s <= own.step.time_s
    assert told.step.model_flops == own.step.model_flops
    assert moved(told) == moved(own)
    said = {o.name: o.value for o in told.program.options}
    assert said.get(PGLE_OPTION, "predicted") == "predicted"  # The option's value never says where the file lay.
    assert ".pbtxt" not in told.to_json()


@pytest.mark.slow
def test_all_to_alls_that_xla_leaves_exposed_are_hidden():
    """XLA's own estimate of Mixtral 8x7B's all-to-alls is too short."""
    own, told = (plan_experiment(load(MIXTRAL[0], (*MIXTRAL[1], *more))).report for more in ((), (PREDICTED,)))
    assert told.step.exposed_s < 0.8 * own.step.exposed_s
    assert told.step.time_s < own.step.time_s
    assert moved(told) == moved(own)
    assert {o.name: o.value for o in told.program.options}[PGLE_OPTION] == "predicted"


class OnGpus:
    """Stand in for a step lowered for real GPUs; its executables hold the module compiled for absent ones."""

    def __init__(self, module):
        self.module, self.asked, self.told = module, [], []

    def lower(self, *_):
        return self

    def compile(self, compiler_options):
        self.asked.append(compiler_options)
        if PGLE_OPTION in compiler_options:
            self.told.append(Path(compiler_options[PGLE_OPTION]).read_text())
        return SimpleNamespace(memory_analysis=lambda: None, runtime_executable=self.runtime_executable)

    def runtime_executable(self):
        return SimpleNamespace(
            hlo_modules=lambda: [SimpleNamespace(as_serialized_hlo_module_proto=lambda: self.module)]
        )


def test_train_asks_xla_again_with_the_same_prices(plans):
    own, _ = plans
    experiment = load(TINY, (*ON_16, PREDICTED))
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    gpus = OnGpus(own.compiled.module)
    program = replace(make_train_step(experiment, mesh), step=gpus)
    made = compile_step(program, experiment.cluster, experiment.placement, experiment.xla)
    assert [PGLE_OPTION in asked for asked in gpus.asked] == [False] + [True] * ROUNDS
    plain = [{k: v for k, v in asked.items() if k != PGLE_OPTION} for asked in gpus.asked]
    assert plain == [plain[0]] * len(plain)
    collectives = {i.name for body in own.schedule.computations.values() for i in body if i.collective}
    assert collectives
    assert all(f'name: "{name}"' in gpus.told[0] for name in collectives)
    assert made.options == plain[0]  # No program is faster than the first, so the first is taken.
    json.dumps(dict(made.options))


ENTRY = re.compile(
    r'opcode: "(.+?)".* dimensions: (\d+) .*(?:num_devices_per_group: (\d+)|source_target).*per_sec: (\d+)'
)


@pytest.mark.parametrize(
    ("name", "key"), [("dgx_h100", "sm_90"), ("dgx_b200", "sm_100_B200"), ("gb300_nvl72", "sm_103")]
)
def test_the_table_has_the_models_prices(name, key):
    cluster = Cluster.load(name)
    text = table_text(cluster)
    assert device_key(cluster) == key
    assert text.startswith(f'entries {{\n key: "{key}"')
    found = [ENTRY.search(line) for line in text.splitlines() if "opcode" in line]
    assert all(found)
    sizes: dict[tuple[str, int], list[int]] = {}
    for collective, elements, group, rate in (match.groups() for match in found if match):
        n = int(group or 2)
        payload = int(elements) * 4 * (n if collective == "reduce-scatter" else 1)
        sizes.setdefault((collective, n), []).append(payload)
        seconds = collective_time_s(collective, payload_bytes=payload, gpus_per_domain=n, cluster=cluster)
        assert payload / int(rate) == pytest.approx(seconds, rel=1e-3)
    gpus = cluster.gpus_used_per_domain
    assert {n for collective, n in sizes if collective == "all-to-all"} == {
        n for n in range(2, gpus + 1) if gpus % n == 0
    }
    for found_sizes in sizes.values():  # The nearest size is never further than half a step of a quarter octave.
        once = sorted(set(found_sizes))
        assert once[0] <= 4 * gpus
        assert once[-1] < 2**31
        assert all(after <= max(1.25 * size, size + 4 * gpus) for size, after in itertools.pairwise(once))


def test_xla_prices_collectives_by_the_table(monkeypatch, tmp_path):
    """XLA's scheduler logs the time that it assumes for a collective."""
    environment = compiler.child_environment
    loud = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "sol_latency_estimator=10"}
    monkeypatch.setattr(compiler, "child_environment", lambda: environment() | loud)
    monkeypatch.setattr(compiler.COMPILER, "use", lambda e: Child("meshkit.compile.child", e, tmp_path / "log"))
    monkeypatch.setenv("MESHKIT_CACHE", "off")
    plan = plan_experiment(
        load(TINY, ('cluster="dgx_h100"', "model.embed=1024", "model.mlp=4096", 'train.pgle="table"'))
    )
    log = (tmp_path / "log").read_text()
    said = {float(us) * 1e-6 for us in re.findall(r"Computed collective time for \S+: ([\d.]+) us", log)}
    cluster = Cluster.load("dgx_h100")
    prices = {
        collective_time_s(c.collective, payload_bytes=c.payload_bytes, gpus_per_domain=8, cluster=cluster)
        for body in plan.schedule.computations.values()
        for c in (i.collective for i in body)
        if c is not None
    }
    assert said
    for seconds in said:
        assert min(abs(seconds / price - 1) for price in prices) < 0.1
    assert {o.name: o.value for o in plan.report.program.options}[TABLE_OPTION] == "predicted"
    assert ".pbtxt" not in plan.report.to_json()


def test_a_table_that_xla_does_not_read_is_said(plans):
    schedule = plans[0].schedule
    assert unread(Cluster.load("dgx_h100"), schedule) == ()
    assert "Hopper and Blackwell alone, not for NVIDIA A100" in unread(Cluster.load("dgx_a100"), schedule)[0]
    (body,) = (b for name, b in schedule.computations.items() if name == schedule.entry)
    ragged = replace(
        next(i for i in body if i.collective),
        collective=replace(next(i.collective for i in body if i.collective), collective="ragged-all-to-all"),
    )
    other = replace(schedule, computations={schedule.entry: (*body, ragged)})
    assert "in a program with ragged-all-to-all" in unread(Cluster.load("dgx_h100"), other)[0]


def test_a_table_of_ones_own_and_that_of_prices_are_one_too_many():
    with pytest.raises(ConfigError, match="asks for predicted latencies, but"):
        load(TINY, ('train.pgle="table"', f'xla.{TABLE_OPTION}="mine.pbtxt"'))
