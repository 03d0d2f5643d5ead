"""Test that names from other people's experiments, traces and programs never become a script on the page."""

import json

import pytest

from meshkit.console import output, say, status, stdout
from meshkit.report.compare import compare
from meshkit.report.folder import read_report
from meshkit.report.schema import MeshAxisPart, Report, StepPart, Warning_, WindowPart
from meshkit.report.views.report import render, write_html
from meshkit.verbs.arguments import show_report
from tests.report.browser import Browser, find_chromium

SCRIPT = "<script>document.title='x'</script>"
NAMES = [SCRIPT, "</script><script>document.title='x'</script>", "<img src=x onerror=\"document.title='x'\">",
         "'\"><svg onload=document.title='x'>", "<!--<script>", "${body} $figures"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_page_escapes_names(tmp_path, name):
    report = Report(
        source="profile",
        window=WindowPart(steps=1, devices=1),
        step=StepPart(time_s=1.0, compute_s=1.0, exposed_s=0.0, other_s=0.0, idle_s=0.0),
        mesh=(MeshAxisPart(axis=name, size=2, nvlink=2, infiniband=1),),
        warnings=(Warning_(code="x", message=f"axis {name} is odd"),),
    )
    text = write_html(report, tmp_path / "report.html", title=f"run {name}").read_text()
    if "<" in name:
        assert name not in text
    else:
        assert f"axis {name} is odd" in text  # The name is not a placeholder of the page's own template.


@pytest.mark.parametrize("name", NAMES[:5])
def test_a_name_in_a_chart_does_not_end_the_script_that_holds_it(report, timeline, tmp_path, name):
    row = report.communication[0]
    op = row.ops[0].model_copy(update={"name": name, "source": name, "line": name})
    row = row.model_copy(update={"axes": (name,), "collective": name, "ops": (op,)})
    odd = report.model_copy(update={"communication": (row, *report.communication[1:])})
    text = write_html(odd, tmp_path / "report.html", timeline, title="run").read_text()
    script = text.split('id="figures">')[1].split('<script type="text/plain"')[0]
    assert script.count("</script>") == 1  # This is the script's own end.
    outside = text.replace(script, "")
    assert name not in outside


def test_a_browser_runs_no_script_of_a_name(report, timeline, tmp_path):
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    row = report.communication[0].model_copy(update={"axes": (NAMES[2],), "collective": NAMES[4]})
    odd = report.model_copy(
        update={
            "communication": (row, *report.communication[1:]),
            "warnings": tuple(Warning_(code="x", message=name) for name in NAMES),
        }
    )
    page = write_html(odd, tmp_path / "report.html", timeline, title=NAMES[1])
    browser = Browser(executable, tmp_path / "chromium")
    try:
        browser.open(page, 1200)
        assert browser.evaluate("document.title") != "x"
        assert browser.evaluate("document.querySelectorAll('img, svg[onload]').length") == 0
        assert browser.problems == []
    finally:
        browser.close()


@pytest.mark.parametrize("name", ["[/x]", "[bold]", "[link=x]y[/link]"])
def test_a_name_on_the_terminal_is_no_markup(report, capsys, name):
    row = report.communication[0]
    op = row.ops[0].model_copy(update={"name": name, "source": name, "line": name, "exposed_s": 1e-3})
    row = row.model_copy(update={"axes": (name,), "collective": name, "dtype": name, "ops": (op,), "exposed_s": 1e-3})
    odd = report.model_copy(
        update={
            "communication": (row, *report.communication[1:]),
            "mesh": (MeshAxisPart(axis=name, size=2, nvlink=2, infiniband=1),),
            "cluster": report.cluster.model_copy(update={"gpu": name}),
            "warnings": (Warning_(code="x", message=f"axis {name} is odd"),),
        }
    )
    with status(f"reading {name}"):
        show_report(odd, False, name)
    stdout().print(render(compare(odd, odd)))
    text = capsys.readouterr().out
    assert f"axis {name} is odd" in text
    assert text.count(name) >= 6


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def _with_escapes(value):
    """Return a document with terminal escapes in every text that may be any."""
    if isinstance(value, dict):
        fixed = ("schema", "source", "link", "wait_method", "method", "aggregation", "created")
        return {k: v if k in fixed and v != "layers" else _with_escapes(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_escapes(item) for item in value]
    return value + ESCAPES if isinstance(value, str) else value


def test_no_terminal_escape_of_a_report_reaches_the_terminal(report, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    document = _with_escapes(json.loads(report.to_json()))
    (tmp_path / "report.json").write_text(json.dumps(document))
    odd = read_report(tmp_path)
    show_report(odd, False, "run" + ESCAPES)
    stdout().print(render(compare(odd, odd)))
    say(ESCAPES)
    output(ESCAPES)
    shown = capsys.readouterr()
    assert "\\x1b]0;owned\\x07" in shown.out
    assert not set(shown.out + shown.err) & set("\x07\x9b\u202e")
    assert "\x1b]" not in shown.out + shown.err
    assert "\x1b[2J" not in shown.out + shown.err
