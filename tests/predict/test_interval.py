"""Intervals of a step time: which published runs are behind one, what one is made of, and what a thin stratum says."""

import math

import numpy as np
import pytest

from benchmarks.published.intervals import (
    Residual,
    apart_of,
    coverage_text,
    law_of,
    main,
    pairs_of,
    pairs_text,
    read_residuals,
    table_text,
)
from meshkit.config import catalog
from meshkit.predict.interval import enough, step_interval, stratum_of

H100, B200, A100 = (catalog.gpu(key) for key in ("h100_sxm", "b200", "a100_80gb"))


def residuals(ratios, source="page", stratum=None):
    stratum = stratum or stratum_of(H100, "bf16", False)
    return [Residual(x, source, (source, str(i)), stratum) for i, x in enumerate(ratios)]


def drawn(seed, groups=60, sources=6):
    """Runs whose errors are 5 % of a Laplace distribution."""
    ratios = np.exp(0.03 + 0.05 * np.random.default_rng(seed).laplace(size=groups))
    return [r for n in range(sources) for r in residuals(ratios[n::sources].tolist(), f"page{n}")]


def table_row(text, name):
    return [cell.strip() for cell in next(x for x in text.splitlines() if x.startswith(f"| {name} |")).split("|")]


@pytest.mark.parametrize("gpu", [A100, H100])
def test_dense_runs_of_older_gpus_are_calibrated(gpu):
    found = step_interval(1.0, stratum_of(gpu, "bf16", False))
    assert found is not None
    assert found.calibrated
    assert 0.5 < found.p80_s[0] <= found.p50_s[0] < found.p50_s[1] <= found.p80_s[1] < 2.0


@pytest.mark.parametrize(("gpu", "experts", "kind"), [(B200, False, "dense"), (H100, True, "experts")])
def test_a_thin_stratum_has_the_interval_of_its_kind_and_says_so(gpu, experts, kind):
    found = step_interval(2.0, stratum_of(gpu, "bf16", experts))
    row = next(row for row in catalog.measured_table("intervals.csv") if row["stratum"] == kind)
    assert found is not None
    assert (found.calibrated, found.rows) == (False, int(row["rows"]))
    ends = [2 * math.exp(float(row["middle"]) + sign * float(row["q80"])) for sign in (-1, 1)]
    assert found.p80_s == pytest.approx(ends)


def test_what_calibrates_a_stratum():
    assert enough(20, 3)
    assert not enough(19, 9)
    assert not enough(99, 2)  # of one publisher and another: nothing is known of a third


@pytest.mark.parametrize("groups", [9, 19, 39, 99])
def test_the_quantile_is_that_of_one_group_more(groups):
    """Of n groups, the k-th has k / (n + 1) of another one below it: k is 0.8 (n + 1), and the last where that is n."""
    law = law_of(residuals([math.exp(n) for n in range(groups)]))
    off = sorted(abs(n - law.middle) for n in range(groups))
    assert law.quantiles[0.8] == pytest.approx(off[math.ceil(0.8 * (groups + 1)) - 1])


def test_a_group_weighs_one_however_many_rows_it_has():
    dense = stratum_of(H100, "bf16", False)
    many = [Residual(1.5, "page", ("page", "same"), dense) for _ in range(100)]
    law = law_of([*residuals([0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3]), *many])
    assert math.exp(law.middle) == 1.1
    assert law.quantiles[0.5] == pytest.approx(math.log(1.25 / 1.1))  # the sixth of ten groups


def test_one_more_run_lies_inside_as_often_as_promised():
    """Of new runs, 80 % and at most 1 / (n + 1) more."""
    inside = []
    for seed in range(60):
        low, high = law_of(drawn(seed)).ends(0.8)
        inside += [low <= r.ratio <= high for r in drawn(1000 + seed)]
    assert np.mean(inside) == pytest.approx(0.8, abs=0.03)


