"""A report in Python: printed, in a notebook, as a page, as rows."""

from meshkit.report.views.report import render
from tests.report.test_views import shown


def test_a_report_prints_as_the_terminals_view(report):
    assert [line.rstrip() for line in str(report).splitlines()] == [
        line.rstrip() for line in shown(render(report)).rstrip("\n").splitlines()
    ]
    html = report._repr_html_()
    assert html.startswith("<pre")
    assert "all-reduce" in html


def test_names_in_a_notebook_are_no_html(report):
    row = report.communication[0].model_copy(update={"axes": ("<script>",)})
    named = report.model_copy(update={"communication": (row,)})
    assert "<script>" not in named._repr_html_()


def test_the_page_and_the_rows(report, tmp_path):
    assert report.write_html(tmp_path / "runs" / "x") == tmp_path / "runs" / "x" / "report.html"
    assert "<title>" in report.write_html(tmp_path / "a.html", title="mine").read_text()
    rows = report.to_rows()
    assert [row["axes"] for row in rows] == ["+".join(r.axes) for r in report.communication]
    assert rows[0]["payload_bytes"] == report.communication[0].payload_bytes
    row = report.to_row()
    assert (row["time_s"], row["source"]) == (report.step.time_s, report.source)
    assert "memory_peak_bytes" in row
    assert not any(isinstance(value, dict | list) for value in [*row.values(), *rows[0].values()])
