"""Put the README into a wheel's metadata, without links into this tree, which no package index has."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class CustomMetadataHook(MetadataHookInterface):
    """Sets `readme`."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_links(text)}


def without_links(text: str) -> str:
    """Return Markdown without pictures of the tree, in which links to its files are their words alone."""
    text = re.sub(r"<img [^>]*>\n*", "", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?://|#)[^)]+\)", r"\1", text)
