"""An HTML page of ours: its frame, and the parts it is put together from.

Charts are drawn by Plotly, whose JavaScript is embedded, compressed: see `html.py`.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from meshkit.errors import ConfigError


@dataclass(frozen=True)
class Value:
    """A number of a JSON document on the page: which document, where in it, its value, and how it reads.

    The page carries all four, so that a script (our tests, a reader's) can find a number and check it.
    """

    document: str
    key: str
    value: float | bool | None
    text: str
    css: str = ""

    def html(self) -> str:
        """A span with the text, and the rest as its data."""
        css = f' class="{self.css}"' if self.css else ""
        data = (
            f'data-document="{escape(self.document)}" data-key="{escape(self.key)}" data-value="{_number(self.value)}"'
        )
        return f"<span{css} {data}>{escape(self.text)}</span>"


Text = str | Value


class Document:
    """Numbers of one JSON document by their path: `step.exposed_s`, `communication.0+3.exposed_s` (a sum).

    Args:
        name: what the page calls the document.
        root: a pydantic model or plain values.
    """

    def __init__(self, name: str, root: Any):
        self.name, self._root = name, root

    def __call__(self, key: str, form: Callable[[Any], str], css: str = "") -> Value:
        """The number at a path, in words by `form`."""
        value = self.value(key)
        return Value(self.name, key, value, form(value).strip(), css)

    def value(self, key: str) -> Any:
        """The number at a path; of several it is the sum, None if one of them is."""
        found = [self._root]
        for part in key.split("."):
            found = [_child(parent, name) for parent in found for name in part.split("+")]
        if len(found) == 1:
            return found[0]
        return None if any(v is None for v in found) else sum(found)


def _child(parent: Any, name: str) -> Any:
    if isinstance(parent, Mapping):
        return parent.get(name)
    if isinstance(parent, Sequence):
        return parent[int(name)]
    return None if parent is None else getattr(parent, name)


def _number(value: float | bool | None) -> str:
    return "" if value is None else json.dumps(value)


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
    frame = Template(resources.files("meshkit.report.views").joinpath("page.html").read_text(encoding="utf-8"))
    # "</script>" would end the element that holds the data, "<!--<script>" would keep its own end from being seen
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    text = frame.substitute(title=escape(headline), body="\n".join(body), figures=data, plotly=_plotly())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def chart(name: str, figure: dict, figures: dict[str, dict], css: str = "", hidden: bool = False) -> str:
    """A place for a figure, which is put into `figures` under its id."""
    figures[name] = figure
    return f'<div id="{name}" class="chart {css}"{" hidden" if hidden else ""}></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names with their colours, above a chart: it wraps on a narrow screen, which a chart's own legend does not."""
    items = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries)
    return f'<p class="legend">{items}</p>'


def section(title: str, note: str, *parts: str) -> str:
    """A panel with a title and a note below it."""
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{"".join(parts)}</section>'


def warning_panel(messages: Iterable[str]) -> str:
    """What to read first; empty where there is nothing."""
    items = "".join(f"<li>{escape(message)}</li>" for message in messages)
    return f'<section class="warn"><h2>Read this first</h2><ul>{items}</ul></section>' if items else ""


def inline(text: Text) -> str:
    """A text, escaped, or a value with its data."""
    return text.html() if isinstance(text, Value) else escape(text)


def cells(tag: str, texts: Sequence[Text], numbers: Sequence[Text]) -> str:
    """Cells of one row (tag `th` or `td`): texts to the left, then numbers to the right."""
    left = "".join(f"<{tag}>{inline(t)}</{tag}>" for t in texts)
    return left + "".join(f'<{tag} class="n">{inline(n)}</{tag}>' for n in numbers)


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
