"""Test a report in Python: at a prompt, printed, rendered as the terminal shows it, as a page, and as rows."""

import meshkit as mk
from tests.report.test_views import shown


def test_a_report_says_one_line_of_itself_and_its_verdict(report):
    judged = report.model_copy(update={"verdict": "All is well."})
    assert repr(judged).startswith("<Report: measured step of ")
    assert "\n" not in repr(judged)
    assert len(repr(judged)) < 200
    assert str(judged) == f"{judged!r}\nAll is well."
    memory = judged.memory.model_copy(update={"fits": False, "margin_bytes": -3 * 2**30})
    assert repr(judged.model_copy(update={"memory": memory})).endswith("does not fit, 3.00 GiB too much>")


def test_a_rendered_report_prints_as_the_terminals_view(report):
    rendered = mk.render(report)
    assert [line.rstrip() for line in str(rendered).splitlines()] == [
        line.rstrip() for line in shown(rendered).rstrip("\n").splitlines()
    ]
    assert repr(rendered) == str(rendered)
    html = rendered._repr_html_()
    assert html.startswith("<pre")
    assert "all-reduce" in html


def test_a_comparison_is_rendered_too(report):
    compared = mk.compare(report, report)
    assert "of the seconds of single collectives" in str(mk.render(compared))
    assert str(compared) == repr(compared) == f"<Comparison: {compared.verdict}>"


def test_names_in_a_notebook_are_no_html(report):
    row = report.communication[0].model_copy(update={"axes": ("<script>",)})
    named = report.model_copy(update={"communication": (row,)})
    assert "<script>" not in mk.render(named)._repr_html_()


def test_the_page_and_the_rows(report, tmp_path):
    assert mk.write_html(report, tmp_path / "runs" / "x.html") == tmp_path / "runs" / "x.html"
    assert mk.write_html(report, tmp_path / "runs") == tmp_path / "runs" / "report.html"
    assert "<title>mine" in mk.write_html(report, tmp_path / "a.html", title="mine").read_text()
    rows = report.to_rows()
    assert [row["axes"] for row in rows] == ["+".join(r.axes) for r in report.communication]
    assert rows[0]["payload_bytes"] == report.communication[0].payload_bytes
    row = report.to_row()
    assert (row["time_s"], row["source"]) == (report.step.time_s, report.source)
    assert "memory_peak_bytes" in row
    assert not any(isinstance(value, dict | list) for value in [*row.values(), *rows[0].values()])
