"""The schedules of a pipeline as numpy tables (the work of each stage in each tick), and their cost.

There are S stages, v chunks of layers on each, and M microbatches. Virtual stage j is chunk * S + stage, so a
microbatch goes around the stages v times. In a *tick* every stage runs the same operations: forward of one chunk,
backward of one chunk, or both. A stage without work runs on garbage, whose results are masked. Work is numbered
k -> (chunk, microbatch) in the order of interleaving (Narayanan et al. 2021, arXiv:2104.04473): S microbatches at a
time go through all chunks.

    forward k of stage s     in tick k + s
    backward k of stage s    in tick (v S - 1) + (S - 1 - s) + k, of chunk v - 1 - chunk(k)

There are three phases: v S - 1 ticks of forward, M v - (v - 1) S of both, v S - 1 of backward. A stage holds at most
(v + 1) S - 1 inputs, whatever M is.

Outputs of a tick are sent in that tick and used in the next one, never later, so the tables need no queues.
`check_tables` verifies this for every tick.

The cost of a schedule, in closed form:

    ticks with forward = ticks with backward = M v + S - 1, of which each stage needs M v
    bubble fraction    = (S - 1) / (M v + S - 1)              share of time without useful work, for equal stages
    executed / useful  = (M + (S - 1) / v) / M                of the layers' FLOP, without padding

Uneven layers are padded. Then every chunk executes chunk_layers layers, so bubble and executed / useful are larger.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from meshkit.errors import ConfigError
from meshkit.hlo.pipeline_report import PipelineReport
from meshkit.parallel.pipeline.stack import Stack

SCHEDULES = ("1f1b", "interleaved_1f1b")
# Names of scopes in the program: a tick, and in it the work before, in and after the layers.
TICK, FIRST, STAGE, LAST = "pipeline_tick", "pipeline_first", "pipeline_stage", "pipeline_last"


@dataclass(frozen=True)
class Slots:
    """One direction of a schedule, every array [ticks, stages].

    Attributes:
        valid: whether the stage has work in the tick.
        chunk, microbatch: of that work; 0 without work.
        slot: slot of its input, which forward writes and backward reads; without work, forward writes to a free slot.
    """

    valid: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    slot: np.ndarray

    @classmethod
    def empty(cls, ticks: int, stages: int) -> Slots:
        """Return tables without work."""
        return cls(np.zeros((ticks, stages), bool), *(np.zeros((ticks, stages), np.int32) for _ in range(3)))

    def put(self, ticks: np.ndarray, stage: int, chunks: np.ndarray, microbatches: np.ndarray) -> None:
        """Enter a stage's work: in each of `ticks`, int [n], a chunk and a microbatch, both int [n]."""
        self.valid[ticks, stage] = True
        self.chunk[ticks, stage], self.microbatch[ticks, stage] = chunks, microbatches


@dataclass(frozen=True)
class Phase:
    """Ticks start <= t < stop, in which the same operations run.

    Attributes:
        name: `warmup`, `steady` or `drain`.
        forward, backward: whether each of them runs.
        outer: whether the embedding and the loss may have work in this phase.
        start, stop: first tick, and last tick + 1.
    """

    name: str
    start: int
    stop: int
    forward: bool
    backward: bool
    outer: bool

    @property
    def ticks(self) -> int:
        """Number of ticks."""
        return self.stop - self.start


@dataclass(frozen=True)
class Tables:
    """A schedule in full.

    Attributes:
        schedule: one of SCHEDULES.
        stages, virtual_stages, microbatches: S, v and M.
        forward, backward: the work of each stage.
        slots: the most chunk inputs that a stage holds.
        phases: in order, without gaps.
    """

    schedule: str
    stages: int
    virtual_stages: int
    microbatches: int
    forward: Slots
    backward: Slots
    slots: int
    phases: tuple[Phase, ...]

    @property
    def ticks(self) -> int:
        """Ticks of a step."""
        return len(self.forward.valid)

    @property
    def entering(self) -> tuple[np.ndarray, np.ndarray]:
        """For each tick, whether a microbatch enters the first layer, and its number."""
        found = self.forward.valid[:, 0] & (self.forward.chunk[:, 0] == 0)
        return found, self.forward.microbatch[:, 0]

    @property
    def scored(self) -> tuple[np.ndarray, np.ndarray]:
        """For each tick, whether the last layer's backward runs, which needs the loss, and for which microbatch."""
        found = self.backward.valid[:, -1] & (self.backward.chunk[:, -1] == self.virtual_stages - 1)
        return found, self.backward.microbatch[:, -1]

    @property
    def returning(self) -> tuple[np.ndarray, np.ndarray]:
        """For each tick, whether a gradient leaves the first layer, and of which microbatch."""
        found = self.backward.valid[:, 0] & (self.backward.chunk[:, 0] == 0)
        return found, self.backward.microbatch[:, 0]


