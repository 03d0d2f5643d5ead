"""Intervals of a step time: which published runs are behind one, what widens it, and what a thin stratum says."""

import math

import numpy as np
import pytest

from benchmarks.published.intervals import Residual, coverage_text, law_of, main, read_residuals, table_text, ways_text
from meshkit.config import catalog
from meshkit.predict.interval import Law, enough, step_interval, stratum_of

H100, B200, A100 = (catalog.gpu(key) for key in ("h100_sxm", "b200", "a100_80gb"))


def residuals(ratios, source="page", idle=0.0, stratum=None):
    stratum, shares = stratum or stratum_of(H100, "bf16", False), [idle] * len(ratios) if np.isscalar(idle) else idle
    return [Residual(x, source, (source, str(i)), stratum, s) for i, (x, s) in enumerate(zip(ratios, shares))]


def drawn(seed, groups=60, sources=6, slope=4.0):
    """Runs whose errors are 2 % of a Laplace distribution where tensor cores always work, and `slope` times as much
    where they never do."""
    rng = np.random.default_rng(seed)
    idle = rng.uniform(0.05, 0.7, groups)
    ratios = np.exp(0.03 + 0.02 * (1 + slope * idle) * rng.laplace(size=groups))
    parts = [(f"page{n}", slice(n, None, sources)) for n in range(sources)]
    return [r for name, part in parts for r in residuals(ratios[part].tolist(), name, idle[part].tolist())]


def table_row(text, name):
    return [cell.strip() for cell in next(x for x in text.splitlines() if x.startswith(f"| {name} |")).split("|")]


@pytest.mark.parametrize("gpu", [A100, H100])
def test_dense_runs_of_older_gpus_are_calibrated(gpu):
    found = step_interval(1.0, stratum_of(gpu, "bf16", False), 0.2)
    assert found is not None
    assert found.calibrated
    assert 0.5 < found.p80_s[0] <= found.p50_s[0] < found.p50_s[1] <= found.p80_s[1] < 2.0


@pytest.mark.parametrize(("gpu", "experts", "kind"), [(B200, False, "dense"), (H100, True, "experts")])
def test_a_thin_stratum_has_the_interval_of_its_kind_and_says_so(gpu, experts, kind):
    found = step_interval(2.0, stratum_of(gpu, "bf16", experts), 0.25)
    row = next(row for row in catalog.measured_table("intervals.csv") if row["stratum"] == kind)
    assert found is not None
    assert (found.calibrated, found.rows) == (False, int(row["rows"]))
    half = float(row["q80"]) * (1 + float(row["slope"]) / 4)
    assert found.p80_s == pytest.approx([2 * math.exp(float(row["middle"]) + sign * half) for sign in (-1, 1)])


def test_a_slope_widens_a_step_with_few_matmuls():
    narrow, wide = (Law(0.02, 4.0, {0.8: 0.05}).ends(idle, 0.8) for idle in (0.1, 0.6))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_what_calibrates_a_stratum():
    assert enough(20, 3)
    assert not enough(19, 9)
    assert not enough(99, 2)  # of one publisher and another: nothing is known of a third


@pytest.mark.parametrize("groups", [9, 19, 39, 99])
def test_the_quantile_is_that_of_one_group_more(groups):
    """Of n groups, the k-th has k / (n + 1) of another one below it: k is 0.8 (n + 1), and the last where that is n."""
    law = law_of(residuals([math.exp(n) for n in range(groups)]), slopes=(0.0,))
    off = sorted(abs(n - law.middle) for n in range(groups))
    assert law.quantiles[0.8] == pytest.approx(off[math.ceil(0.8 * (groups + 1)) - 1])


def test_a_group_weighs_one_however_many_rows_it_has():
    dense = stratum_of(H100, "bf16", False)
    many = [Residual(1.5, "page", ("page", "same"), dense, 0.0) for _ in range(100)]
    law = law_of([*residuals([0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3]), *many])
    assert math.exp(law.middle) == 1.1
    assert law.quantiles[0.5] == pytest.approx(math.log(1.25 / 1.1))  # the sixth of ten groups


