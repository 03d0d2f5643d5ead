"""Test that benchmarks/third_party shards models of the Flax repository, unedited, and models of other kinds.

The models of Flax need a checkout of https://github.com/google/flax, named by MESHKIT_FLAX_REPO.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.third_party.__main__ import row_of

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "third_party"
CHECKOUT = os.environ.get("MESHKIT_FLAX_REPO")
# Each bound is the largest difference of a gradient, relative to the largest entry of its leaf. lm1b sums at most 2048
# terms (its MLP) in 40 steps one after the other: sqrt(40 * 2048) 2^-24 = 1.7e-5. ResNet-50 divides 53 times by the
# deviation of batches of few pixels, which multiplies rounding errors, so its bound is 200 times the measured error.
LARGEST = {"lm1b_transformer": 1.7e-5, "imagenet_resnet50": 1e-3}

QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@pytest.mark.parametrize("name", LARGEST)
def test_a_script_has_under_15_lines_of_code(name):
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if line and not line.startswith(("#", '"""'))]) < 15


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="needs a checkout of the Flax repository: MESHKIT_FLAX_REPO=PATH")
@pytest.mark.parametrize(("name", "largest"), LARGEST.items(), ids=LARGEST)
def test_the_sharded_model_equals_the_whole_one_in_an_eighth_of_the_memory(name, largest):
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), str(CHECKOUT)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_COMPILE}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    before, after = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:bytes before|after\n)", result.stdout))
    assert after < before / 7
    assert float(re.findall(r"largest difference (\S+)", result.stdout)[0]) < largest


def check(row):
    _, lines, loss, difference, measured, planned, *_ = row
    assert int(lines) <= 15
    assert float(loss) > 0
    assert float(difference) < 1e-4
    assert measured.startswith("3 steps, ")
    assert "all-" in planned


@pytest.mark.deviceless
def test_a_model_with_flaxs_own_names_and_constraints_is_sharded_trained_profiled_and_planned():
    check(row_of("logical", Path("-")))


@pytest.mark.deviceless
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="keras is not installed")
def test_a_model_of_keras_is_sharded_trained_profiled_and_planned():
    check(row_of("keras", Path("-")))


# Each of these models is named after the package that it needs.
PACKAGES = ("grain", "haiku", "equinox", "transformers")
SLOW = ("unet", "lstm", "schedule_free", "multi_transform", "diffusion_transformer", *PACKAGES)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["ema", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_model_of_another_kind_is_cut_by_path_trained_profiled_and_planned(name):
    if name in PACKAGES:
        pytest.importorskip(name)
    row = row_of(name)  # row_of stops where a weight or a moment is not sharded as the rules say.
    check(row)
    check_cut(row)


def check_cut(row):
    before, after = (int(number.replace(",", "")) for number in row[-1].split(" to "))
    assert after < before / 3
    assert not {"placed_otherwise", "rule_never_used", "state_drifts"} & set(row[-2].split(", "))


def test_the_table_of_other_kinds_is_whole():
    rows = [line.strip("| ").split(" | ") for line in (SCRIPTS / "kinds.md").read_text().splitlines()[-10:]]
    for row in rows:
        check(row)
        check_cut(row)
    assert len({row[0] for row in rows}) == 10


def test_the_table_of_ten_is_whole():
    rows = (SCRIPTS / "models.md").read_text().splitlines()[-10:]
    for row in rows:
        check(row.strip("| ").split(" | "))
    assert len({row.split(" | ")[0] for row in rows}) == 10


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="needs a checkout of the Flax repository: MESHKIT_FLAX_REPO=PATH")
@pytest.mark.parametrize("name", ["gemma", "mnist", "scan", "own_step", "lm1b", "wmt", "imagenet", "explicit"])
def test_a_model_of_others_is_sharded_trained_profiled_and_planned(name):
    check(row_of(name, Path(str(CHECKOUT))))
