"""Building blocks of views: tables for both terminal and HTML, and the frame of an HTML page.

A table's cell is a text, a number of a JSON document (`Value`), or the model code of an operation (`Source`).

Plotly draws the charts. Its JavaScript is embedded, so that a page needs no network, and compressed, so that a page has
2 MB instead of 5; browsers since 2023 can unpack it. Every number on a chart is also in a table or a note, with its key
in the JSON.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import rich.table
from rich.console import Group, RenderableType
from rich.text import Text

from meshkit.config.files import write_file
from meshkit.errors import ConfigError
from meshkit.hlo.instructions import layer_and_line, layer_of


@dataclass(frozen=True)
class Value:
    """A number of a JSON document: the document, the key, the value, and its text.

    The HTML has all four, so that a script can find a number and check it.
    """

    document: str
    key: str
    value: float | bool | None
    text: str
    css: str = ""
    style: str = ""
    """The style on a terminal, in rich's notation."""

    def html(self) -> str:
        """Return an HTML span with the text, and with document, key and value as data attributes."""
        css = f' class="{self.css}"' if self.css else ""
        value = "" if self.value is None else json.dumps(self.value)
        data = f'data-document="{escape(self.document)}" data-key="{escape(self.key)}" data-value="{value}"'
        return f"<span{css} {data}>{escape(self.text)}</span>"


class Numbers:
    """Gives the number at a path in a JSON document: `step.exposed_s`, or `communication.0+3.exposed_s` (a sum)."""

    def __init__(self, name: str, root: Any):
        self.name, self._root = name, root

    def __call__(self, key: str, form: Callable[[Any], str], css: str = "") -> Value:
        """Return the number at a path, with its text from `form`."""
        value = self.value(key)
        return Value(self.name, key, value, form(value).strip(), css, "red" if css == "exposed" and value else "")

    def value(self, key: str) -> Any:
        """Return the number at a path; a sum is None if one of its numbers is None."""
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


@dataclass(frozen=True)
class Source:
    """The model code that caused an operation: its op_name path, and its source line if known."""

    path: str | None
    line: str | None
    combined: str = ""
    """For a collective of several arrays, a text with the share of each place in the code."""

    @property
    def text(self) -> str:
        """The text for a terminal: the end of the layer's path and the line; without a layer, line and operation."""
        if self.combined:
            return self.combined
        return layer_and_line(self.path or "", self.line, 2) or "-"

    def html(self) -> str:
        """Return the layer, the line and the path, which is shortened if it is very long."""
        if self.combined:
            return f"<b>{escape(self.combined)}</b>"
        known = (layer_of(self.path or ""), self.line)
        where = "".join(f"<b>{escape(text)}</b> " for text in known if text)
        return f"{where}<code>{escape(short_source(self.path) or ('' if self.line else '-'))}</code>"


def short_source(source: str | None) -> str:
    """Return an op_name path without the parts that all paths have; for a combined operation, each path once."""
    if not source:
        return ""
    text = re.sub(r"^jit\([^)]*\)/", "", source).replace("/eval_jaxpr", "").replace("while/body/", "loop/")
    if text.startswith("(") and text.endswith(")") and ":" in text:
        parts = dict.fromkeys(text[1:-1].split(":"))
        text = f"({' : '.join(parts)})"
    return text if len(text) <= 120 else f"{text[:117]}..."


Cell = str | Text | Value | Source


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    header: str = ""
    words: bool = False
    """Whether its cells are words: aligned to the left, and folded if a terminal is too narrow."""
    unit: str = ""
    short: str = ""
    """The header on a terminal; "" for the same as `header`."""
    width: int | None = None
    clip: bool = False
    """Whether a terminal cuts off a text that is longer than the width, instead of folding it."""


def text_columns(*headers: str) -> list[Column]:
    return [Column(header, words=True) for header in headers]


def number_columns(*headers: str) -> list[Column]:
    return [Column(header) for header in headers]


