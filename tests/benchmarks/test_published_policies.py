"""What a row says of recomputation, precision and machines, as an experiment; what is not known is not replayed."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.published.experiments import Run, resolve
from benchmarks.published.rows import read_rows

ROWS = {row.id: row for row in read_rows(Path(__file__).parents[1] / "data" / "published_runs.csv")}


def changed(name, **values):
    row = ROWS[name]
    return dataclasses.replace(row, text={**row.text, **values})


@pytest.mark.parametrize(
    ("words", "remat"),
    [
        ("save_qkv_proj", ["query", "key", "value"]),
        ("save_out_proj", ["output"]),
        ("save_dot_except_mlp", ["query", "key", "value", "output"]),
        ("save_dot_except_mlpwi", ["query", "key", "value", "output", "down"]),
        ("minimal_offloaded", "offload_dots"),
        ("qkv_proj_offloaded", {"keep": [], "offload": ["query", "key", "value"]}),
        ("minimal_with_context", ["query", "key", "value", "output", "gate", "up", "down", "attention"]),
    ],
)
def test_maxtexts_policies(words, remat):
    run = resolve(changed("maxtext-llama2-70b-bf16-64", recompute=words))
    assert isinstance(run, Run)
    assert run.document["train"]["remat"] == remat


def test_an_unknown_policy_and_a_blank_precision_are_not_replayed():
    unknown = changed("maxtext-llama2-70b-bf16-64", recompute="save_something")
    assert "'save_something' is not a policy" in str(resolve(unknown))
    assert "precision is not stated" in str(resolve(changed("maxtext-llama2-70b-bf16-64", precision="")))


@pytest.mark.parametrize(
    ("name", "handling"),
    [("maxtext-llama2-70b-bf16-64", "none"), ("tt-8b-fsdp8-eager", "adjusted"), ("internevo-7b-tp1-z8-8", "stage")],
)
def test_handling_says_what_a_users_plan_does_not_get(name, handling):
    run = resolve(ROWS[name])
    assert isinstance(run, Run)
    assert run.handling == handling
