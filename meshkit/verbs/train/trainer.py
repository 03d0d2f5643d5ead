"""`meshkit train`: run the step of an experiment on attached devices, and write a run folder.

    experiment -> mesh -> compiled step -> loop [ batch -> step -> hooks, metrics, checkpoint ] -> TrainResult

The run folder holds `experiment.toml` (resolved), `metrics.jsonl`, `checkpoints/` and `trace/`. A run with the same
folder resumes from it. Only one job at a time can write it (`runs/owner.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
from rich.console import Console

from meshkit.compile.attached import CompiledStep, compile_cache, compile_step
from meshkit.config.experiment import Experiment
from meshkit.console import say as say_line
from meshkit.console import stderr
from meshkit.distributed.environment import read_gang
from meshkit.distributed.join import Agreement, is_first_process, join_gang
from meshkit.linting.examine import announce_findings
from meshkit.planning.resolved import examine_experiment, find_sinks, find_tokenizer, resolve
from meshkit.predict.kernels import compute_peak_flops
from meshkit.runs.hang_watch import HangWatch
from meshkit.runs.metrics import SinkCode, finite, read_metrics
from meshkit.runs.owner import RunOwner, take_run
from meshkit.runs.phases import Goodput, GoodputLog, Phases, read_goodput
from meshkit.runs.snapshots import SNAPSHOTS, SPARE_VARIABLE
from meshkit.sharding import build_mesh
from meshkit.sharding.mesh import device_memory
from meshkit.step.data import Batches, Data, Stream, check_tokens, open_data
from meshkit.step.program import StepFacts
from meshkit.step.state import TrainState
from meshkit.step.train_step import TrainProgram, build_train_step
from meshkit.trace.capture import CapturedStep
from meshkit.units import format_percent
from meshkit.verbs.checkpoint.snapshots import Snapshots
from meshkit.verbs.checkpoint.store import CheckpointStore, open_store, run_of_checkpoints
from meshkit.verbs.train.captures import Captures, planned_capture
from meshkit.verbs.train.hooks import Hook, TrainingStep, find_hooks
from meshkit.verbs.train.order import agree_on_order, order_of_step
from meshkit.verbs.train.records import StepRecords, speed_of
from meshkit.verbs.train.session import (
    Drained,
    Preempted,
    RunLog,
    StepProgress,
    StopRequest,
    check_experiment_file,
    write_experiment_file,
)
from meshkit.verbs.train.watch import (
    ReplicaCheck,
    StepCaptures,
    Stragglers,
    errors_of_this_process,
    slowest_clock_mhz,
)
from meshkit.weights.files import first_state


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    folder: str
    """The run folder."""
    step: int
    """The number of steps done by all attempts."""
    resumed_step: int
    """The step from which this attempt resumed; 0 for a new run."""
    loss: float | None
    """Loss of the last step, nats per token."""
    evaluation_loss: float | None
    """The last loss on held-out data; None if this attempt made no evaluation."""
    unigram_entropy_nats: float | None
    """Unigram entropy of the corpus; a model with a lower loss has learned more than frequencies."""
    step_time_s: float | None
    """Median time of this attempt's steps."""
    tokens_per_s: float | None
    """Tokens per second at `step_time_s`; None for examples without tokens."""
    mfu: float | None
    """Model FLOPs utilization at `step_time_s`; None if the peak FLOP/s is not known."""
    compile_s: float
    wall_s: float
    """Seconds of this attempt."""
    compile_cached: bool | None = None
    """Whether the compiled step came from the compilation cache; None without a cache."""
    goodput: Goodput | None = None
    """The wall time of all attempts by phase."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as `meshkit train --json` prints it."""
        values = {name: finite(value) for name, value in asdict(self).items()}
        return {"schema": "meshkit.train/1", **values, "goodput": self.goodput.to_dict() if self.goodput else None}


