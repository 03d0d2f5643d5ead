"""Test intervals of a step time: their parts, their coverage of runs left out, and the reasons for having none."""

import csv
import math

import pytest

from benchmarks.published.intervals import (
    OUT,
    Residual,
    left_out,
    main,
    quantile,
    read_own,
    read_residuals,
    table_text,
)
from meshkit.config import catalog
from meshkit.predict.interval import LEVELS, least_groups, step_interval, stratum_of

H100, B200 = (catalog.gpu(key) for key in ("h100_sxm", "b200"))
DENSE = stratum_of(H100, "bf16", False)
TABLE = {DENSE.name: {"groups": "10", "publishers": "2", "rows": "30", "q50": "0.05", "q80": "0.1"}}


def residuals(errors, stratum=DENSE.name, publisher="p"):
    """Return one group for each error."""
    return [Residual(str(i), error, (publisher, str(i)), publisher, stratum) for i, error in enumerate(errors)]


def test_an_interval_lies_around_the_predicted_step():
    found, reason = step_interval(2.0, DENSE, TABLE)
    assert reason is None
    assert found is not None
    assert found.p50_s == pytest.approx((2 * math.exp(-0.05), 2 * math.exp(0.05)))
    assert found.p80_s == pytest.approx((2 * math.exp(-0.1), 2 * math.exp(0.1)))
    assert (found.stratum, found.rows, found.calibrated) == ("dense, hopper, 16 bit", 30, True)


def test_runs_of_one_publisher_are_not_calibrated():
    found, _ = step_interval(2.0, DENSE, {DENSE.name: {**TABLE[DENSE.name], "publishers": "1"}})
    assert found is not None
    assert not found.calibrated


@pytest.mark.parametrize(
    "stratum",
    [stratum_of(H100, "fp8", False), stratum_of(B200, "bf16", False), stratum_of(H100, "bf16", True)],
)
def test_a_stratum_does_not_borrow(stratum):
    assert step_interval(1.0, stratum, TABLE) == (None, f"no published run of JAX is comparable ({stratum.name})")


def test_too_few_groups_are_a_reason():
    row = {**TABLE[DENSE.name], "groups": "3", "q80": ""}
    assert step_interval(1.0, DENSE, {DENSE.name: row}) == (
        None,
        "3 groups of comparable runs (dense, hopper, 16 bit), 4 are needed for 80 %",
    )
    assert "1 group of" in str(step_interval(1.0, DENSE, {DENSE.name: {**row, "groups": "1"}})[1])


def test_a_plan_of_one_gpu_has_no_interval_of_several():
    alone = stratum_of(H100, "bf16", False, one_gpu=True)
    assert step_interval(1.0, alone, TABLE)[0] is None
    assert step_interval(1.0, alone) == (
        None,
        "2 groups of comparable runs (one GPU, dense, hopper, 16 bit), 4 are needed for 80 %",
    )
    assert step_interval(1.0, DENSE)[0] is not None


def test_experts_and_blackwell_have_no_shipped_interval():
    for stratum in (stratum_of(H100, "bf16", True), stratum_of(B200, "fp8", False)):
        found, reason = step_interval(1.0, stratum)
        assert found is None
        assert reason


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_a_quantile_needs_the_groups_that_it_is_defined_for(level):
    least = least_groups(level)
    assert level * (least + 1) <= least + 1e-9
    assert level * least > least - 1
    errors = [0.01 * (i + 1) for i in range(least)]
    assert quantile(residuals(errors), level) == pytest.approx(math.log1p(errors[-1]))
    assert quantile(residuals(errors[:-1]), level) is None


def test_the_quantiles_of_nine_groups():
    """50 % of ten groups are five and 80 % are eight; the direction of an error does not matter."""
    some = residuals([math.expm1(0.01 * (i + 1) * (-1) ** i) for i in range(9)])
    assert [quantile(some, level) for level in LEVELS] == pytest.approx([0.05, 0.08])


def test_a_group_of_many_rows_weighs_one():
    wild = [Residual(f"w{i}", 0.5, ("wild",), "p", DENSE.name) for i in range(50)]
    assert quantile([*residuals([0.01] * 9), *wild], 0.5) == pytest.approx(math.log1p(0.01))


def test_coverage_with_each_group_left_out():
    """80 % of the other four groups is their largest, so only the largest of all lies outside; 50 % is their third."""
    some = residuals([math.expm1(0.01 * (i + 1)) for i in range(5)])
    assert [inside for _, inside in left_out(some, 0.8, lambda r: r.group)] == [True] * 4 + [False]
    assert [inside for _, inside in left_out(some, 0.5, lambda r: r.group)] == [True] * 3 + [False] * 2
    assert left_out(some[:4], 0.8, lambda r: r.group) == []


def test_coverage_asks_the_own_stratum_alone():
    others = residuals([math.expm1(0.5)] * 9, stratum="experts, hopper, 16 bit", publisher="q")
    some = residuals([math.expm1(0.01 * (i + 1)) for i in range(5)])
    looked = left_out([*some, *others], 0.8, lambda r: r.group)
    assert [inside for r, inside in looked if r.stratum == DENSE.name] == [True] * 4 + [False]


def test_the_shipped_table_is_that_of_the_committed_predictions(capsys):
    folder = OUT.parents[2] / "benchmarks" / "published"
    published = read_residuals(folder / "predictions.csv", folder / "rows.csv")
    shipped = OUT.read_text(encoding="utf-8")
    assert table_text([*published, *read_own(folder / "own.csv")]) == shipped
    assert shipped.startswith(table_text(published))  # The measurements on one GPU change no other stratum.
    assert main(["--check"]) == 0
    said = capsys.readouterr().out
    assert "| each group | dense, hopper, 16 bit | 80% |" in said
    assert "too few others" in said


def test_predictions_that_are_none_are_one_message(tmp_path, capsys):
    path = tmp_path / "predictions.csv"
    assert main(["--check", "--predictions", str(path)]) == 2
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id"], ["maxtext-llama2-70b-bf16-64"]])
    assert main(["--check", "--predictions", str(path)]) == 2
    assert "no column 'predicted_step_time_s'" in capsys.readouterr().err


def test_a_group_counts_once_all_of_its_rows_are_predicted(tmp_path):
    folder = OUT.parents[2] / "benchmarks" / "published"
    with (folder / "predictions.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    before = read_residuals(folder / "predictions.csv", folder / "rows.csv")
    torn = next(r for r in before if sum(o.group == r.group for o in before) > 1)
    with (tmp_path / "p.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(line | {"predicted_step_time_s": ""} if line["id"] == torn.id else line for line in lines)
    after = read_residuals(tmp_path / "p.csv", folder / "rows.csv")
    assert [r.id for r in after] == [r.id for r in before if r.group != torn.group]
