"""Print the output of all commands on stdout and stderr. `run_folder` checks the output folder of a command."""

from __future__ import annotations

import functools
import io
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshkit.errors import ConfigError
from meshkit.redaction import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

_NOTEBOOK_WIDTH = 100
_LONGEST_TEXT = 2**13  # A longer cell of a table or paragraph is cut; documents are printed whole.


def run_folder(folder: Path) -> Path:
    """Make the folder if it is missing, check that it can be written, and return it.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    import tempfile  # This takes longer to import than the rest of the module.

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise ConfigError(f"the run folder {folder} cannot be written: {e.strerror}.", hint="another --out") from None
    return folder


def width() -> int | None:
    """Return None for a terminal, which has its own width; otherwise 80 columns, so that logs look alike everywhere."""
    return None if sys.stdout.isatty() else 80


@functools.cache
def _console_type() -> type[Console]:
    """Return the class of all consoles. It imports rich, which takes as long as the rest of the command line."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Printable(Console):
        """A console that escapes control characters in text, and cuts long text, which would take too long to wrap."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            if isinstance(renderable, Text) and len(renderable) > _LONGEST_TEXT:
                renderable = Text(_cut(renderable.plain))
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

        def print(self, *objects: Any, **options: Any) -> None:
            """Print; lines of a file or a pipe get no trailing blanks."""
            if self.is_terminal or self.record:
                super().print(*objects, **options)
                return
            with self.capture() as captured:
                super().print(*objects, **options)
            self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(_cut(text), **options)

    return Printable


def _cut(text: str) -> str:
    rest = len(text) - _LONGEST_TEXT
    return text if rest <= 0 else f"{text[:_LONGEST_TEXT]}... ({rest:,} more characters)"


def stdout() -> Console:
    """Return a console for the results of a command. Markup is off, since a name from a file may look like markup."""
    return _console_type()(width=width(), markup=False)


def stderr() -> Console:
    """Return a console for progress and tables that must stay off stdout."""
    return _console_type()(stderr=True, width=None if sys.stderr.isatty() else 80, markup=False)


def status(text: str) -> Any:
    """Return a context that shows a spinner with text; without a terminal it shows nothing."""
    from rich.text import Text

    return stderr().status(Text(text))


def notebook_line() -> Callable[[str], None]:
    """Return a function that shows a text in a notebook and replaces the last text; elsewhere it does nothing."""
    ipython = sys.modules.get("IPython")
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        return lambda text: None
    handle: Any = None

    def show(text: str) -> None:
        nonlocal handle
        shown = {"text/plain": printable(text)}
        if handle is None:
            handle = ipython.display.display(shown, raw=True, display_id=True)
        else:
            handle.update(shown, raw=True)

    return show


def rendered(renderable: RenderableType, *, width: int = 80, html: bool = False) -> str:
    """Return what a terminal of that width would show, as plain text or as HTML with its colours."""
    file = io.StringIO()
    # without force_jupyter=False a notebook would show the text at once
    console = _console_type()(
        file=file, width=width, markup=False, record=html, force_terminal=False, force_jupyter=False
    )
    console.print(renderable)
    if not html:
        return file.getvalue().rstrip("\n")
    return console.export_html(inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>')


class Printed:
    """A result that Python shows as the command line prints it: at a prompt, by `print` and in a notebook."""

    def __str__(self) -> str:
        return rendered(self.__rich__())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return rendered(self.__rich__(), width=_NOTEBOOK_WIDTH, html=True)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Return the object that rich prints for this result."""


@dataclass(frozen=True, repr=False)
class Rendered(Printed):
    """A rich renderable that Python prints as rich does."""

    drawn: RenderableType

    def __rich__(self) -> RenderableType:
        return self.drawn


def say(text: str) -> None:
    """Print a line on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def output(text: str, *, end: str = "\n") -> None:
    """Print a document (JSON, a script, TOML) on stdout; on a terminal, control characters are escaped."""
    print(printable(text) if sys.stdout.isatty() else text, end=end)
