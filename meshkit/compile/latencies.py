"""XLA's schedule made for plan's own prices: profile-guided latency estimation without a profile.

    program -> Schedule -> price of every instruction -> a profile that XLA's scheduler reads -> another program

XLA's latency hiding scheduler decides where a collective starts by how long it thinks that things take, and knows
neither the links of a cluster nor what its kernels sustain. A measured profile tells it (`meshkit profile` writes one);
these prices do so before the first run. What is made of them is simulated, and taken where it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshkit.compile.cache import text_file
from meshkit.compile.options import Option
from meshkit.config.cluster import Cluster
from meshkit.config.sections import PGLE_OPTION, PREDICTED
from meshkit.hlo.module import Schedule
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.pricing import Pricer
from meshkit.predict.simulate import simulate

# Another schedule pipelines other collectives, whose names the first profile had not got: a second round knows them.
# Later rounds go back and forth.
ROUNDS = 2
_WHY = "train.pgle: XLA's own latencies know neither the links of this cluster nor what its kernels sustain"


def profile_text(costs: Mapping[str, float]) -> str:
    """Seconds of instructions as the text form of `tensorflow.profiler.ProfiledInstructionsProto`."""
    return "".join(f'costs {{ name: "{name}" cost_us: {s * 1e6:.6g} }}\n' for name, s in sorted(costs.items()))


def predicted_costs(schedule: Schedule, cluster: Cluster, assumptions: Assumptions) -> dict[str, float]:
    """Seconds of one run of every instruction that takes any: of a collective on its own, of a kernel beside none."""
    pricer, found = Pricer(cluster, assumptions), {}
    for body in schedule.computations.values():
        for i in body:
            if i.collective is not None:
                found[i.name] = pricer.collective_s(i)
            elif i.cost is not None:
                work = pricer.work(i)
                found[i.name] = max(work.arithmetic_s, work.memory_s, work.host_s)
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def schedule_by_prices[T](
    first: T,
    remake: Callable[[Option], T],
    read: Callable[[T], Schedule],
    cluster: Cluster,
    *,
    assumptions: Assumptions,
    fits: Callable[[T], bool],
    agree: Callable[[str, Any], Any] = lambda topic, mine: mine,
) -> T:
    """The fastest of a program and those that XLA schedules by its prices; the program itself where it does not fit.

    Args:
        first: as XLA schedules it on its own.
        remake: compiles it with one option more.
        read: of a program.
        cluster: whose prices they are.
        assumptions: of the prices.
        fits: whether a program fits its memory.
        agree: topic, what this process says -> what all processes take: they must compile the same.
    """
    made = [first]
    if not fits(first):  # no order of its instructions makes room for them
        return first
    for round_ in range(ROUNDS):
        costs = predicted_costs(read(made[-1]), cluster, assumptions)
        with text_file(agree(f"latencies {round_}", profile_text(costs))) as path:
            made.append(remake(Option(PGLE_OPTION, str(path), _WHY)))

    def order(n: int) -> tuple[bool, float, int]:
        (step,) = simulate(read(made[n]), cluster, assumptions=assumptions).timeline.steps
        return not fits(made[n]), step.window[1] - step.window[0], n

    return made[agree("fastest", min(range(len(made)), key=order))]


def without_path(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options as a report has them: that the latencies are predicted, not where their file lay."""
    return tuple(replace(o, value=PREDICTED) if o.name == PGLE_OPTION and o.why == _WHY else o for o in options)
