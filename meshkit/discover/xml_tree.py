"""A small, bounded XML reader: elements and attributes, no DOCTYPE, no entities.

Topology files come from vendors, images and other people's tickets; the standard library's parser expands entities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from xml.parsers import expat

from meshkit.discover.damage import short
from meshkit.errors import TraceError

_DEEPEST = 64
_MOST_ELEMENTS = 50_000


@dataclass
class Element:
    """One element: its tag, attributes, children, line in the file."""

    tag: str
    attributes: Mapping[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def get(self, name: str) -> str:
        """An attribute; empty where it is absent."""
        return self.attributes.get(name, "")

    def all(self, tag: str) -> Iterator[Element]:
        """Every element of that tag below this one."""
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.all(tag)


def parse_xml(data: bytes, *, at: str) -> tuple[Element, tuple[str, ...]]:
    """The root element of a document, and its comments.

    Raises:
        TraceError: not XML, a DOCTYPE or entity in it, nested too deeply, too many elements.
    """
    parser = expat.ParserCreate()
    stack: list[Element] = []
    roots: list[Element] = []
    comments: list[str] = []
    count = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        line = parser.CurrentLineNumber
        if len(stack) >= _DEEPEST or count > _MOST_ELEMENTS:
            what = f"nests elements more than {_DEEPEST} deep" if len(stack) >= _DEEPEST else "has too many elements"
            raise TraceError(f"the XML {what}.", at=f"{at}:{line}", hint="a topology file as NCCL writes it")
        element = Element(tag, attributes, line)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)

    def refuse(*_: object) -> None:
        raise TraceError(
            "the XML has a DOCTYPE or an entity, which no NCCL topology has.",
            at=f"{at}:{parser.CurrentLineNumber}",
            hint="the file that NCCL_TOPO_DUMP_FILE writes (a file of hwloc is another kind)",
        )

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: stack.pop()
    parser.CommentHandler = comments.append
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        problem = expat.ErrorString(error.code)
        raise TraceError(
            f"the topology is not XML: {short(problem)}.", at=f"{at}:{error.lineno}", hint="the whole file"
        ) from None
    except (LookupError, ValueError, UnicodeError):
        raise TraceError("the topology has an encoding that we do not read.", at=at, hint="a UTF-8 file") from None
    return roots[0], tuple(comments)
