"""`meshkit topo`: what this machine (or a recorded one) is, as a cluster, and where it differs from a declared one.

Level of the verbs, beside the planner; needs no jax. `meshkit.spec.discover` looks, this prints and compares.
"""

from __future__ import annotations

from meshkit.topo.report import TopoReport, topo_json_schema
from meshkit.topo.run import run
from meshkit.topo.view import render

__all__ = ["TopoReport", "render", "run", "topo_json_schema"]
