"""The reader process of `mk.live`: it turns the trace of one step into a report. To start fast, it imports no jax."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshkit.children import serve
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.verbs.profile.profiler import TracedJob, measure_traces


def main() -> None:
    """Answer each request with a report. A request names the folder `trace`, and the facts of `TracedJob`."""

    def answer(request: Mapping[str, Any]) -> str:
        mesh, cluster = request["mesh"], request["cluster"]
        job = TracedJob(
            mesh and MeshSpec.parse(mesh),
            cluster and Cluster.load(cluster),
            devices={int(number): device for number, device in request["devices"].items()},
        )
        return measure_traces(Path(request["trace"]), job).report.model_dump_json()

    os.nice(19)
    serve(answer)


if __name__ == "__main__":
    main()
