"""Intervals of a step time: which published runs are behind one, and what a thin stratum says."""

import pytest

from benchmarks.published.intervals import Residual, coverage_text, quantiles, table_text
from meshkit.config import catalog
from meshkit.predict.interval import enough, step_interval, stratum_of

H100, B200, A100 = (catalog.gpu(key) for key in ("h100_sxm", "b200", "a100_80gb"))


def residuals(ratios, source="page", stratum=None):
    stratum = stratum or stratum_of(H100, "bf16", False)
    return [Residual(x, source, (source, str(i)), stratum) for i, x in enumerate(ratios)]


@pytest.mark.parametrize("gpu", [A100, H100])
def test_dense_runs_of_older_gpus_are_calibrated(gpu):
    found = step_interval(1.0, stratum_of(gpu, "bf16", False))
    assert found is not None
    assert found.calibrated
    assert 0.5 < found.p80_s[0] <= found.p50_s[0] < found.p50_s[1] <= found.p80_s[1] < 2.0


@pytest.mark.parametrize(("gpu", "experts", "wider"), [(B200, False, "dense"), (H100, True, "experts")])
def test_a_thin_stratum_takes_the_next_wider_one_and_says_so(gpu, experts, wider):
    found = step_interval(2.0, stratum_of(gpu, "bf16", experts))
    row = next(row for row in catalog.measured_table("intervals.csv") if row["stratum"] == wider)
    assert found is not None
    assert (found.calibrated, found.rows) == (False, int(row["rows"]))
    assert found.p80_s == (2 * float(row["q10"]), 2 * float(row["q90"]))


def test_what_calibrates_a_stratum():
    assert enough(20, 3)
    assert not enough(19, 9)
    assert not enough(99, 2)  # of one publisher and another: nothing is known of a third


@pytest.mark.parametrize("groups", [9, 19, 39, 99])
def test_the_ends_are_those_of_one_group_more(groups):
    """Of n groups, the k-th from either end has k / (n + 1) of another one beyond it: k is (n + 1) / 10."""
    found = quantiles(residuals([float(n) for n in range(1, groups + 1)]))
    assert (found["q10"], found["q90"]) == ((groups + 1) // 10, groups + 1 - (groups + 1) // 10)


def test_a_group_weighs_one_however_many_rows_it_has():
    many = [Residual(1.5, "page", ("page", "same"), stratum_of(H100, "bf16", False)) for _ in range(100)]
    found = quantiles([*residuals([0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3]), *many])
    assert found["q25"] <= 1.0
    assert found["q90"] == 1.5


def test_the_table_has_every_width_and_coverage_leaves_a_source_out():
    found = [r for n in range(4) for r in residuals([1 + 0.01 * i for i in range(10)], f"page{n}")]
    names = [line.split(",16" if "16" in line else ",4")[0] for line in table_text(found).splitlines()[3:]]
    assert len(names) == 3
    assert "| dense, hopper, 16 bit | 40 | 40 |" in coverage_text(found)


def test_coverage_by_source_weighs_sources_alike():
    """The three of one group give the fourth an interval from 1.01 on; of them one lies outside of what it gives."""
    found = residuals([1 + 0.001 * i for i in range(60)], "many")
    for name, ratio in (("a", 1.01), ("b", 1.02), ("c", 3.0)):
        found += residuals([ratio], name)
    row = next(line for line in coverage_text(found).splitlines() if line.startswith("| dense |")).split("|")
    assert [row[n].strip() for n in (5, 6)] == [f"{52 / 63:.0%}", f"{(50 / 60 + 1 + 1 + 0) / 4:.0%}"]
