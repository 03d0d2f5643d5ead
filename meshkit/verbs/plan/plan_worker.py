"""A process that plans variants: `python -m meshkit.verbs.plan.plan_worker`.

It reads one request a line on stdin, `{"experiment": PATH, "overrides": [...], "settings": [...]}`, and answers each
with one line on stdout, an Outcome. Whatever else would be printed goes to stderr. It ends with stdin, or its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

from meshkit.errors import MeshkitError
from meshkit.verbs.plan.outcome import Outcome, outcome_of


def main() -> None:
    """Answers requests until there are no more."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and decides
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        outcome = plan_variant(request["experiment"], request["overrides"], tuple(request["settings"]))
        answers.write(outcome.model_dump_json() + "\n")
        answers.flush()


def plan_variant(experiment: str, overrides: Sequence[str], settings: tuple[str, ...]) -> Outcome:
    """The outcome of an experiment file with overrides and settings laid over it; an error is an outcome, too."""
    from meshkit.config.emit import inline
    from meshkit.config.experiment import load
    from meshkit.verbs.plan.planner import plan_experiment

    start = time.perf_counter()
    mesh: dict[str, str] = {}
    try:
        loaded = load(experiment, (*overrides, *settings))
        mesh = {name: inline(value) for name, value in loaded.mesh.to_dict().items()}
        plan = plan_experiment(loaded)
    except MeshkitError as e:
        wall_s = time.perf_counter() - start
        return Outcome(settings=settings, status="error", mesh=mesh, error=e.message, wall_s=wall_s)
    wall_s = time.perf_counter() - start
    return outcome_of(plan.report, settings, mesh, wall_s, plan.compiled.host_peak_bytes)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
