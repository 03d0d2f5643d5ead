"""JSON Schema of the experiment file, for editors and for `meshkit schema experiment`."""

from __future__ import annotations

from typing import Any

from meshkit.config import catalog
from meshkit.config.cluster import shipped_clusters
from meshkit.config.presets import PRESETS
from meshkit.config.tables import ClusterTable, ExperimentTable


def experiment_json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of an experiment file."""
    schema = ExperimentTable.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "meshkit experiment"
    schema["properties"]["cluster"] |= _cluster_schema()
    schema["$defs"]["RulesTable"]["properties"]["preset"]["enum"] = sorted(PRESETS)
    return schema


def _cluster_schema() -> dict[str, Any]:
    """A name, a path, or a table; a table with `name` or `file` needs no further key."""
    table = ClusterTable.model_json_schema()
    properties = table["properties"]
    properties["gpu"]["enum"] = list(catalog.gpu_keys())
    properties["nic"]["enum"] = list(catalog.nic_keys())
    properties["file"] = {"type": "string", "description": "a cluster file that the other keys override"}
    table["anyOf"] = [{"required": ["name"]}, {"required": ["file"]}, {"required": table.pop("required")}]
    return {"oneOf": [{"type": "string", "examples": list(shipped_clusters())}, table]}
