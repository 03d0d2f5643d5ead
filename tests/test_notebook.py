"""Test that the docs' notebook has small outputs, and that a kernel that runs it again gives the same."""

import json
import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "first_report.ipynb"


def outputs(cells):
    """Return the texts of every code cell's outputs by MIME type, in order."""
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            parts = [o.get("data", {"stream": o.get("text", "")}) for o in cell["outputs"]]
            shown.append([{kind: "".join(text) for kind, text in part.items()} for part in parts])
    return shown


def check(cells):
    imports, plan, explanation, tuned, rows = outputs(cells)
    assert imports == []  # There is no log and no warning.
    progress, report = plan  # There is one report, since a kernel does not show what is rendered for its HTML.
    assert progress["text/plain"].startswith("planned in ")
    for part in ("text/html", "text/plain"):
        assert "reduce-scatter f32" in report[part]
        assert "exposed communication" in report[part]
    (explained,) = explanation
    assert "gradients, reduced once a step" in explained["text/plain"]
    progress, search = tuned
    assert progress["text/plain"].startswith("4 of 4 variants, best ")
    assert "why it wins" in search["text/html"]
    printed = "".join(part["stream"] for part in rows)  # The kernel may split it into any number of pieces.
    assert "us exposed" in printed
    assert "report.html" in printed


def test_the_notebook_shows_its_report():
    assert NOTEBOOK.stat().st_size < 50_000
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    check(cells)
    text = json.dumps(cells)
    assert "/home/" not in text
    assert "Traceback" not in text
    assert "child.py" not in text


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_kernel_runs_it():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False).execute()
    check(notebook["cells"])
    if os.environ.get("MESHKIT_WRITE_NOTEBOOK"):  # `make notebook` sets it.
        nbformat.write(notebook, NOTEBOOK)
