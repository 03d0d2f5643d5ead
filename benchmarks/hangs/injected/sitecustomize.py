"""Make a process of a gang under test get stuck as it enters a phase. meshkit has no code for it."""

import json
import os
import sys


def install(plant):
    """Wrap the methods of `Phases` in this process."""
    from meshkit.runs.phases import Phases

    enter, begin = Phases.enter, Phases.__enter__

    def stuck():
        from benchmarks.hangs.planted import get_stuck

        get_stuck()

    def entered(self, phase, step=None, **named):
        enter(self, phase, step, **named)
        if phase == plant["kind"] and phase not in ("start", "data") and self.step >= plant.get("step", 0):
            stuck()
        if plant["kind"] == "memory" and phase == "step" and self.step >= plant["step"]:
            from benchmarks.hangs.planted import run_out_of_memory

            run_out_of_memory()

    def begun(self):
        found = begin(self)
        if plant["kind"] == "start":
            stuck()
        return found

    Phases.enter, Phases.__enter__ = entered, begun


told = json.loads(os.environ.get("HANG_PLANT", "{}"))
if told and os.environ.get("MESHKIT_PROCESS_ID") == str(told["rank"]) and "train" in sys.orig_argv:
    install(told)
