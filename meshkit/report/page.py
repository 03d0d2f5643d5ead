"""An HTML page of ours: its frame, and the parts it is put together from. Layer 6; no jax.

Charts are drawn by Plotly, whose JavaScript is embedded, compressed: see `html.py`.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from meshkit.errors import ConfigError


def write_page(path: str | Path, headline: str, body: Sequence[str], figures: Mapping[str, dict]) -> Path:
    """Writes a page and returns its path.

    Args:
        path: the file; its folder is made.
        headline: the page's title.
        body: parts of HTML.
        figures: Plotly figures, by the id that `chart` gave them.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    frame = Template(resources.files("meshkit.report").joinpath("page.html").read_text(encoding="utf-8"))
    # a slash after "<" would end the script element that holds the data
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    text = frame.substitute(title=escape(headline), body="\n".join(body), figures=data, plotly=_plotly())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def chart(name: str, figure: dict, figures: dict[str, dict], css: str = "", hidden: bool = False) -> str:
    """A place for a figure, which is put into `figures` under its id."""
    figures[name] = figure
    return f'<div id="{name}" class="chart {css}"{" hidden" if hidden else ""}></div>'


def section(title: str, note: str, *parts: str) -> str:
    """A panel with a title and a note below it."""
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{"".join(parts)}</section>'


def warning_panel(messages: Iterable[str]) -> str:
    """What to read first; empty where there is nothing."""
    items = "".join(f"<li>{escape(message)}</li>" for message in messages)
    return f'<section class="warn"><h2>Read this first</h2><ul>{items}</ul></section>' if items else ""


def cells(tag: str, texts: Sequence[str], numbers: Sequence[str]) -> str:
    """Cells of one row (tag `th` or `td`): texts to the left, then numbers to the right."""
    left = "".join(f"<{tag}>{escape(t)}</{tag}>" for t in texts)
    return left + "".join(f'<{tag} class="n">{escape(n)}</{tag}>' for n in numbers)


def table(head: str, rows: Sequence[str]) -> str:
    """A table of a row of `th` cells and rows of `td` cells, which scrolls where it is too wide."""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


@functools.cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "the HTML page needs Plotly, which is not installed.", hint="pip install plotly, or the JSON report"
        ) from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
