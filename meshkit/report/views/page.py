"""An HTML page: its frame, and the parts it is put together from.

Charts are drawn by Plotly, whose JavaScript is embedded. It zooms and pans thousands of spans, its Python package
brings the script (so nothing is fetched when a page is written or read), and a company and a large community keep it.
The script is embedded compressed: a page has 2 MB, not 5; browsers since 2023 unpack it. Every number on a chart is in
a table or a note as well, and says where in the JSON it stands.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from meshkit.config.bounded import write_file
from meshkit.errors import ConfigError
from meshkit.report.views.table import Cell, inline

_FEW_WARNINGS = 2


class Page:
    """A headline, parts of HTML below it, and the figures that their charts draw."""

    def __init__(self, headline: str, sub: str, verdict: str | None = None):
        self._headline = headline
        first = f'<p class="verdict">{escape(verdict)}</p>\n' if verdict else ""
        self._body = [f'{first}<h1>{escape(headline)}</h1>\n<p class="sub">{escape(sub)}</p>']
        self._figures: dict[str, dict] = {}

    def add(self, *parts: str) -> None:
        """Puts parts of HTML below what is there."""
        self._body += parts

    def chart(self, name: str, figure: dict, css: str = "", hidden: bool = False) -> str:
        """A place for a Plotly figure, whose id is the name."""
        self._figures[name] = figure
        return f'<div id="{name}" class="chart {css}"{" hidden" if hidden else ""}></div>'

    def write(self, path: str | Path) -> Path:
        """Writes the page, and its folder where there is none; returns its path.

        Raises:
            ConfigError: Plotly is not installed.
        """
        frame = Template(resources.files("meshkit.report.views").joinpath("page.html").read_text(encoding="utf-8"))
        # "</script>" would end the element that holds the data, "<!--<script>" would keep its own end from being seen
        data = json.dumps(self._figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        body = "\n".join(self._body)
        text = frame.substitute(title=escape(self._headline), body=body, figures=data, plotly=_plotly())
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
        return path


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names with their colours, above a chart: it wraps on a narrow screen, which a chart's own legend does not."""
    items = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries)
    return f'<p class="legend">{items}</p>'


def section(title: str, note: str, *parts: str) -> str:
    """A panel with a title and a note below it."""
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{"".join(parts)}</section>'


def below(title: str, note: str, *parts: str) -> str:
    """A panel that is read after the others: its title opens it. Its charts are drawn before it is closed."""
    inside = f'<p class="note">{escape(note)}</p>{"".join(parts)}'
    summary = f'<summary class="title">{escape(title)}</summary>'
    return f"<section><details open data-below>{summary}{inside}</details></section>"


def folded(title: str, *parts: str, opened: bool = False) -> str:
    """Parts that a click shows or hides."""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def warning_panel(messages: Sequence[str]) -> str:
    """What to know before a number is believed; many are folded, and nothing is shown where there are none."""
    if not messages:
        return ""
    listed = f"<ul>{''.join(f'<li>{escape(message)}</li>' for message in messages)}</ul>"
    if len(messages) <= _FEW_WARNINGS:
        return f'<section class="warn"><h2>Read this first</h2>{listed}</section>'
    title = f"Read this first: {len(messages)} things to know before a number is believed"
    return f'<section class="warn"><details><summary class="title">{title}</summary>{listed}</details></section>'


def card(label: str, *values: Cell, names: Sequence[str] = (), css: str = "") -> str:
    """A box of the headline: values, each with the name of its report where there are several, over a label."""
    which = [f'<span class="which">{escape(name)}</span>' for name in names] or [""] * len(values)
    lines = "".join(f"<b>{inline(value)}{name}</b>" for value, name in zip(values, which))
    return f'<div class="card {css}">{lines}<span>{escape(label)}</span></div>'


def cards(boxes: Iterable[str], css: str = "") -> str:
    """The boxes of the headline, in a row."""
    return f'<div class="cards{css and " "}{css}">{"".join(boxes)}</div>'


@functools.cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "the HTML page needs Plotly, which is not installed.", hint="pip install plotly, or the JSON report"
        ) from None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