@dataclass(frozen=True)
class Table:
    """Columns, rows of cells, and the style of each row on a terminal."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    styles: Sequence[str] = ()

    def pick(self, *columns: Column) -> Table:
        """Return a table of some columns, which are found by their headers, in the given order."""
        headers = [column.header for column in self.columns]
        places = [headers.index(column.header) for column in columns]
        return Table(columns, [[row[place] for place in places] for row in self.rows], self.styles)

    def html(self) -> str:
        """Return an HTML table that scrolls if it is too wide."""
        heads = (f"{c.header} ({c.unit})" if c.unit else c.header for c in self.columns)
        head = "".join(_cell("th", column, escape(text)) for column, text in zip(self.columns, heads))
        rows = ("".join(_cell("td", column, cell) for column, cell in zip(self.columns, row)) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def terminal(self, *, gap: int = 2, header: str | None = "bold", title: str | None = None) -> rich.table.Table:
        """Return a rich table without lines.

        Args:
            header: style of the headers; None leaves the headers out.
        """
        drawn = rich.table.Table(
            box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=header is not None, header_style=header,
            title=title, title_justify="left", title_style="bold",
        )  # fmt: skip
        units = any(column.unit for column in self.columns)
        for column in self.columns:
            side: Any = "left" if column.words else "right"
            cut = column.clip or not (column.words or column.width)
            text = f"{column.header}\n{column.unit}" if units else column.short or column.header
            overflow: Any = "ellipsis" if cut else "fold"
            drawn.add_column(text, justify=side, width=column.width, no_wrap=cut, overflow=overflow)
        styles = [*self.styles, *[""] * (len(self.rows) - len(self.styles))]
        for row, style in zip(self.rows, styles):
            drawn.add_row(*map(_text, row), style=style)
        return drawn


def below_titles(columns: Sequence[Column], groups: Iterable[tuple[Text, Table]]) -> RenderableType:
    """Return tables with the same fixed-width columns for a terminal, each below its title, with one common header."""
    parts: list[RenderableType] = [Table(columns, ()).terminal(gap=1, header="dim")]
    for title, table in groups:
        indented = [(f"  {row[0]}", *row[1:]) for row in table.rows]
        parts += [title, Table(columns, indented, table.styles).terminal(gap=1, header=None)]
    return Group(*parts)


def _cell(tag: str, column: Column, cell: Cell) -> str:
    if isinstance(cell, Source):
        tip = f' title="{escape(cell.path)}"' if cell.path else ""
        return f'<{tag} class="source"{tip}>{cell.html()}</{tag}>'
    return f"<{tag}{'' if column.words else ' class="n"'}>{inline(cell)}</{tag}>"


def inline(cell: Cell) -> str:
    """Return the HTML of a cell; a text is escaped."""
    return cell.html() if isinstance(cell, Value | Source) else escape(str(cell).strip())


def _text(cell: Cell) -> Text:
    if isinstance(cell, Text):
        return cell
    if isinstance(cell, Value):
        return Text(cell.text, cell.style)
    return Text(cell) if isinstance(cell, str) else Text(cell.text, "dim")


def heading(text: str) -> Text:
    """Return a title for a terminal, after an empty line."""
    return Text.assemble("\n", (text, "bold"))


def listed(lines: Iterable[str | Text], mark: str = "-", style: str = "dim") -> list[RenderableType]:
    """Return a list for a terminal, with a mark before each text; the further lines of a long text are indented."""
    found = []
    for line in lines:
        grid = rich.table.Table.grid(padding=(0, 1))
        grid.add_row(Text(mark, style), line if isinstance(line, Text) else Text(line))
        found.append(grid)
    return found


def labelled(rows: Iterable[tuple[str, str | Text]], width: int | None = None) -> RenderableType:
    """Return a grid of texts with bold labels."""
    grid = rich.table.Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold", max_width=width)
    for label, text in rows:
        grid.add_row(label, text if isinstance(text, Text) else Text(text))
    return grid


_FEW_WARNINGS = 2


class Page:
    """An HTML page: a headline, parts of HTML below it, and the figures of the charts in these parts."""

    def __init__(self, headline: str, sub: str, verdict: str | None = None):
        self._headline = headline
        first = f'<p class="verdict">{escape(verdict)}</p>\n' if verdict else ""
        self._body = [f'{first}<h1>{escape(headline)}</h1>\n<p class="sub">{escape(sub)}</p>']
        self._figures: dict[str, dict] = {}

    def add(self, *parts: str) -> None:
        """Append parts of HTML."""
        self._body += parts

    def chart(self, name: str, figure: dict, css: str = "", hidden: bool = False) -> str:
        """Return the HTML element for a Plotly figure (`data` and `layout`, without NaN); its id is the name."""
        self._figures[name] = figure
        return f'<div id="{name}" class="chart {css}"{" hidden" if hidden else ""}></div>'

    def write(self, path: str | Path) -> Path:
        """Write the page, and its folder if needed; return its path.

        Raises:
            ConfigError: Plotly is not installed.
        """
        frame = Template(resources.files("meshkit.report.views").joinpath("page.html").read_text(encoding="utf-8"))
        # In the data, "</script>" would end the script element, and "<!--<script>" would hide its end.
        data = json.dumps(self._figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        body = "\n".join(self._body)
        text = frame.substitute(title=escape(self._headline), body=body, figures=data, plotly=_plotly())
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
        return path


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return a legend in HTML for a chart; unlike Plotly's own legend, it wraps on a narrow screen."""
    items = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries)
    return f'<p class="legend">{items}</p>'


def section(title: str, note: str, *parts: str) -> str:
    """Return a panel with a title, a note and parts of HTML; title and note are plain text, which is escaped."""
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{"".join(parts)}</section>'


def below(title: str, note: str, *parts: str) -> str:
    """Return a panel that a click on its title opens or closes. It starts open, so that its charts are drawn."""
    inside = f'<p class="note">{escape(note)}</p>{"".join(parts)}'
    summary = f'<summary class="title">{escape(title)}</summary>'
    return f"<section><details open data-below>{summary}{inside}</details></section>"


def folded(title: str, *parts: str, opened: bool = False) -> str:
    """Return parts of HTML that a click on the title shows or hides."""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def warning_panel(messages: Sequence[str]) -> str:
    """Return a panel of warnings, folded if there are more than two; "" without warnings."""
    if not messages:
        return ""
    listed = f"<ul>{''.join(f'<li>{escape(message)}</li>' for message in messages)}</ul>"
    if len(messages) <= _FEW_WARNINGS:
        return f'<section class="warn"><h2>Read this first</h2>{listed}</section>'
    title = f"Read this first: {len(messages)} things to know before a number is believed"
    return f'<section class="warn"><details><summary class="title">{title}</summary>{listed}</details></section>'


def card(label: str, *values: Cell, names: Sequence[str] = (), css: str = "") -> str:
    """Return a box of the headline: values above a label.

    Args:
        values: the value of each report.
        names: the reports' names, if there are several.
    """
    which = [f'<span class="which">{escape(name)}</span>' for name in names] or [""] * len(values)
    lines = "".join(f"<b>{inline(value)}{name}</b>" for value, name in zip(values, which))
    return f'<div class="card {css}">{lines}<span>{escape(label)}</span></div>'


def cards(boxes: Iterable[str], css: str = "") -> str:
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
