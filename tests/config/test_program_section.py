"""Test `[program]`: what a file may say that names a user's own training step."""

import re

import pytest

import meshkit as mk
from meshkit.config.experiment import ProgramExperiment, load, load_any
from meshkit.config.sections import PGLE_OPTION

FILE = """
cluster = { name = "dgx_h100", hosts = 2 }

[mesh]
data = { infiniband = 2 }
fsdp = 8

[program]
make = "my_steps:make"
options = { layers = 8 }
"""


@pytest.fixture
def write(tmp_path):
    def one(text=FILE, more=""):
        path = tmp_path / "mine.toml"
        path.write_text(text + more)
        return path

    return one


def test_it_is_read_overridden_and_written_back(write):
    experiment = load_any(write(more="[train]\ntokens_total = 1_000\n"), ["program.options.layers=16"])
    assert isinstance(experiment, ProgramExperiment)
    assert (experiment.program.make, experiment.program.options) == ("my_steps:make", {"layers": 16})
    assert (experiment.train.tokens_total, experiment.train.memory_fraction) == (1000, 0.92)
    path = experiment.path
    assert path is not None
    path.write_text(experiment.to_toml())
    assert load_any(path) == experiment


@pytest.mark.parametrize(
    ("more", "key", "message"),
    [
        ('[model]\nclass = "a:B"\n', "model", r"\[model\] configures meshkit's training step"),
        ("[optimizer]\nclip = 1.0\n", "optimizer", r"\[optimizer\] configures meshkit's training step"),
        ("[data]\nseed = 1\n", "data", r"\[data\] configures meshkit's training step"),
        ("[train]\nglobal_batch = 8\n", "train.global_batch", r"train.global_batch configures meshkit's training step"),
        ("[train]\nmemory = 8\n", "train.memory", "unknown key"),
        ("[train]\nmemory_fraction = 2\n", "train.memory_fraction", "must be at most 1"),
    ],
)
def test_what_belongs_to_meshkits_step_is_refused_at_its_key(write, more, key, message):
    with pytest.raises(mk.ConfigError, match=message) as error:
        load_any(write(more=more))
    assert re.search(rf"mine\.toml:\d+: \[?{re.escape(key)}", str(error.value))


def test_predicted_latencies_beside_measured_ones_are_refused(write):
    with pytest.raises(mk.ConfigError, match=r"asks for predicted latencies, but .* names measured ones"):
        load_any(write(more='[train]\npgle = "predicted"\n'), [f'xla.{PGLE_OPTION}="a.pbtxt"'])


@pytest.mark.parametrize("broken", ['make = "my_steps"', "make = 3", 'make = "my_steps:make"\nmakes = 1'])
def test_a_mistake_in_the_section_is_told_at_its_key(write, broken):
    with pytest.raises(mk.ConfigError, match=r"mine\.toml:(9|10): program\.make"):
        load_any(write(FILE.replace('make = "my_steps:make"', broken)))


def test_what_runs_meshkits_own_step_says_how_to_launch_a_script(write):
    with pytest.raises(mk.ConfigError, match=r"\[program\] names a training step of your own") as error:
        load(write())
    assert "meshkit launch local -- python train.py" in str(error.value)


def test_a_secret_among_the_options_is_refused(write):
    with pytest.raises(mk.ConfigError, match="is named like a secret"):
        load_any(write(FILE.replace("layers = 8", 'api_token = "abc"')))
