"""Two reports side by side, joins, and the conditions of --fail-if."""

import io
import json

import pytest
from rich.console import Console

from meshkit.errors import ConfigError
from meshkit.report.compare import compare, evaluate_condition, render


@pytest.fixture
def slower(report):
    """The same program, with twice the exposed time and ops of other names."""
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
    ],
)
def test_conditions(report, slower, condition, holds):
    assert evaluate_condition(compare(report, slower), condition) is holds


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("exposed_s", r"cannot be read(.|\n)*exposed_s>1.1x"),
        ("exposed_s>1.1y", "cannot be read"),
        ("exposed_s>1.1.1", r"'1\.1\.1' is not a number"),
        ("exposd_s>1.1x", r"no quantity 'exposd_s'(.|\n)*try exposed_s"),
        ("mfu>1.1x", "mfu is unknown in the second report"),
        ("hfu>1.1x", "hfu is unknown in the first report"),
    ],
)
def test_bad_conditions(report, slower, condition, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_condition(compare(report, slower), condition)


def test_terminal_fits_80_columns(report, slower):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(render(compare(report, slower)))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "2.00 x" in text
