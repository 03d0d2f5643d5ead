"""`meshkit schema`: print the JSON Schema of an output, or of the experiment file."""

from __future__ import annotations

import importlib
import json
from typing import Annotated, Any

import typer

from meshkit.console import output
from meshkit.errors import ConfigError

# Name of an output or file -> its model, or the function that makes its JSON Schema.
SCHEMAS = {
    "bench": "meshkit.verbs.bench.bench_report:BenchReport",
    "compare": "meshkit.report.compare:Comparison",
    "doctor": "meshkit.verbs.doctor.node:Diagnosis",
    "experiment": "meshkit.config.experiment:experiment_json_schema",
    "explain": "meshkit.verbs.explain.explainer:Explanation",
    "report": "meshkit.report.schema:Report",
    "scaling": "meshkit.search.scaling:ScalingReport",
    "topo": "meshkit.verbs.topo.topo:TopoReport",
    "tune": "meshkit.search.tune_report:TuneReport",
}


def schema(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help=f"One of {', '.join(SCHEMAS)}.",
            show_default=False,
        ),
    ],
) -> None:
    """Print the JSON Schema of an output, or of the experiment file."""
    name = name.removeprefix("meshkit.").removesuffix("/1")  # An output calls its schema `meshkit.report/1`.
    if name not in SCHEMAS:
        raise ConfigError(f"there is no schema '{name}'.", hint=f"one of {', '.join(SCHEMAS)}")
    output(json.dumps(schema_of(name), indent=2))


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a name in `SCHEMAS`. Only the module that defines it is imported."""
    module, _, maker = SCHEMAS[name].partition(":")
    found = getattr(importlib.import_module(module), maker)
    return found.model_json_schema(mode="serialization") if isinstance(found, type) else found()
