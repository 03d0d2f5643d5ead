"""`meshkit topo`: what this machine (or a recorded one) is, as a cluster, and where it differs from a declared one."""

from __future__ import annotations

from meshkit.verbs.topo.topo import run
from meshkit.verbs.topo.topo_report import TopoReport, topo_json_schema
from meshkit.verbs.topo.topo_view import render

__all__ = ["TopoReport", "render", "run", "topo_json_schema"]
