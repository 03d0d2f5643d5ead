"""Find the numbers of hosts with which a job can go on, in a child process of a launcher.

    {"file": experiment, "overrides": [...]} -> load -> planner.experiments_with_fewer_hosts -> [6, 4]

This needs jax and the model, which a launcher does not load.
"""

from __future__ import annotations

from typing import Any

from meshkit.children import serve
from meshkit.config.experiment import load
from meshkit.planning.planner import experiments_with_fewer_hosts


def answer(request: dict[str, Any]) -> list[int]:
    """Return the numbers of hosts, fewer than the experiment's, the largest first."""
    experiment = load(request["file"], request["overrides"])
    return [smaller.cluster.hosts_used for smaller in experiments_with_fewer_hosts(experiment)]


if __name__ == "__main__":
    serve(answer)
