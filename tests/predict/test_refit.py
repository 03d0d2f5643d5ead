"""Test that refitting recovers one cluster's constants from noisy sweeps that were made with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from meshkit.config import calibration
from meshkit.config.calibration import Calibration
from meshkit.config.cluster import Cluster
from meshkit.errors import ConfigError
from meshkit.predict.refit import Sensitivity, network_constants, predicted_s, shipped_constants

H100 = Cluster.load("dgx_h100", hosts=4)
NOISE = 0.03  # This is the relative noise of a run.
# On this machine NVLink is 8 % slow and ports are 15 % slow, with slow launches, steps and NVLS.
TRUE = {
    "nvlink_rate": 0.92,
    "network_rate": 0.85,
    "kernel_s": 7e-6,
    "ll_step_s": 1.1e-6,
    "nvls_s": 38e-6,
    "net_ll_s": 22e-6,
    "p2p_s": 3e-6,
}
GROUPS = ((2, 1), (8, 1), (1, 4), (8, 2))
OTHER_GROUPS = ((4, 1), (8, 4), (2, 4))
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Made:
    """A row of bench."""

    collective: str
    gpus_per_domain: int
    domains: int
    size_bytes: int
    time_s: float


def sweep(groups, noise=NOISE):
    """Return every collective of 1 KiB to 4 GiB, as bench measures them, on the machine of TRUE."""
    random = np.random.default_rng(19)
    rows = [Made(kind, g, k, 4**n * 1024, 0.0) for kind in KINDS for g, k in groups for n in range(12)]
    return [replace(r, time_s=predicted_s(r, H100, TRUE) * np.exp(random.normal(0, noise))) for r in rows]


@pytest.fixture(scope="module")
def found():
    return network_constants(sweep(GROUPS), H100)


def test_a_machines_own_constants_are_found(found):
    """Each is found within four standard errors, which the noise leaves open in the linear problem."""
    rows, start = sweep(GROUPS, noise=0.0), shipped_constants(H100)
    true = {**start, **TRUE}
    here = Sensitivity.measure(
        lambda values: [predicted_s(row, H100, values) for row in rows], [row.time_s for row in rows], true, rows
    )
    spoken = np.abs(here.slopes).max(0) > 1e-6
    slopes = here.slopes[:, spoken]
    spread = NOISE * np.sqrt(np.pi / 2 * np.diag(np.linalg.pinv(slopes.T @ slopes)))
    names = [name for name, one in zip(here.names, spoken, strict=True) if one]
    errors = {name: np.log(found.constants[name] / true[name]) for name in names}
    tolerance = dict(zip(names, 4 * spread, strict=True))
    sharp = [name for name in names if tolerance[name] < 0.25]
    assert {"nvlink_rate", "network_rate", "kernel_s", "net_ll_s"} <= set(sharp)
    assert {name: errors[name] for name in sharp if abs(errors[name]) > tolerance[name]} == {}


def test_the_error_falls_to_the_noise(found):
    assert found.points == len(KINDS) * len(GROUPS) * 12
    assert found.error_before > 0.08
    assert found.error_after < 1.2 * 0.6745 * NOISE  # 0.6745 is the median of |normal|.


def test_a_plan_prices_groups_that_were_not_measured_by_them(found, tmp_path):
    path = calibration.write(tmp_path / "calibration.toml", Calibration((), network=found))
    assert calibration.load(path).network == found
    cluster = Cluster.load("dgx_h100", hosts=4, calibration=str(path))
    rows = sweep(OTHER_GROUPS, noise=0.0)
    shipped, own = (
        np.median([abs(predicted_s(row, where) / row.time_s - 1) for row in rows]) for where in (H100, cluster)
    )
    assert shipped > 0.08
    assert own < NOISE
    assert predicted_s(rows[0], cluster, {"kernel_s": 1.0}) > 1  # A refit goes by the constants that it is given.


def test_nothing_is_made_of_a_few_rows():
    assert network_constants(sweep(GROUPS)[:5], H100) is None
    assert network_constants(sweep(GROUPS), Cluster.load("cpu8")) is None


def test_a_constant_that_the_model_has_not(tmp_path):
    path = tmp_path / "calibration.toml"
    text = 'schema = "meshkit.calibration/1"\n[network]\npoints = 9\nerror_before = 0.1\nerror_after = 0.1\n'
    path.write_text(text + "constants = { kernels = 1e-6 }\n")
    cluster = Cluster.load("dgx_h100", calibration=str(path))
    with pytest.raises(ConfigError, match="'kernels', which is not a constant of the network model"):
        predicted_s(Made("all-reduce", 8, 1, 1024, 0.0), cluster)
    path.write_text(text + "constants = { kernel_s = -1e-6 }\n")
    with pytest.raises(ConfigError, match="must be greater than 0"):
        calibration.load(path)
