"""`meshkit schema`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from meshkit.errors import ConfigError


def schema(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="report, compare, explain, topo, bench, tune, scaling or experiment.",
            show_default=False,
        ),
    ],
) -> None:
    """Print the JSON Schema of an output, or of the experiment file."""
    makers = schemas()
    name = name.removeprefix("meshkit.").removesuffix("/1")
    if name not in makers:
        raise ConfigError(f"there is no schema '{name}'.", hint=", ".join(sorted(makers)))
    print(json.dumps(makers[name](), indent=2))


def schemas() -> dict[str, Any]:
    """Name of an output or file -> a function that makes its JSON Schema."""
    from meshkit.config.experiment import experiment_json_schema
    from meshkit.report.compare import Comparison
    from meshkit.report.schema import report_json_schema
    from meshkit.verbs.bench.bench_report import bench_json_schema
    from meshkit.verbs.topo.topo import topo_json_schema

    def explanation() -> dict:
        from meshkit.verbs.explain.explainer import Explanation

        return Explanation.model_json_schema(mode="serialization")

    def tuning() -> dict:
        from meshkit.verbs.tune.tune_report import tune_json_schema

        return tune_json_schema()

    def scaling() -> dict:
        from meshkit.verbs.plan.scaling import scaling_json_schema

        return scaling_json_schema()

    def diagnosis() -> dict:
        from meshkit.verbs.doctor.diagnosis import Diagnosis

        return Diagnosis.model_json_schema(mode="serialization")

    return {
        "doctor": diagnosis,
        "tune": tuning,
        "scaling": scaling,
        "report": report_json_schema,
        "topo": topo_json_schema,
        "bench": bench_json_schema,
        "compare": lambda: Comparison.model_json_schema(mode="serialization"),
        "explain": explanation,
        "experiment": experiment_json_schema,
    }
