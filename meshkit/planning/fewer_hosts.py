"""Find the numbers of hosts with which a job can go on after it has lost some: those from `launch.min_hosts` on.

    Experiment -> launch.hosts, one number after another -> load -> the step on a described mesh -> Experiments that fit

`python -m meshkit.planning.fewer_hosts FILE KEY=VALUE ...` prints the numbers as JSON for a launcher, which has no jax.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from meshkit.config.experiment import Experiment, load
from meshkit.errors import ConfigError
from meshkit.planning.planner import absent_step


def experiments_with_fewer_hosts(experiment: Experiment) -> Iterator[Experiment]:
    """Yield the experiment on fewer hosts, the most hosts first.

    A number is passed over if it does not divide a mesh axis, the global batch, or a dim that the axis shards.
    """
    document, most = experiment.document, experiment.cluster.hosts
    set_by_user = [override.raw for override in document.overrides] if document is not None else []
    for hosts in range(most - 1, (experiment.launch.min_hosts or most) - 1, -1):
        try:
            smaller = load(experiment.file, [*set_by_user, f"launch.hosts={hosts}"])
            absent_step(smaller)
        except ConfigError:
            continue
        yield smaller


if __name__ == "__main__":
    found = load(sys.argv[1], sys.argv[2:])
    print(json.dumps([smaller.cluster.hosts for smaller in experiments_with_fewer_hosts(found)]))
