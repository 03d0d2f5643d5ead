"""Which stage does what in which tick: the schedules of a pipeline as numpy tables, and their cost.

S stages, v chunks of layers on each, M microbatches. Virtual stage j = chunk * S + stage, so that a microbatch walks
round the stages v times. In a *tick* every stage does the same: forward of one chunk, backward of one chunk, or both;
what a stage has nothing to do for runs on garbage and is masked. With the order k -> (chunk, microbatch) of
interleaving (Narayanan et al. 2021, arXiv:2104.04473), which goes through all chunks with S microbatches at a time:

    forward k of stage s     in tick k + s
    backward k of stage s    in tick (v S - 1) + (S - 1 - s) + k, of chunk v - 1 - chunk(k)

which is three phases: v S - 1 ticks forward, M v - (v - 1) S both, v S - 1 backward. A stage holds at most
(v + 1) S - 1 inputs, whatever M is.

What comes of a tick is handed on in that tick and used in the next one, never later: the tables need no queues.
`check_tables` proves it, tick by tick.

What a schedule costs, in closed form:

    ticks with forward = ticks with backward = M v + S - 1, of which each stage needs M v
    bubble fraction    = (S - 1) / (M v + S - 1)              time that stages of equal cost do nothing useful
    executed / useful  = (M + (S - 1) / v) / M                of the layers' FLOP, both on the same layers

Padding of uneven layers is executed as well: both then count chunk_layers for every chunk.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from meshkit.errors import ConfigError
from meshkit.hlo.pipeline_report import PipelineReport
from meshkit.parallel.pipeline.stack import Stack

SCHEDULES = ("1f1b", "interleaved_1f1b")
# Names of scopes in the program: what runs in a tick, and in it what is before, in and behind the layers.
TICK, FIRST, STAGE, LAST = "pipeline_tick", "pipeline_first", "pipeline_stage", "pipeline_last"


@dataclass(frozen=True)
class Slots:
    """One direction of a schedule, every array [ticks, stages].

    Attributes:
        valid: whether the stage has work in the tick.
        chunk, microbatch: of that work; 0 without.
        slot: where its input is kept, written by forward and read by backward; without work one that nobody needs.
    """

    valid: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    slot: np.ndarray

    @classmethod
    def empty(cls, ticks: int, stages: int) -> Slots:
        """No work at all."""
        return cls(np.zeros((ticks, stages), bool), *(np.zeros((ticks, stages), np.int32) for _ in range(3)))

    def put(self, ticks: np.ndarray, stage: int, chunks: np.ndarray, microbatches: np.ndarray) -> None:
        """Enters the work of a stage: a chunk and a microbatch, int [n], in each of these ticks, int [n]."""
        self.valid[ticks, stage] = True
        self.chunk[ticks, stage], self.microbatch[ticks, stage] = chunks, microbatches


@dataclass(frozen=True)
class Phase:
    """Ticks start <= t < stop in which every stage does the same.

    Attributes:
        name: `warmup`, `steady` or `drain`.
        forward, backward: what runs.
        outer: whether what stands before the first and after the last layer may have work in it.
        start, stop: first tick, and the one behind the last.
    """

    name: str
    start: int
    stop: int
    forward: bool
    backward: bool
    outer: bool

    @property
    def ticks(self) -> int:
        """Its length."""
        return self.stop - self.start


@dataclass(frozen=True)
class Tables:
    """A schedule in full.

    Attributes:
        schedule: one of SCHEDULES.
        stages, virtual_stages, microbatches: S, v and M.
        forward, backward: what each stage does.
        slots: inputs of chunks that a stage holds at most.
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
        """Whether a microbatch enters the first layer in each tick, and which."""
        found = self.forward.valid[:, 0] & (self.forward.chunk[:, 0] == 0)
        return found, self.forward.microbatch[:, 0]

    @property
    def scored(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether the last layer's backward, which needs the loss, runs in each tick, and of which microbatch."""
        found = self.backward.valid[:, -1] & (self.backward.chunk[:, -1] == self.virtual_stages - 1)
        return found, self.backward.microbatch[:, -1]

    @property
    def returning(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether a gradient leaves the first layer in each tick, and of which microbatch."""
        found = self.backward.valid[:, 0] & (self.backward.chunk[:, 0] == 0)
        return found, self.backward.microbatch[:, 0]


def check_sizes(schedule: str, stages: int, virtual_stages: int, microbatches: int) -> None:
    """Refuses sizes that a schedule cannot have.

    More than one virtual stage needs `interleaved_1f1b`, and microbatches that the stages divide.

    Raises:
        ConfigError: with the sizes, and the nearest that go.
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
    """Return the tables of a schedule, checked.

    Calls with the same sizes share one object: its arrays are not to be written into.

    Raises:
        ConfigError: sizes that it cannot have.
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
    """S ticks in which microbatches enter, leave and return; (v - 1) S in which they only go round; and again."""
    if chunks == 1:
        return [Phase("steady", start, stop, True, True, True)]
    phases = []
    for group in range(start, stop, stages * chunks):
        inner = min(group + stages * chunks, stop)
        phases.append(Phase("steady", group, group + stages, True, True, True))
        phases.append(Phase("steady", group + stages, inner, True, True, False))
    return phases


def _allot_slots(forward: Slots, backward: Slots, running: int) -> int:
    """Gives every input a slot from its forward to its backward, the lowest that is free; returns how many.

    Forward runs in the first `running` ticks.
    """
    ticks, stages = forward.valid.shape
    most, free = 0, 0
    for s in range(stages):
        live: dict[tuple[int, int], int] = {}
        for t in range(ticks):
            if t < running:
                free = next(i for i in range(len(live) + 1) if i not in live.values())
                forward.slot[t, s], most = free, max(most, free + 1)  # without work too: garbage needs a place
            if forward.valid[t, s]:
                live[int(forward.chunk[t, s]), int(forward.microbatch[t, s])] = free
            if backward.valid[t, s]:
                backward.slot[t, s] = live.pop((int(backward.chunk[t, s]), int(backward.microbatch[t, s])))
    return most


def check_tables(tables: Tables) -> None:
    """Proves that a schedule is one: everything once, nothing before what it needs, no input overwritten.

    Raises:
        AssertionError: it is not, which is a bug of ours.
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
    """Backward reads what forward of the same work has written; of one tick forward writes first."""
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
    """The phases cover all ticks and run all work; embedding runs one tick before its use, its gradient one after."""
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

    With `shared_head` all stages work on a microbatch's embedding and loss (`head = "vocab_parallel"`); else each does
    all of it, and one stage's counts.

    `picture` has a row for each stage and a text for each tick: `F3`, `B1`, `F3 B1`, with the chunk behind a dot where
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
    """`PipelineReport.useful`; the head runs once for each microbatch, the embedding in every tick that may need it."""
    embedded = 1 + sum(p.ticks for p in tables.phases if p.forward and p.outer)
    return {TICK: layers, STAGE: layers, FIRST: tables.microbatches / embedded / repeated, LAST: 1 / repeated}


def _work(tables: Tables, tick: int, stage: int) -> str:
    found = []
    for letter, slots in (("F", tables.forward), ("B", tables.backward)):
        if slots.valid[tick, stage]:
            chunk = f".{slots.chunk[tick, stage]}" if tables.virtual_stages > 1 else ""
            found.append(f"{letter}{slots.microbatch[tick, stage]}{chunk}")
    return " ".join(found)
