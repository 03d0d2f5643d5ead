"""Test that a calibration file is read back as written, that faults are named, and that the nearest group is found."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.config.calibration import COLLECTIVES, Calibration, Fit, MeasuredOn, Rates, load, write
from meshkit.config.cluster import Cluster
from meshkit.errors import ConfigError
from meshkit.predict.network import collective_time_s

MACHINE = MeasuredOn(
    gpu="h100_sxm",
    scale_up="nvlink",
    fabric="infiniband",
    devices=16,
    date="2026-11-21T10:00:00+00:00",
    jax="0.12.0",
    jaxlib="0.12.0",
)
GOOD = """\
schema = "meshkit.calibration/1"

[measured_on]
gpu = "cpu"
scale_up = "shared_memory"
devices = 8
date = "2026-11-21"
jax = "0.12.0"
jaxlib = "0.12.0"

[rates]
memory_bytes_per_s = 1e10
matmul_flops_per_s = { fp32 = 1e11 }

[[fit]]
link = "nvlink"
collective = "all-reduce"
gpus_per_domain = 4
domains = 1
latency_s = 1e-5
bytes_per_s = 1e9
residual_median = 0.1
points = 9
"""


def make_fit(**changes) -> Fit:
    values = {
        "link": "nvlink",
        "collective": "all-reduce",
        "gpus_per_domain": 8,
        "domains": 1,
        "latency_s": 2e-5,
        "bytes_per_s": 4e11,
        "residual_median": 0.05,
        "points": 10,
    }
    return Fit(**{**values, **changes})


positive = st.floats(1e-9, 1e15)
fits = st.builds(
    Fit,
    link=st.sampled_from(["nvlink", "infiniband"]),
    collective=st.sampled_from(COLLECTIVES),
    gpus_per_domain=st.integers(2, 72),
    domains=st.integers(1, 1024),
    latency_s=st.floats(0, 1),
    bytes_per_s=positive,
    residual_median=st.floats(0, 10),
    points=st.integers(2, 40),
)
rates = st.builds(
    Rates,
    matmul_flops_per_s=st.dictionaries(st.sampled_from(["fp32", "tf32", "bf16", "fp16"]), positive),
    attention_flops_per_s=st.dictionaries(st.sampled_from(["forward", "backward"]), positive),
    memory_bytes_per_s=st.none() | positive,
)


@given(
    st.lists(fits, max_size=6, unique_by=lambda f: (f.link, f.collective, f.gpus_per_domain, f.domains)),
    st.none() | st.just(MACHINE),
    rates,
)
def test_what_is_written_is_read_back(tmp_path_factory, some, machine, found):
    made = Calibration(tuple(some), machine, found)
    path = write(tmp_path_factory.getbasetemp() / "calibration.toml", made)
    assert load(path) == made


def test_the_exact_group_shape_comes_first():
    exact = make_fit(gpus_per_domain=8, domains=2, link="infiniband", latency_s=7e-5)
    other = make_fit(gpus_per_domain=4, domains=4, link="infiniband")
    assert Calibration((other, exact)).find("infiniband", "all-reduce", 8, 2) == exact


@pytest.mark.parametrize(
    ("asked", "found"),
    [((2, 1), 2), ((3, 1), 4), ((4, 1), 4), ((6, 1), 8), ((16, 1), 8), ((8, 4), 8)],
)
def test_else_the_nearest_group_size_by_ratio(asked, found):
    known = Calibration(tuple(make_fit(gpus_per_domain=n) for n in (2, 4, 8)))
    fit = known.find("nvlink", "all-reduce", *asked)
    assert fit is not None
    assert fit.gpus_per_domain == found


def test_of_one_size_the_nearest_number_of_domains():
    known = Calibration(tuple(make_fit(link="infiniband", gpus_per_domain=g, domains=16 // g) for g in (1, 2, 8)))
    fit = known.find("infiniband", "all-reduce", 4, 4)
    assert fit is not None
    assert fit.domains in (2, 8)


def test_nothing_alike_is_none():
    known = Calibration((make_fit(),))
    assert known.find("infiniband", "all-reduce", 8, 1) is None
    assert known.find("nvlink", "all-gather", 8, 1) is None


def test_the_network_model_reads_it_through_the_cluster(tmp_path):
    fit = make_fit(gpus_per_domain=8, latency_s=3e-5, bytes_per_s=1e11)
    path = write(tmp_path / "calibration.toml", Calibration((fit,), MACHINE))
    cluster = Cluster.load("dgx_h100", hosts=1, calibration=str(path))
    payload = 2**26
    seconds = collective_time_s("all-reduce", payload_bytes=payload, gpus_per_domain=8, cluster=cluster)
    assert seconds == pytest.approx(fit.time_s(2 * 7 / 8 * payload))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("meshkit.calibration/1", "meshkit.calibration/9", r"calibration\.toml:1: schema.*\n.*meshkit\.calibration/1"),
        ('schema = "meshkit.calibration/1"', "", "this version of meshkit cannot read this calibration file"),
        ("[[fit]]", "[[fits]]", r"unknown key 'fits'.*\n.*\n.*'fit'"),
        ("latency_s = 1e-5", "latency = 1e-5", r"unknown key 'latency'.*\n.*calibration\.toml:20.*\n.*'latency_s'"),
        ("latency_s = 1e-5", "", "has no 'latency_s'"),
        ("latency_s = 1e-5", "latency_s = -1.0", "latency_s must be at least 0"),
        ("latency_s = 1e-5", 'latency_s = "fast"', "latency_s must be a number, not the string"),
        ("bytes_per_s = 1e9", "bytes_per_s = 0.0", "bytes_per_s must be greater than 0"),
        ("bytes_per_s = 1e9", "bytes_per_s = inf", "not a finite number"),
        ("bytes_per_s = 1e9", "bytes_per_s = nan", "not a finite number"),
        ('link = "nvlink"', 'link = "ethernet"', "link must be one of nvlink, infiniband"),
        ('collective = "all-reduce"', 'collective = "allreduce"', "must be one of .*all-reduce"),
        ("gpus_per_domain = 4", "gpus_per_domain = 0", "gpus_per_domain must be greater than 0"),
        ("gpus_per_domain = 4", "gpus_per_domain = 4.5", "gpus_per_domain must be an integer"),
        ("gpus_per_domain = 4", "gpus_per_domain = 1", "a group must have at least 2 GPUs"),
        ("points = 9", "points = true", "points must be an integer"),
        ("fp32 = 1e11", "fp31 = 1e11", "rates.matmul_flops_per_s"),
        ("devices = 8", "devices = -8", "measured_on.devices must be greater than 0"),
        ("points = 9", "points = 9\npoints = 9", "given twice"),
        ("[measured_on]", "[measured_on", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path, old, new, match):
    assert old in GOOD
    path = tmp_path / "calibration.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=match) as caught:
        load(path)
    assert re.search(r"calibration\.toml", caught.value.at or "")
    assert caught.value.hint


def test_two_fits_of_one_shape_are_refused(tmp_path):
    path = tmp_path / "calibration.toml"
    path.write_text(GOOD + GOOD[GOOD.index("\n[[fit]]") :])
    with pytest.raises(ConfigError, match="two fits of all-reduce on nvlink over 1 domains x 4 GPUs"):
        load(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no such calibration file"):
        load(tmp_path / "none.toml")
