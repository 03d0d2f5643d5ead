"""Test comparing two reports: their numbers side by side, how rows are joined, and the conditions of --fail-if."""

import io
import json
import re

import pytest
from rich.console import Console

from meshkit.cli import main
from meshkit.config import catalog
from meshkit.errors import ConfigError, TraceError
from meshkit.predict.interval import step_interval, stratum_of
from meshkit.report.compare import check_condition, compare, condition_text, pair
from meshkit.report.folder import read_report
from meshkit.report.views.report import render


@pytest.fixture
def slower(report):
    """Return a report of the same program, with twice the exposed time and ops of other names."""
    rows = [
        row.model_copy(
            update={
                "exposed_s": 2 * row.exposed_s,
                "ops": tuple(
                    op.model_copy(update={"name": f"{op.name}.clone", "busy_s": 2 * op.busy_s}) for op in row.ops
                ),
            }
        )
        for row in report.communication
    ]
    step = report.step.model_copy(update={"exposed_s": 2 * report.step.exposed_s, "mfu": None})
    return report.model_copy(update={"step": step, "communication": tuple(rows)})


def other_program(report):
    return report.model_copy(update={"program": report.program.model_copy(update={"fingerprint": "other"})})


def test_a_report_beside_itself_is_all_ones(report):
    found = compare(report, report)
    assert all(p.ratio in (1, None) for p in found.step.values())
    assert (found.joined_by, found.joined_share) == ("name", 1)


def test_plans_with_an_interval_are_compared_by_their_numbers(report):
    interval, _ = step_interval(report.step.time_s, stratum_of(catalog.gpu("h100_sxm"), "bf16", False))
    plan = report.model_copy(update={"step": report.step.model_copy(update={"time_interval": interval})})
    found = compare(plan, plan)
    assert found.step["time_s"].ratio == 1
    assert not [name for name in found.step if name.startswith("time_interval")]


def test_ratios(report, slower):
    found = compare(report, slower)
    assert found.step["exposed_s"].ratio == pytest.approx(2)
    assert found.step["mfu"].b is None
    assert found.step["mfu"].ratio is None
    assert all(row.exposed_s.ratio == pytest.approx(2) for row in found.communication if row.exposed_s.a)


def test_ops_of_a_recompiled_program_are_joined_by_key(report, slower):
    by_name = compare(report, slower)
    assert (by_name.ops, by_name.joined_share) == ((), 0)
    by_key = compare(report, other_program(slower))
    assert by_key.joined_by == "key"
    assert by_key.joined_share > 0.9
    assert {(op.a_name, op.b_name) for op in by_key.ops} >= {("all-reduce.1", "all-reduce.1.clone")}


def test_a_row_of_one_side_only_has_no_ratio(report):
    fewer = report.model_copy(update={"communication": report.communication[:1]})
    found = compare(report, fewer)
    missing = [row for row in found.communication if row.time_s.b is None]
    assert len(missing) == len(report.communication) - 1
    assert all(row.time_s.a is not None and row.time_s.ratio is None for row in missing)


def test_what_is_withheld_is_unknown_and_not_zero(report):
    # More communication than allowed maps to nothing: the rows' seconds are null, but their counts are not.
    rows = tuple(r.model_copy(update={"time_s": None, "exposed_s": None}) for r in report.communication)
    found = compare(report, report.model_copy(update={"communication": rows}))
    assert not any(row.one_sided for row in found.communication)
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(render(found))
    assert re.search(r"fsdp, nvlink: all-gather bf16 +2\.50 ms +- +- +-", console.file.getvalue())


def test_json_names_its_schema(report, slower):
    assert json.loads(compare(report, slower).to_json())["schema"] == "meshkit.compare/1"


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("exposed_s>1.1x", True),
        ("exposed_s > 2.1x", False),
        ("exposed_s>=2x", True),
        ("time_s>1x", False),
        ("step.time_s<=1.0x", True),
        ("time_s>0.005", True),
        ("time_s<5e-3", False),
        ("memory.peak_bytes>1e12", False),
        ("peak_bytes>1.05x", False),
        ("communication.data.exposed_s>1.9x", True),
        ("communication.data.exposed_s > 2.1x", False),
        ("communication.fsdp.time_s>0.1", False),
    ],
)
def test_conditions(report, slower, condition, holds):
    assert check_condition(compare(report, slower), condition).met is holds


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("exposed_s", r"cannot be read(.|\n)*exposed_s>1.1x"),
        ("exposed_s>1.1y", "cannot be read"),
        ("exposed_s>1.1.1", r"'1\.1\.1' is not a number"),
        ("exposd_s>1.1x", r"no quantity 'exposd_s'(.|\n)*try exposed_s"),
        ("communication.tensor.exposed_s>1x", r"no communication 'tensor.exposed_s'(.|\n)*axes: data, fsdp"),
        ("communication.fsdp.axes>1x", r"no communication 'fsdp.axes'(.|\n)*keys: count"),
        ("mfu>1.1x", "mfu is unknown in the second report"),
        ("hfu>1.1x", "hfu is unknown in the first report"),
    ],
)
def test_bad_conditions(report, slower, condition, message):
    with pytest.raises(ConfigError, match=message):
        check_condition(compare(report, slower), condition)


