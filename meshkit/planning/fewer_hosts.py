"""The child process in which a launcher, which has no jax, finds the numbers of hosts that a job can go on with.

{"file": experiment, "overrides": [...]} -> load -> planner.experiments_with_fewer_hosts -> [6, 4]
"""

from __future__ import annotations

from typing import Any

from meshkit.children import serve
from meshkit.config.experiment import load
from meshkit.planning.planner import experiments_with_fewer_hosts


def answer(request: dict[str, Any]) -> list[int]:
    """Return the numbers of hosts, the largest first."""
    experiment = load(request["file"], request["overrides"])
    return [smaller.cluster.hosts for smaller in experiments_with_fewer_hosts(experiment)]


if __name__ == "__main__":
    serve(answer)