def test_the_scale_is_found_and_one_more_run_lies_inside_as_often_as_promised():
    """A known scale: of new runs, 80 % and at most 1 / (n + 1) more lie inside, those of a long idle time too."""
    inside, slopes = [], []
    for seed in range(60):
        law = law_of(drawn(seed), slopes=range(11))
        slopes.append(law.slope)
        for r in drawn(1000 + seed):
            low, high = law.ends(r.tensor_idle, 0.8)
            inside.append((r.tensor_idle > 0.5, low <= r.ratio <= high))
    assert 2.0 <= np.median(slopes) <= 8.0
    assert np.mean([x for _, x in inside]) == pytest.approx(0.8, abs=0.03)
    assert np.mean([x for idle, x in inside if idle]) == pytest.approx(0.8, abs=0.05)


def test_a_scale_beats_one_quantile_where_there_is_one_and_costs_little_where_there_is_none():
    def scores(slope):
        text = ways_text(drawn(7, groups=240, slope=slope))
        names = ("one quantile around the middle", "the same, by `tensor_idle`")
        return [float(table_row(text, name)[8]) for name in names]

    flat, scaled = scores(8.0)
    assert scaled < 0.97 * flat
    flat, scaled = scores(0.0)
    assert scaled < 1.03 * flat


def test_a_source_is_judged_by_the_others():
    """A quarter of all groups is far off and of one source: without it the others' quantile does not know of them."""
    found = [*drawn(1), *residuals([3.0] * 20, "off", 0.2)]
    row = table_row(coverage_text(found), "dense")
    assert row[5:7] == [f"{60 / 80:.0%}", f"{6 / 7:.0%}"], "none of the 20 inside, and all others"


def test_the_table_has_numbers_by_kind_and_counts_by_stratum():
    experts = residuals([1.5, 2.0, 1.2], "page0", 0.3, stratum_of(B200, "fp8", True))
    lines = table_text([*drawn(3), *experts]).splitlines()[3:]
    assert [line.partition(",6")[0].partition(",3")[0] for line in lines] == [
        "dense", '"dense, hopper, 16 bit"', "experts", '"experts, blackwell, 8 bit"',
    ]  # fmt: skip
    assert [len([x for x in line.rsplit(",", 4)[1:] if x]) for line in lines] == [4, 0, 4, 0]
    dense, _, few, _ = (line.split(",") for line in lines)
    assert dense[4:6] == few[4:6], "the scale of experts is that of dense runs"
    assert float(few[7]) > float(dense[7])


def test_the_command_writes_the_table_and_refuses_details_of_an_older_replay(tmp_path, monkeypatch, capsys):
    details, rows, out = (tmp_path / name for name in ("details.csv", "rows.csv", "intervals.csv"))
    monkeypatch.setattr("benchmarks.published.intervals.OUT", out)
    rows.write_text("id,source,model\na,MaxText page,m\nb,Other page,m\n")
    head, row = "id,family,precision,gpu,predicted_s,measured_s,tensor_idle", "MaxText,bf16,h100_sxm,1.0"
    details.write_text(f"{head}\na,{row},1.1,0.2\nb,{row},1.2,0.3\nb,{row},,0.3\n")
    options = ["--details", str(details), "--rows", str(rows)]
    assert main([*options, "--check"]) == 0
    assert not out.exists()
    assert main(options) == 0
    assert out.read_text() == table_text(read_residuals(details, rows))
    assert out.read_text().splitlines()[3].startswith("dense,2,2,2,0.0953,")
    details.write_text("id,predicted_s,measured_s\na,1.0,1.0\n")
    assert main(options) == 2
    assert "has no column 'tensor_idle': replay the runs again" in capsys.readouterr().err