def test_a_condition_says_its_numbers(report, slower):
    found = compare(report, slower)
    assert (
        condition_text(check_condition(found, "exposed_s>1.1x"))
        == "exposed_s>1.1x: it is 6.00 ms, it was 3.00 ms, 2.00 x"
    )
    assert condition_text(check_condition(found, "step.time_s > 0.5")) == "step.time_s > 0.5: it is 10.5 ms"
    assert (
        condition_text(check_condition(found, "peak_bytes<1x"))
        == "peak_bytes<1x: it is 60.0 GiB, it was 60.0 GiB, 1.00 x"
    )


@pytest.fixture
def files(report, slower, tmp_path):
    return [str(r.write(tmp_path / name)) for r, name in ((report, "a"), (slower, "b"))]


@pytest.mark.parametrize(
    ("conditions", "code", "says"),
    [
        (["exposed_s>2.5x", "step.time_s>0.5"], 0, ""),
        (["exposed_s>1.1x"], 3, "exposed_s>1.1x: it is 6.00 ms, it was 3.00 ms, 2.00 x"),
        (["exposed_s>1.1x", "time_s>1e-3", "time_s>1"], 3, "2 of 3 conditions"),
        (["exposed>1.1x"], 2, "no quantity 'exposed'"),
        (["exposed_s=1"], 2, "cannot be read"),
    ],
)
def test_a_regression_fails_with_the_numbers(files, conditions, code, says, capsys):
    assert main(["compare", *files, *(f"--fail-if={c}" for c in conditions)]) == code
    assert says in " ".join(capsys.readouterr().err.split())


def test_conditions_are_in_the_json(files, capsys):
    assert main(["compare", *files, "--json", "--fail-if", "exposed_s>1.1x"]) == 3
    (condition,) = json.loads(capsys.readouterr().out)["conditions"]
    assert (condition["condition"], condition["met"]) == ("exposed_s>1.1x", True)
    assert (condition["value"], condition["reference"]) == (pytest.approx(6e-3), pytest.approx(3e-3))


def test_a_comparison_is_a_page(files, tmp_path):
    assert main(["compare", *files, "--html", str(tmp_path / "new" / "both.html")]) == 0
    text = (tmp_path / "new" / "both.html").read_text()
    assert "Measured A and measured B" in text
    assert 'data-document="compare" data-key="step.exposed_s.ratio"' in text


def test_what_differs_by_the_most_seconds_comes_first(report, slower):
    found = compare(report, other_program(slower))
    by_difference = [abs(op.busy_s.difference) for op in found.ops]
    assert by_difference == sorted(by_difference, reverse=True)
    assert by_difference[0] > 0


def test_terminal_fits_80_columns(report, slower):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(render(compare(report, slower)))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "2.00 x" in text


@pytest.mark.parametrize(
    "text", ["time_s>1e999", "time_s>1e308x", "time_s<1e400x", "time_s>" + "9" * 5000, "time_s>1.1.1"]
)
def test_a_limit_beyond_all_quantities_is_refused(report, text):
    with pytest.raises(ConfigError, match=r"is more than any quantity|is not a number"):
        check_condition(compare(report, report), text)


@pytest.mark.parametrize("number", ["1e308", "-1e308", "1e41", "9" * 300])
def test_a_report_with_numbers_that_no_sum_could_hold_is_refused(report, tmp_path, number):
    text = report.to_json()
    (tmp_path / "report.json").write_text(re.sub(r'("time_s": )[0-9.e-]+', rf"\g<1>{number}", text, count=1))
    with pytest.raises(TraceError, match=r"time_s is out of range|not a meshkit.report"):
        read_report(tmp_path)


def test_a_ratio_that_is_not_finite_is_unknown():
    assert pair(1e-300, 1e40).ratio is None