def check_sizes(schedule: str, stages: int, virtual_stages: int, microbatches: int) -> None:
    """Refuse sizes that a schedule cannot have.

    More than one virtual stage needs `interleaved_1f1b`, and a number of microbatches that the stages divide.

    Raises:
        ConfigError: the message has the sizes, and the nearest ones that the schedule can have.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"no pipeline schedule '{schedule}'.", hint=f"one of {', '.join(SCHEDULES)}")
    if min(stages, virtual_stages, microbatches) < 1:
        raise ConfigError(
            f"a pipeline needs at least one stage, chunk and microbatch, not {stages}, {virtual_stages} and "
            f"{microbatches}."
        )
    if virtual_stages > 1 and schedule == "1f1b":
        raise ConfigError(
            f"schedule '{schedule}' has one virtual stage on each stage, not {virtual_stages}.",
            hint='schedule = "interleaved_1f1b"',
        )
    if virtual_stages > 1 and microbatches % stages:
        below, above = microbatches // stages * stages, -(-microbatches // stages) * stages
        near = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"{microbatches} microbatches are not a multiple of {stages} stages, which {virtual_stages} virtual stages "
            "need.",
            hint=f"microbatches = {near}",
        )


@functools.lru_cache(maxsize=32)
def make_tables(schedule: str, stages: int, virtual_stages: int, microbatches: int) -> Tables:
    """Return the checked tables of a schedule.

    Calls with the same sizes share one object, so do not write into its arrays.

    Raises:
        ConfigError: sizes that the schedule cannot have.
    """
    check_sizes(schedule, stages, virtual_stages, microbatches)
    tables = _one_forward_one_backward(schedule, stages, virtual_stages, microbatches)
    check_tables(tables)
    return tables


def _order(stages: int, virtual_stages: int, microbatches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    steps = np.arange(microbatches * virtual_stages)
    group, rest = np.divmod(steps, stages * virtual_stages)
    return steps, rest // stages, group * stages + rest % stages


def _one_forward_one_backward(schedule: str, stages: int, chunks: int, microbatches: int) -> Tables:
    (k, chunk, microbatch), warmup = _order(stages, chunks, microbatches), chunks * stages - 1
    steady = warmup + len(k) - (chunks - 1) * stages
    ticks = steady + warmup
    forward, backward = Slots.empty(ticks, stages), Slots.empty(ticks, stages)
    for s in range(stages):
        forward.put(k + s, s, chunk, microbatch)
        backward.put(warmup + stages - 1 - s + k, s, chunks - 1 - chunk, microbatch)
    slots = _allot_slots(forward, backward, steady)
    phases = (
        Phase("warmup", 0, warmup, True, False, True),
        *_steady_phases(warmup, steady, stages, chunks),
        Phase("drain", steady, ticks, False, True, True),
    )
    phases = tuple(p for p in phases if p.ticks)
    return Tables(schedule, stages, chunks, microbatches, forward, backward, slots, phases)


def _steady_phases(start: int, stop: int, stages: int, chunks: int) -> list[Phase]:
    """Return alternating phases: S ticks with work of embedding and loss, then (v - 1) S ticks without it."""
    if chunks == 1:
        return [Phase("steady", start, stop, True, True, True)]
    phases = []
    for group in range(start, stop, stages * chunks):
        inner = min(group + stages * chunks, stop)
        phases.append(Phase("steady", group, group + stages, True, True, True))
        phases.append(Phase("steady", group + stages, inner, True, True, False))
    return phases


def _allot_slots(forward: Slots, backward: Slots, running: int) -> int:
    """Give every input the lowest free slot from its forward to its backward; return the number of slots.

    Forward runs in the first `running` ticks.
    """
    ticks, stages = forward.valid.shape
    most, free = 0, 0
    for s in range(stages):
        live: dict[tuple[int, int], int] = {}
        for t in range(ticks):
            if t < running:
                free = next(i for i in range(len(live) + 1) if i not in live.values())
                forward.slot[t, s], most = free, max(most, free + 1)  # also without work, for the garbage
            if forward.valid[t, s]:
                live[int(forward.chunk[t, s]), int(forward.microbatch[t, s])] = free
            if backward.valid[t, s]:
                backward.slot[t, s] = live.pop((int(backward.chunk[t, s]), int(backward.microbatch[t, s])))
    return most


def check_tables(tables: Tables) -> None:
    """Verify a schedule: all work runs once and after its inputs, and no kept input is overwritten.

    Raises:
        AssertionError: the schedule is wrong, which is a bug of meshkit.
    """
    done = {"forward": _ticks_of(tables.forward, tables), "backward": _ticks_of(tables.backward, tables)}
    last = tables.stages * tables.virtual_stages - 1
    for (j, m), tick in done["forward"].items():
        if j:
            assert done["forward"][j - 1, m] == tick - 1, f"forward of virtual stage {j}, microbatch {m} gets no input"
        back = done["backward"][j, m]
        assert back >= tick, f"virtual stage {j} runs backward of microbatch {m} before forward"
        if j < last:
            before = done["backward"][j + 1, m]
            assert before == back - 1, f"backward of virtual stage {j}, microbatch {m} gets no gradient"
    _check_slots(tables)
    _check_phases(tables)


def _ticks_of(slots: Slots, tables: Tables) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for t, s in np.argwhere(slots.valid).tolist():
        key = int(slots.chunk[t, s]) * tables.stages + s, int(slots.microbatch[t, s])
        assert key not in found, f"virtual stage {key[0]} has microbatch {key[1]} twice"
        found[key] = t
    wanted = tables.stages * tables.virtual_stages * tables.microbatches
    assert len(found) == wanted, f"{len(found)} of {wanted} pieces of work are scheduled"
    return found


def _check_slots(tables: Tables) -> None:
    """Check that backward reads what forward of the same work wrote; within a tick forward writes first."""
    for s in range(tables.stages):
        held: dict[int, tuple[int, int]] = {}
        waiting: set[int] = set()
        for t in range(tables.ticks):
            f, b = tables.forward, tables.backward
            slot = int(f.slot[t, s])
            assert 0 <= slot < tables.slots
            if any(p.forward and p.start <= t < p.stop for p in tables.phases):
                assert slot not in waiting, f"tick {t} overwrites slot {slot} of stage {s}"
            if f.valid[t, s]:
                held[slot] = int(f.chunk[t, s]), int(f.microbatch[t, s])
                waiting.add(slot)
            if b.valid[t, s]:
                slot = int(b.slot[t, s])
                assert held[slot] == (int(b.chunk[t, s]), int(b.microbatch[t, s]))
                waiting.discard(slot)
        assert not waiting


def _check_phases(tables: Tables) -> None:
    """Check that the phases run all work; the embedding runs one tick before its use, its gradient one tick after."""
    assert [p.start for p in tables.phases] == [0, *(p.stop for p in tables.phases[:-1])]
    assert tables.phases[-1].stop == tables.ticks
    at = [p for p in tables.phases for _ in range(p.ticks)]
    for t in range(tables.ticks):
        assert at[t].forward or not tables.forward.valid[t].any()
        assert at[t].backward or not tables.backward.valid[t].any()
        if tables.entering[0][t] and t:
            assert _runs_outside(at[t - 1], "forward"), f"nothing embeds what enters in tick {t}"
        if tables.scored[0][t]:
            assert _runs_outside(at[t], "forward"), f"tick {t} has no loss"
        if tables.returning[0][t] and t + 1 < tables.ticks:
            assert _runs_outside(at[t + 1], "backward"), f"nothing takes the gradient of tick {t}"


def _runs_outside(phase: Phase, direction: str) -> bool:
    return phase.outer and getattr(phase, direction)


def make_report(tables: Tables, stack: Stack, *, axis: str = "pipeline", shared_head: bool = False) -> PipelineReport:
    """Return the report of a schedule on a stack of layers.

    With `shared_head` (`head = "vocab_parallel"`) all stages share the work of a microbatch's embedding and loss.
    Otherwise each stage does all of it, and only one stage's work is useful.

    `picture` has a row for each stage and a text for each tick: `F3`, `B1`, `F3 B1`, with the chunk after a dot where
    there are several (`F3.1`), empty where the stage waits.

    Padding of the stack counts as executed, not as useful.
    """
    s, v, m = tables.stages, tables.virtual_stages, tables.microbatches
    executed = (m * v + s - 1) * stack.chunk_layers * s
    useful = m * stack.layers
    ticks = {name: sum(p.ticks for p in tables.phases if p.name == name) for name in ("warmup", "steady", "drain")}
    return PipelineReport(
        axis=axis,
        schedule=tables.schedule,
        stages=s,
        virtual_stages=v,
        microbatches=m,
        layers=stack.layers,
        padding_layers=stack.size - stack.layers,
        warmup_ticks=ticks["warmup"],
        steady_ticks=ticks["steady"],
        drain_ticks=ticks["drain"],
        slots=tables.slots,
        bubble_fraction=1 - useful / executed,
        executed_over_useful=executed / useful,
        picture=tuple(tuple(_work(tables, t, stage) for t in range(tables.ticks)) for stage in range(s)),
        useful=_useful(tables, useful / executed, 1 if shared_head else s),
    )


def _useful(tables: Tables, layers: float, repeated: int) -> dict[str, float]:
    """Return `PipelineReport.useful`. The head runs once per microbatch, the embedding in any tick that may need it."""
    embedded = 1 + sum(p.ticks for p in tables.phases if p.forward and p.outer)
    return {TICK: layers, STAGE: layers, FIRST: tables.microbatches / embedded / repeated, LAST: 1 / repeated}


def _work(tables: Tables, tick: int, stage: int) -> str:
    found = []
    for letter, slots in (("F", tables.forward), ("B", tables.backward)):
        if slots.valid[tick, stage]:
            chunk = f".{slots.chunk[tick, stage]}" if tables.virtual_stages > 1 else ""
            found.append(f"{letter}{slots.microbatch[tick, stage]}{chunk}")
    return " ".join(found)