def train(
    experiment: Experiment,
    out: str | Path,
    *,
    hooks: Sequence[Hook] = (),
    console: Console | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train the experiment in the folder `out`, and resume from the folder if it has a run.

    Args:
        experiment: loaded from a file.
        out: the run folder.
        hooks: called between the steps, before those that `train.hooks` names. Their exceptions are passed on.
        console: the console for progress; stderr by default.
        show_progress: False prints nothing.

    Raises:
        ConfigError: the folder belongs to another model or to a job that runs, or the experiment does not fit the
            attached devices.
        RunError: a checkpoint could not be written, replicas of the state differ, or a device has too little memory.
        Preempted: SIGTERM came; a checkpoint is saved.
        KeyboardInterrupt: SIGINT came; a checkpoint is saved if the experiment writes any.
    """
    started = time.perf_counter()
    folder = Path(out)
    console = console or stderr()
    memory = device_memory(experiment.cluster, experiment.train, experiment.file)
    with memory, Phases() as phases, StopRequest() as stop, ExitStack() as around:
        changes = check_experiment_file(experiment, folder)
        phases.enter("start", part="rendezvous")  # in a hang, shows which processes are here
        join_gang()  # joins the job that the environment describes, if any
        phases.enter("start", part="devices")
        watch = around.enter_context(HangWatch(phases, folder, say_line))
        note = lambda text: console.print(f"note: {text}", style="yellow", markup=False)
        owner = around.enter_context(_own(folder, note))
        goodput = around.enter_context(GoodputLog(folder if is_first_process() else None, phases))
        mesh = build_mesh(experiment.mesh, experiment.cluster)
        cache = around.enter_context(compile_cache(note))
        phases.begin_part("program")
        spec = resolve(experiment)
        program = build_train_step(spec, mesh, experiment.rules)
        announce_findings(examine_experiment(experiment, program), console)
        phases.begin_part("data")
        data = open_data(spec, find_tokenizer(experiment))
        check_tokens(spec, data, program.model.abstract_model())
        sinks = find_sinks(experiment)
        own_hooks = (*hooks, *find_hooks(experiment))
        for text in (*program.notes, *changes):
            note(text)
        phases.enter("compile", part="trace and lower")
        missed = cache.misses if cache else None
        compiled = compile_step(program, experiment.cluster, experiment.placement, experiment.xla)
        phases.begin_part("executable", ago_s=compiled.executable_s)
        compile_cached = cache.misses == missed if cache else None
        if jax.process_count() > 1:
            phases.enter("compile", part="agreement")  # in a hang, shows that this process has compiled
            watch.order = order_of_step(compiled.program, cast(jax.sharding.Mesh, mesh), experiment.placement, folder)
            agree_on_order(watch.order, folder)
        with StepProgress(console, experiment.train.steps, enabled=show_progress) as progress:
            run = _Run(
                experiment, folder, program, compiled, data, sinks, own_hooks, stop, progress, phases, goodput, owner
            )
            run.execute()
    return dataclasses.replace(run.result(time.perf_counter() - started), compile_cached=compile_cached)


_ownerships = itertools.count()  # the same number in every process, since all call `_own` in the same order
_OWN_S = 3600.0  # longer than process 0 may wait for an earlier owner


def _own(folder: Path, say: Callable[[str], None]) -> RunOwner:
    """Make the job the owner of the run folder: process 0 takes it, and all processes get the run's ID and token."""
    gang = read_gang()

    def take(_: Any) -> tuple[str, int]:
        nonlocal mine
        attempt = gang.attempt if gang is not None else 0
        mine = take_run(folder, attempt=attempt, known_run=lambda: run_of_checkpoints(folder), say=say)
        return mine.run, mine.token

    mine: RunOwner | None = None
    run, token = Agreement(f"owner/{next(_ownerships)}").reach("take", None, take, timeout_s=_OWN_S)
    return mine or RunOwner(run, token)


@dataclass
class _Run:
    """One attempt at a run: the loop, and the preparation and cleanup around it."""

    experiment: Experiment
    folder: Path
    program: TrainProgram
    compiled: CompiledStep
    data: Data
    sinks: SinkCode
    own_hooks: Sequence[Hook]
    stop: StopRequest
    progress: StepProgress
    phases: Phases
    goodput: GoodputLog
    owner: RunOwner
    facts: StepFacts = field(init=False)
    store: CheckpointStore = field(init=False)
    records: StepRecords = field(init=False)
    captures: Captures = field(init=False)
    stragglers: Stragglers = field(init=False)
    snapshots: Snapshots | None = None
    resumed_step: int = 0
    checked_step: int = 0
    """The last step after which the replicas were compared."""
    evaluation_loss: float | None = None
    running: Mapping[str, jax.Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        peak = compute_peak_flops(self.experiment.cluster.gpu, self.experiment.train.precision)
        self.facts = self.program.facts.model_copy(update={"peak_flops_per_gpu": peak})

    def execute(self) -> None:
        """Restore or initialise the state, then train until the last step or a signal."""
        arrangement, say = self.program.arrangement, self.progress.say
        self.store = open_store(
            self.experiment, self.folder, owner=self.owner, arrangement=arrangement, data=self.data, say=say
        )
        try:
            self.phases.enter("restore")
            saved = self._restored()
            self.resumed_step = int(saved.step) if saved is not None else 0
            self.goodput.resumed(self.resumed_step)
            if saved is None:
                self.phases.enter("init")
            state = saved if saved is not None else first_state(self.program, self.experiment.checkpoint.initial)
            write_experiment_file(self.experiment, self.folder)
            self._greet(saved)
            log = RunLog(self.sinks, self.folder, self.resumed_step, say)
            self._open_records(log)
            self.stop.arm()
            try:
                self._loop(state)
                if self.snapshots is not None:
                    self.snapshots.close()
                self.store.wait()  # then the last state is on disk, or an error is raised
            finally:
                self.phases.enter("end")
                self.captures.close()
                log.close()
        finally:
            self.phases.enter("save")  # the process waits for checkpoints that are still being written
            self.store.close()
            self.phases.enter("end")

    def _restored(self) -> TrainState | None:
        """Return the newest state, from a snapshot in memory or else from a checkpoint; None for a new run."""
        if self.experiment.checkpoint.snapshot_every:
            self.snapshots = Snapshots(self.owner.run, self.folder / SNAPSHOTS, self.progress.say)
            newest = next(iter(self.store.steps()), 0)
            state = self.snapshots.restore(self.program.abstract_state, after=newest)
            if state is not None:
                self.progress.say(f"the snapshot of step {int(state.step)} is restored; no checkpoint is read")
                return state
        return self.store.restore_latest(self.program.abstract_state)

    def _open_records(self, log: RunLog) -> None:
        """Create the objects that record and capture the steps."""
        experiment, say = self.experiment, self.progress.say
        every = experiment.train.straggler_every
        self.stragglers = stragglers = Stragglers(every, say, slowest_clock_mhz, errors_of_this_process)
        self.records = StepRecords(
            experiment.train, self.folder, self.facts, self.program.mesh.size, self.phases, self.goodput, self.progress,
            self.store, stragglers, log,
        )  # fmt: skip
        mesh = cast(jax.sharding.Mesh, self.program.mesh)
        captured = CapturedStep(
            self.compiled.program, mesh, experiment.cluster, experiment.mesh, self.facts, self.compiled.options
        )
        planned = planned_capture(experiment.profile, captured, self.folder, self.resumed_step)
        live = StepCaptures(experiment.profile.every, captured, stragglers, say, first_step=self.resumed_step + 1)
        self.captures = Captures(planned, live, self.records, self.phases)

    def _loop(self, state: TrainState) -> None:
        """Make the remaining steps, until the last one, a signal, or a hook that stops the run."""
        train = self.experiment.train
        measuring = (Hook(self._evaluate, train.evaluate_every), *map(self._as_evaluation, self.own_hooks))
        # The check comes first, so that a corrupt state is found before its checkpoint replaces a good one.
        guarding = (
            Hook(self._check_replicas, train.replica_check_every or 0),
            Hook(self._snapshot, self.experiment.checkpoint.snapshot_every),
            Hook(self._save, self.experiment.checkpoint.every, last=True),
        )
        unwritten: TrainingStep | None = None
        for number, batch in self._calls():
            self.captures.before(number, state)
            self.owner.watch()
            self.phases.enter("step", number)
            state, self.running = self.compiled.program(state, batch)
            if unwritten:
                self.records.write(unwritten)
            step = unwritten = TrainingStep(
                number, train.steps, state, self.running, self.records.read, self.program.steps_per_call
            )
            captured, stops = self.captures.is_due(step), self.stop.agreed(step.first, step.number)
            for hook in measuring:  # they add numbers to the step's record, so they run before it is written
                if hook.is_due(step):
                    hook.fn(step)
            due = [hook for hook in guarding if hook.is_due(step)]
            # Metrics of a step are read while the next step runs, so that devices never wait for the host. On virtual
            # CPU devices they are read at once, because two running programs would compete for the same cores.
            if due or captured or stops or step.numbers or step.is_last or self.experiment.cluster.is_cpu:
                self.records.write(step)
                unwritten = None
            self.store.check()
            self.captures.after(step)
            for hook in due:
                hook.fn(step)
            if due or captured:  # hooks and captures are not part of a step's time
                self.records.restart_clock()
            if stops:
                self._leave(step)
            if step.stops:
                return

    def _calls(self) -> Iterator[tuple[int, Mapping[str, jax.Array]]]:
        """Yield, for every call of the program, its last step and its argument: a batch, or several stacked ones."""
        steps, per_call = self.experiment.train.steps, self.program.steps_per_call
        batches = Batches(self.data.train, self.program.abstract_step_batch, self.experiment.data.seed)
        if isinstance(self.data.train, Stream) and self.resumed_step:
            seen = self.resumed_step * self.experiment.train.global_batch
            self.progress.say(
                f"{self.experiment.data.source} is a stream: its first {seen:,} examples are generated again"
            )
        each = batches.iterate(self.resumed_step, steps)
        self.records.restart_clock()
        for step in range(self.resumed_step + per_call, steps + 1, per_call):
            self.phases.enter("data", step)
            began = time.perf_counter()
            batch = self.program.stack([next(each) for _ in range(per_call)]) if self.program.stack else next(each)
            self.records.data_wait_s += time.perf_counter() - began
            if not all(cast(Any, value).is_ready() for value in self.running.values()):
                self.phases.count_as("step")  # devices were busy all the time
            yield step, batch

    def _evaluate(self, step: TrainingStep) -> None:
        """Compute the mean loss over the first `evaluate_batches` held-out batches, which are always the same."""
        step.wait()
        began = time.perf_counter()
        self.phases.enter("evaluate")
        batches = Batches(self.data.validation, self.program.abstract_step_batch, None)
        count = self.experiment.train.evaluate_batches
        sums = []
        for batch in batches.iterate(0, count):
            self.phases.enter("evaluate")  # restarts the phase's time limit for each batch
            sums.append(self.program.evaluate(step.state, batch))
        loss_sum, weight = (sum(float(s[k]) for s in sums) for k in ("loss_sum", "weight"))
        self.evaluation_loss = loss_sum / weight
        self.phases.enter("step")
        step.added |= {"evaluation_loss": self.evaluation_loss, "evaluation_s": time.perf_counter() - began}

    def _as_evaluation(self, hook: Hook) -> Hook:
        """Return a user's hook, whose time counts as `evaluate`, except for the time in which it waits for the step."""

        def call(step: TrainingStep) -> None:
            self.phases.enter("evaluate", step.number)
            hook.fn(step)
            self.phases.enter("step", step.number)

        return replace(hook, fn=call)

    @functools.cached_property
    def _replicas(self) -> ReplicaCheck:
        return ReplicaCheck(cast(jax.sharding.Mesh, self.program.mesh), self.program.abstract_state)

    def _check_replicas(self, step: TrainingStep) -> None:
        """Raise an error if replicas differ. Snapshots and checkpoints are taken only after this check."""
        if self.experiment.train.replica_check_every == 0 or step.number == self.checked_step:
            return
        self.phases.enter("check", step.number)
        self._replicas.check(step.state, step.number)
        self.checked_step = step.number

    def _snapshot(self, step: TrainingStep) -> None:
        if self.snapshots is not None:
            self._check_replicas(step)
            self.phases.enter("save", step.number)
            self.goodput.mark(step.number)
            self.snapshots.take(step.state)
            spare = os.environ.get(SPARE_VARIABLE)
            if (reason := self.stragglers.sick) and spare and os.path.exists(spare):
                self.snapshots.close()  # returns when all processes have the snapshot
                if self.snapshots.enabled:
                    raise Drained(f"a spare is to replace this host after step {step.number}: {reason}.")

    def _save(self, step: TrainingStep) -> None:
        self._check_replicas(step)
        self.phases.enter("save", step.number)
        self.goodput.mark(step.number)
        self.store.save(step.state)

    def _leave(self, step: TrainingStep) -> None:
        """Save a checkpoint if needed, and raise the exception for the received signal."""
        # One process may have got SIGINT and the others SIGTERM. All must save, since a save needs all processes.
        if self.stop.preempted or self.experiment.checkpoint.every or jax.process_count() > 1:
            self._save(step)
            self.store.wait()
        if self.stop.preempted:
            raise Preempted(f"stopped by SIGTERM after step {step.number}; a checkpoint is saved.", at=str(self.folder))
        raise KeyboardInterrupt

    def _greet(self, state: TrainState | None) -> None:
        if state is not None:
            self.progress.say(f"resuming {self.folder} after step {self.resumed_step}")
        elif read_metrics(self.folder / "metrics.jsonl"):
            self.progress.say(f"{self.folder} has metrics but no checkpoint: starting from the first step again")
        checkpoint, every = self.experiment.checkpoint, self.experiment.train.replica_check_every
        compares = every != 0 and (every or checkpoint.every or checkpoint.snapshot_every)
        if compares and self.program.mesh.size > 1 and (share := self._replicas.share) < 1:
            self.progress.say(
                f"{format_percent(share)} of the state has replicas, which are compared before it is saved; "
                "the rest cannot be checked"
            )
        if self.data.unigram_entropy_nats is not None:
            self.progress.say(f"unigram entropy of the data: {self.data.unigram_entropy_nats:.3f} nats per token")
        self.progress.start(self.resumed_step)

    def result(self, wall_s: float) -> TrainResult:
        """Return the TrainResult of this attempt, which may have made no step because the run was done already."""
        recorded = read_metrics(self.folder / "metrics.jsonl")
        last = self.records.last or (recorded[-1] if recorded else {})
        times_s = self.records.step_times_s
        median_s = statistics.median(times_s) if times_s else None
        speed = speed_of(self.facts, self.program.mesh.size, median_s) if median_s else None
        return TrainResult(
            folder=str(self.folder),
            step=last.get("step", self.resumed_step),
            resumed_step=self.resumed_step,
            loss=last.get("loss"),
            evaluation_loss=self.evaluation_loss,
            unigram_entropy_nats=self.data.unigram_entropy_nats,
            step_time_s=median_s,
            compile_s=self.compiled.seconds,
            wall_s=wall_s,
            goodput=read_goodput(self.folder),
            tokens_per_s=speed.get("tokens_per_s") if speed else None,
            mfu=speed["mfu"] if speed else None,
        )