def test_a_source_is_judged_by_the_others():
    """A quarter of all groups is far off and of one source: without it the others' quantile does not know of them."""
    found = [*drawn(1), *residuals([3.0] * 20, "off")]
    row = table_row(coverage_text(found), "dense")
    assert row[5:7] == [f"{60 / 80:.0%}", f"{6 / 7:.0%}"], "none of the 20 inside, and all others"


def test_a_group_of_two_gpus_weighs_one_in_the_stratum_of_each():
    hopper, ampere = (stratum_of(gpu, "bf16", False) for gpu in (H100, A100))
    mixed = [Residual(3.0, "off", ("off", "mixed"), stratum) for stratum in (ampere, hopper, hopper, hopper)]
    found = [*drawn(1), *mixed, Residual(1.03, "off", ("off", "plain"), ampere)]
    assert table_row(coverage_text(found), "dense, ampere, 16 bit")[5] == "50%"


def test_the_table_has_numbers_by_kind_and_counts_by_stratum():
    experts = residuals([1.5, 2.0, 1.2], "page0", stratum_of(B200, "fp8", True))
    lines = table_text([*drawn(3), *experts]).splitlines()[3:]
    assert [line.partition(",6")[0].partition(",3")[0] for line in lines] == [
        "dense", '"dense, hopper, 16 bit"', "experts", '"experts, blackwell, 8 bit"',
    ]  # fmt: skip
    assert [len([x for x in line.rsplit(",", 3)[1:] if x]) for line in lines] == [3, 0, 3, 0]
    dense, _, few, _ = (line.split(",") for line in lines)
    assert dense[4] == few[4], "the middle of experts is that of dense runs"
    assert float(few[6]) > float(dense[6])


def test_two_runs_of_one_model_are_a_pair_where_gpus_and_batch_are_the_same():
    """Of the three in one group on 8 GPUs, three pairs weigh one; the run on 16 is in none, nor is another page's."""
    dense = stratum_of(H100, "bf16", False)
    runs = [(1.0, "a", "8"), (1.1, "a", "8"), (1.21, "a", "8"), (3.0, "a", "16"), (1.0, "b", "8"), (1.05, "b", "8")]
    found = [Residual(ratio, source, (source,), dense, (gpus,)) for ratio, source, gpus in runs]
    pairs = pairs_of(found)
    assert sorted(round(r.ratio, 4) for r in pairs) == [1.05, 1.1, 1.1, 1.21]
    assert math.exp(apart_of(pairs)[0.5]) == pytest.approx(1.1), "1.05 of the other group, then a third of this one"
    assert table_text(found).splitlines()[-1] == "two runs of one model,2,2,4,,0.0953,0.1906"
    assert pairs_text(found).startswith("two runs of one model: 4 of 2 groups of 2 sources: 9.5% for 50% (covers 50%)")


def test_the_command_writes_the_table_and_refuses_details_of_an_older_replay(tmp_path, monkeypatch, capsys):
    details, rows, out = (tmp_path / name for name in ("details.csv", "rows.csv", "intervals.csv"))
    monkeypatch.setattr("benchmarks.published.intervals.OUT", out)
    rows.write_text("id,source,model\na,MaxText page,m\nb,Other page,m\n")
    head, row = "id,family,precision,gpu,num_gpus,predicted_s,measured_s", "MaxText,bf16,h100_sxm,8,1.0"
    details.write_text(f"{head}\na,{row},1.1\nb,{row},1.2\nb,{row},\n")
    options = ["--details", str(details), "--rows", str(rows)]
    assert main([*options, "--check"]) == 0
    assert not out.exists()
    assert main(options) == 0
    assert out.read_text() == table_text(read_residuals(details, rows))
    assert out.read_text().splitlines()[3].startswith("dense,2,2,2,0.0953,")
    details.write_text("id,predicted_s,measured_s\na,1.0,1.0\n")
    assert main(options) == 2
    assert "has no column 'family': replay the runs again" in capsys.readouterr().err
