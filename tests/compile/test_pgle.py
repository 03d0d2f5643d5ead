"""`train.pgle = "predicted"`: plan and train ask XLA again with plan's prices, and take the faster program."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshkit.compile.attached import compile_step
from meshkit.compile.choices import ROUNDS
from meshkit.config.experiment import load
from meshkit.config.sections import PGLE_OPTION
from meshkit.hlo.module import load_module
from meshkit.sharding.mesh import build_mesh, describe_devices
from meshkit.step.train_step import make_train_step
from meshkit.verbs.plan.planner import plan_experiment

pytestmark = pytest.mark.deviceless
TINY = "configs/experiments/mlp.toml"
ON_16 = ('cluster={ name = "dgx_h100", hosts = 2 }', "mesh={ data = { infiniband = 2 }, fsdp = 8 }")
PREDICTED = 'train.pgle="predicted"'
MIXTRAL = ("configs/experiments/mixtral_8x7b.toml", ("model.layers=4",))


@pytest.fixture(scope="module")
def plans():
    return [plan_experiment(load(TINY, (*ON_16, *more))) for more in ((), (PREDICTED,))]


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
    assert said.get(PGLE_OPTION, "predicted") == "predicted"  # never where the file lay
    assert ".pbtxt" not in told.to_json()


@pytest.mark.slow
def test_all_to_alls_that_xla_leaves_exposed_are_hidden():
    """Mixtral 8x7B: XLA thinks of them as short."""
    own, told = (plan_experiment(load(MIXTRAL[0], (*MIXTRAL[1], *more))).report for more in ((), (PREDICTED,)))
    assert told.step.exposed_s < 0.8 * own.step.exposed_s
    assert told.step.time_s < own.step.time_s
    assert moved(told) == moved(own)
    assert {o.name: o.value for o in told.program.options}[PGLE_OPTION] == "predicted"


class OnGpus:
    """A step lowered for real GPUs: executables of the module that was compiled for absent ones."""

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
        return SimpleNamespace(hlo_modules=lambda: [self.module])


def test_train_asks_xla_again_with_the_same_prices(plans):
    own, _ = plans
    experiment = load(TINY, (*ON_16, PREDICTED))
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    gpus = OnGpus(load_module(own.compiled.module))
    made = compile_step(replace(make_train_step(experiment, mesh), step=gpus), experiment)
    assert [PGLE_OPTION in asked for asked in gpus.asked] == [False] + [True] * ROUNDS
    plain = [{k: v for k, v in asked.items() if k != PGLE_OPTION} for asked in gpus.asked]
    assert plain == [plain[0]] * len(plain)
    collectives = {i.name for body in own.schedule.computations.values() for i in body if i.collective}
    assert collectives
    assert all(f'name: "{name}"' in gpus.told[0] for name in collectives)
    assert made.options == plain[0]  # no program is faster than the first, which is taken then
    json.dumps(dict(made.options))
