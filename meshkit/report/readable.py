"""A report as somebody reads it in Python: printed, in a notebook, as a page, as rows for a table.

The views draw reports, so a report finds them by name, when it is looked at.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from pathlib import Path
from typing import Any

_NOTEBOOK_WIDTH = 100


class Printed:
    """What prints as the command line shows it."""

    def __str__(self) -> str:
        """The tables that the command line prints."""
        return self._rendered()

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return self._rendered(width=_NOTEBOOK_WIDTH, html=True)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same for a shell of IPython."""
        printer.text(self._rendered())

    def _rendered(self, *, width: int = 80, html: bool = False) -> str:
        console = importlib.import_module("meshkit.console")
        return console.rendered(self._shown(), width=width, html=html)

    @abstractmethod
    def _shown(self) -> Any:
        """What the terminal shows of it, for rich."""


class Readable(Printed):
    """What a report shows of itself."""

    def _shown(self) -> Any:
        return _view().render(self)

    def write_html(self, path: str | Path, *, title: str | None = None) -> Path:
        """Writes the page, which opens offline, and returns the file.

        Args:
            path: a file, or a folder for `report.html`.
            title: what it is about; the name of the folder or file by default.
        """
        path = Path(path)
        file = path if path.suffix == ".html" else path / "report.html"
        file.parent.mkdir(parents=True, exist_ok=True)
        return _view().write_html(self, file, title=title or path.resolve().stem)

    def to_rows(self) -> list[dict[str, Any]]:
        """The rows of communication as flat dicts, as pandas and the like take them."""
        return [_flat(row.model_dump(mode="json")) for row in getattr(self, "communication", ())]

    def to_row(self) -> dict[str, Any]:
        """The step and its memory as one flat dict: a row of a table of several reports."""
        document: dict[str, Any] = self.to_dict()  # pyright: ignore[reportAttributeAccessIssue]  # of the report
        row = {"source": document["source"], **_flat(document["step"])}
        return row | {f"memory_{key}": value for key, value in _flat(document["memory"]).items()}


def _flat(part: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a part: a list of texts as one, and nothing that is a table itself."""
    joined = {key: "+".join(map(str, v)) if isinstance(v, list) else v for key, v in part.items()}
    tables = {key for key, v in part.items() if isinstance(v, dict) or (isinstance(v, list) and dict in map(type, v))}
    return {key: v for key, v in joined.items() if key not in tables}


def _view() -> Any:
    return importlib.import_module("meshkit.report.views.report")
