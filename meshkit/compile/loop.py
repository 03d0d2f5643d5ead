"""The loop that plan, rehearse and train compile by: options, compile, does it fit, schedule by predicted prices.

    CompileChoices -> chosen_options -> make -> fits? -> price of every instruction -> a profile that XLA's scheduler
    reads -> make again -> the fastest

XLA's latency hiding scheduler decides where a collective starts by how long it thinks that things take, and knows
neither the links of a cluster nor what its kernels sustain. A measured profile tells it (`meshkit profile` writes one);
predicted prices do so before the first run. What is made of them is simulated, and taken where it is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from meshkit.compile.cache import text_file
from meshkit.compile.options import CompileChoices, Option, chosen_options
from meshkit.config.cluster import Cluster
from meshkit.config.sections import PGLE_OPTION, PREDICTED
from meshkit.hlo.module import Schedule
from meshkit.predict.assumptions import Assumptions, assumptions_for
from meshkit.predict.simulate import simulate, step_pricer
from meshkit.units import format_bytes

# Of the memory that a step may take, what XLA does not count in it (cuDNN's workspace, gaps between blocks): a program
# that is not held to a limit leaves this much.
_SPARE = 0.02
# Another schedule pipelines other collectives, whose names the first profile lacks: the second has them.
# Further ones go back and forth.
ROUNDS = 2
_WHY = "train.pgle: XLA's own latencies know neither the links of this cluster nor what its kernels sustain"


def profile_text(costs: Mapping[str, float]) -> str:
    """Seconds of instructions as the text form of `tensorflow.profiler.ProfiledInstructionsProto`."""
    return "".join(f'costs {{ name: "{name}" cost_us: {s * 1e6:.6g} }}\n' for name, s in sorted(costs.items()))


def predicted_costs(schedule: Schedule, cluster: Cluster, assumptions: Assumptions) -> dict[str, float]:
    """Seconds of one run of every instruction that takes any, each as if nothing else ran."""
    pricer, found = step_pricer(schedule, cluster, assumptions), {}
    for body in schedule.computations.values():
        for i in body:
            if i.collective is not None:
                found[i.name] = pricer.collective_s(i)
            elif i.cost is not None:
                work = pricer.work(i)
                found[i.name] = max(work.arithmetic_s, work.memory_s, work.host_s)
    return {name: seconds for name, seconds in found.items() if seconds > 0}


class CompileAttempt(Protocol):
    """One compile of a program."""

    @property
    def chosen(self) -> Sequence[Option]:
        """Options that it was made with."""
        ...

    @property
    def log(self) -> tuple[str, ...]:
        """Lines that a user must see."""
        ...

    @property
    def peak_bytes(self) -> int:
        """GPU memory that it needs at once."""
        ...

    @functools.cached_property
    def schedule(self) -> Schedule:
        """Its instructions in order."""
        ...


def compile_to_fit[T: CompileAttempt](
    make: Callable[[Sequence[Option]], T],
    cluster: Cluster,
    choices: CompileChoices,
    *,
    agree: Callable[[str, Any], Any] = lambda topic, mine: mine,
) -> tuple[T, list[T]]:
    """A program compiled so that it fits and, where `train.pgle` asks for it, in the order that its prices give.

    Args:
        make: compiles it with some options.
        cluster: whose GPUs it is for, and whose prices they are.
        choices: of the user, of the program, and of its memory.
        agree: topic, what this process says -> what all processes take: they must compile the same.

    Returns:
        The fastest that fits, the first where none does; and those that it was chosen from.
    """
    made = [_fitting(make, cluster, choices, choices.derived)]
    (first,) = made

    def fits(one: T) -> bool:
        return one.peak_bytes <= _pool_bytes(cluster, choices)

    if choices.pgle != PREDICTED or not fits(first):  # no order of its instructions makes room for them
        return first, made
    names = {o.name for o in choices.derived}
    settled = [o for o in first.chosen if o.name in names]
    assumptions = assumptions_for({o.name: o.value for o in first.chosen})
    for round_ in range(ROUNDS):
        costs = predicted_costs(made[-1].schedule, cluster, assumptions)
        with text_file(agree(f"latencies {round_}", profile_text(costs))) as path:
            made.append(_fitting(make, cluster, choices, [*settled, Option(PGLE_OPTION, str(path), _WHY)]))

    def order(n: int) -> tuple[bool, float, int]:
        (step,) = simulate(made[n].schedule, cluster, assumptions=assumptions).timeline.steps
        return not fits(made[n]), step.window[1] - step.window[0], n

    best = made[agree("fastest", min(range(len(made)), key=order))]
    return replace(cast(Any, best), chosen=without_path(best.chosen)), made


def _fitting[T: CompileAttempt](
    make: Callable[[Sequence[Option]], T], cluster: Cluster, choices: CompileChoices, derived: Sequence[Option]
) -> T:
    """A program with the derived options as they are, or else with tight values, or without those that cost memory.

    The first that fits; where none does, the one with tight values.
    """
    pool_bytes = _pool_bytes(cluster, choices)

    def choose(some: Sequence[Option]) -> list[Option]:
        return chosen_options(cluster.gpu, choices.options, some)

    tight = [replace(o, value=o.tight[0], why=o.tight[1], tight=None) if o.tight else o for o in derived]
    loose = choose(derived)
    if loose != choose(tight):
        made = make(loose)
        if made.peak_bytes <= (1 - _SPARE) * pool_bytes:
            return made
    made = make(choose(tight))
    needed, cheap = made.peak_bytes, [o for o in tight if not o.costs_memory]
    if needed <= pool_bytes or len(cheap) == len(tight):
        return made
    plain = make(choose(cheap))
    if plain.peak_bytes > pool_bytes:
        return made
    said = (
        f"the options that hide the gathers of a layer are left out: they need {format_bytes(needed)} of GPU memory"
        f", more than the step may take, and without them it needs {format_bytes(plain.peak_bytes)}"
    )
    return replace(cast(Any, plain), log=(said, *plain.log))


def _pool_bytes(cluster: Cluster, choices: CompileChoices) -> float:
    """GPU memory that a program may take."""
    return cluster.gpu.memory_bytes * choices.memory_fraction


def without_path(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options as a report has them: that the latencies are predicted, not where their file lay."""
    return tuple(replace(o, value=PREDICTED) if o.name == PGLE_OPTION and o.why == _WHY else o for o in options)
