"""`meshkit train`: runs the step of an experiment on attached devices, into a run folder.

    experiment -> mesh -> compiled step -> [ batch -> step -> metrics, evaluation, checkpoint, capture ] -> TrainResult

The run folder holds `experiment.toml` (resolved), `metrics.jsonl`, `checkpoints/` and `trace/`. The same one resumes.
One job at a time writes it: `runs/owner.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from rich.console import Console

from meshkit.compile.attached import CompiledStep, compile_cache, compile_step
from meshkit.config.experiment import Experiment
from meshkit.console import stderr
from meshkit.distributed.environment import read_gang
from meshkit.distributed.join import Agreement, is_first_process, join_gang
from meshkit.errors import RunError
from meshkit.linting.examine import announce_findings
from meshkit.planning.resolved import examine_experiment, find_sinks, find_tokenizer, resolve
from meshkit.predict.kernels import compute_peak_flops
from meshkit.runs.metrics import SinkCode, finite, read_metrics
from meshkit.runs.owner import RunOwner, take_run
from meshkit.runs.phases import Goodput, GoodputLog, Phases, read_goodput
from meshkit.sharding import build_mesh
from meshkit.sharding.mesh import device_memory
from meshkit.step.data import Batches, Data, Stream, check_tokens, open_data
from meshkit.step.program import StepFacts
from meshkit.step.state import TrainState
from meshkit.step.train_step import TrainProgram, build_train_step
from meshkit.trace.capture import Capture, CapturedStep, chosen_processes
from meshkit.trace.captured import TRACE_FOLDER
from meshkit.verbs.checkpoint.store import CheckpointStore, open_store, run_of_checkpoints
from meshkit.verbs.train.session import (
    Preempted,
    RunLog,
    StepProgress,
    StopRequest,
    check_experiment_file,
    write_experiment_file,
)
from meshkit.verbs.train.watch import ReplicaCheck, StepCaptures, Stragglers, slowest_clock_mhz
from meshkit.weights.files import first_state


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    folder: str
    """The run folder."""
    step: int
    """Steps done, of all attempts."""
    resumed_step: int
    """Where this attempt began."""
    loss: float | None
    """Loss of the last step, nats per token."""
    evaluation_loss: float | None
    """The last one, on held-out data; None if never evaluated."""
    unigram_entropy_nats: float | None
    """Entropy of the corpus; a model below it has learned more than frequencies."""
    step_time_s: float | None
    """Median of this attempt's steps."""
    tokens_per_s: float | None
    mfu: float | None
    """At that step time; mfu is None where no peak is known."""
    compile_s: float
    wall_s: float
    """Seconds of this attempt."""
    compile_cached: bool | None = None
    """Whether an earlier attempt had compiled the step; None where nothing is kept."""
    goodput: Goodput | None = None
    """Where the wall time of all attempts went."""

    def to_dict(self) -> dict[str, Any]:
        """As `meshkit train --json` prints it."""
        values = {name: finite(value) for name, value in asdict(self).items()}
        return {"schema": "meshkit.train/1", **values, "goodput": self.goodput.to_dict() if self.goodput else None}


def train(
    experiment: Experiment, out: str | Path, *, console: Console | None = None, show_progress: bool = True
) -> TrainResult:
    """Trains the experiment in the folder `out`; resumes what is there.

    Args:
        experiment: loaded from a file.
        out: the run folder.
        console: where progress goes; stderr by default.
        show_progress: False prints nothing.

    Raises:
        ConfigError: the folder belongs to another model or to a job that runs, or the experiment does not fit the
            attached devices.
        RunError: a checkpoint could not be written, replicas of the state differ, or it does not fit a device's memory.
        Preempted: SIGTERM came; a checkpoint is saved.
        KeyboardInterrupt: SIGINT came; a checkpoint is saved if the experiment writes any.
    """
    started = time.perf_counter()
    folder = Path(out)
    console = console or stderr()
    memory = device_memory(experiment.cluster, experiment.train, experiment.file)
    with memory, Phases() as phases, StopRequest() as stop, ExitStack() as around:
        changes = check_experiment_file(experiment, folder)
        join_gang()  # of the processes that the environment names, if it names any
        note = lambda text: console.print(f"note: {text}", style="yellow", markup=False)
        owner = around.enter_context(_own(folder, note))
        goodput = around.enter_context(GoodputLog(folder if is_first_process() else None, phases))
        mesh = build_mesh(experiment.mesh, experiment.cluster)
        cache = around.enter_context(compile_cache(note))
        spec = resolve(experiment)
        program = build_train_step(spec, mesh, experiment.rules)
        announce_findings(examine_experiment(experiment, program), console)
        data = open_data(spec, find_tokenizer(experiment))
        check_tokens(spec, data, program.model.abstract_model())
        sinks = find_sinks(experiment)
        for text in (*program.notes, *changes):
            note(text)
        phases.enter("compile")
        missed = cache.misses if cache else None
        compiled = compile_step(program, experiment.cluster, experiment.placement, experiment.xla)
        compile_cached = cache.misses == missed if cache else None
        with StepProgress(console, experiment.train.steps, enabled=show_progress) as progress:
            run = _Run(experiment, folder, program, compiled, data, sinks, stop, progress, phases, goodput, owner)
            run.execute()
    return dataclasses.replace(run.result(time.perf_counter() - started), compile_cached=compile_cached)


_ownerships = itertools.count()  # made in the same order by every process
_OWN_S = 3600.0  # process 0 waits for a predecessor, less long than this


def _own(folder: Path, say: Callable[[str], None]) -> RunOwner:
    """Makes the job the one that writes the run folder; process 0 does, and all know."""
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
    """One attempt at a run: the loop, and what it gathers."""

    experiment: Experiment
    folder: Path
    program: TrainProgram
    compiled: CompiledStep
    data: Data
    sinks: SinkCode
    stop: StopRequest
    progress: StepProgress
    phases: Phases
    goodput: GoodputLog
    owner: RunOwner
    facts: StepFacts = field(init=False)
    store: CheckpointStore = field(init=False)
    log: RunLog = field(init=False)
    stragglers: Stragglers = field(init=False)
    live: StepCaptures = field(init=False)
    resumed_step: int = 0
    step_times_s: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    evaluation_loss: float | None = None
    clock: float = 0.0
    running: Mapping[str, jax.Array] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=lambda: {"data_wait_s": 0.0, "device_wait_s": 0.0})

    def __post_init__(self) -> None:
        peak = compute_peak_flops(self.experiment.cluster.gpu, self.experiment.train.precision)
        self.facts = self.program.facts.model_copy(update={"peak_flops_per_gpu": peak})

    def execute(self) -> None:
        """Restores or initialises, then steps to the end or to a signal."""
        arrangement, say = self.program.arrangement, self.progress.say
        self.store = open_store(
            self.experiment, self.folder, owner=self.owner, arrangement=arrangement, data=self.data, say=say
        )
        try:
            self.phases.enter("restore")
            saved = self.store.restore_latest(self.program.abstract_state)
            self.resumed_step = int(saved.step) if saved is not None else 0
            self.goodput.resumed(self.resumed_step)
            if saved is None:
                self.phases.enter("init")
            state = saved if saved is not None else first_state(self.program, self.experiment.checkpoint.initial)
            write_experiment_file(self.experiment, self.folder)
            self._greet(saved)
            self.log = RunLog(self.sinks, self.folder, self.resumed_step, say)
            self.stragglers = Stragglers(self.experiment.train.straggler_every, say, slowest_clock_mhz)
            every, first = self.experiment.profile.every, self.resumed_step + 1
            self.live = StepCaptures(every, self._captured_step, self.stragglers, say, first_step=first)
            self.stop.arm()
            try:
                self._loop(state)
                self.store.wait()  # the last state is on disk, or the run has failed
            finally:
                self.phases.enter("end")
                self.live.close()
                self.log.close()
        finally:
            self.phases.enter("save")  # what is still being written keeps the process from ending
            self.store.close()
            self.phases.enter("end")

    def _loop(self, state: TrainState) -> None:
        train, every = self.experiment.train, self.experiment.checkpoint.every
        batches = Batches(self.data.train, self.program.abstract_step_batch, self.experiment.data.seed)
        if isinstance(self.data.train, Stream) and self.resumed_step:
            seen = self.resumed_step * train.global_batch
            self.progress.say(f"{self.experiment.data.source} is a stream: its first {seen:,} examples are made again")
        capture, live_next = self._capture(), False
        replicas = ReplicaCheck(cast(jax.sharding.Mesh, self.program.mesh), self.program.abstract_state)
        self.clock = time.perf_counter()
        pending: tuple[int, Mapping[str, jax.Array]] | None = None
        for step, batch in self._calls(batches):
            if capture and step == capture.first:
                capture.untraced_step_s = statistics.median(self.step_times_s) if self.step_times_s else None
                self.phases.enter("trace")
                capture.before(step, state)
                self.phases.enter("step")
                self.clock = time.perf_counter()
            if live_now := live_next:
                self.phases.enter("trace")
                self.live.start(state)
                self.phases.enter("step")
                self.clock = time.perf_counter()
            self.owner.watch()
            state, metrics = self.compiled.program(state, batch)
            self.running = metrics
            if pending:
                self._record(*pending)
            pending = (step, metrics)
            evaluates = self._is_due(train.evaluate_every, step)
            checks = self._is_due(train.replica_check_every, step)
            saves = self._is_due(every, step) or (every > 0 and step == train.steps)
            live_next = self._is_live(capture, step + self.program.steps_per_call)
            traces = capture is not None and step in (capture.first - self.program.steps_per_call, capture.last)
            traces |= live_now or live_next
            stops = self.stop.agreed(step - self.program.steps_per_call + 1, step)
            # Metrics of a step are read while the next one runs, so that devices never wait for the host. Virtual CPU
            # devices do: two programs in flight would fight for the same cores.
            if evaluates or checks or saves or traces or stops or step == train.steps or self.experiment.cluster.is_cpu:
                self._record(*pending, state if evaluates else None)
                pending = None
            self.store.check()
            if self.live.active:
                self.live.stop(step, (state, metrics))
            if capture and capture.active:
                self.phases.enter("trace")
                capture.after(step, (state, metrics))
                self.phases.enter("step")
                if not capture.active:
                    self.log.measure_capture()
            if checks:  # before a checkpoint of this state replaces a good one
                self.phases.enter("check", step)
                replicas.check(state, step)
            if saves:
                self.phases.enter("save", step)
                self.goodput.mark(step)
                self.store.save(state)
            if saves or traces or checks:  # none of it is part of a step's time
                self.clock = time.perf_counter()
            if stops:
                self._leave(state)

    def _calls(self, batches: Batches) -> Iterator[tuple[int, Mapping[str, jax.Array]]]:
        """The last step of every call of the program, and its argument: a batch, or several stacked."""
        each, per_call = batches.iterate(self.resumed_step, self.experiment.train.steps), self.program.steps_per_call
        for step in range(self.resumed_step + per_call, self.experiment.train.steps + 1, per_call):
            self.phases.enter("data", step)
            began = time.perf_counter()
            batch = self.program.stack([next(each) for _ in range(per_call)]) if self.program.stack else next(each)
            self.waited_s["data_wait_s"] += time.perf_counter() - began
            if not all(cast(Any, value).is_ready() for value in self.running.values()):
                self.phases.count_as("step")  # devices have had work all the while
            self.phases.enter("step", step)
            yield step, batch

    def _is_due(self, interval: int, step: int) -> bool:
        """Whether something done every `interval` steps (0: never) falls on a step of the call that ends with this."""
        return interval > 0 and step // interval > (step - self.program.steps_per_call) // interval

    def _record(self, step: int, metrics: Mapping[str, jax.Array], evaluate: Any = None) -> None:
        """Waits for the metrics of a call and writes down each of its steps, the last with an evaluation of the state.

        Args:
            step: the last step of the call.
        """
        per_call = self.program.steps_per_call
        began = time.perf_counter()
        values = {name: np.asarray(value, np.float64).reshape(per_call).tolist() for name, value in metrics.items()}
        self.waited_s["device_wait_s"] += time.perf_counter() - began
        elapsed_s = (time.perf_counter() - self.clock) / per_call
        waits = {name: seconds / per_call for name, seconds in self.waited_s.items()}
        waits["host_s"] = max(0.0, elapsed_s - sum(waits.values()))  # Python and dispatch
        self.waited_s = dict.fromkeys(self.waited_s, 0.0)
        for i in range(per_call):
            number = step - per_call + 1 + i
            of_step = waits | {name: value[i] for name, value in values.items()}
            self._record_step(number, of_step, elapsed_s, evaluate if number == step else None)

    def _record_step(self, step: int, values: dict[str, float], elapsed_s: float, evaluate: Any) -> None:
        """Writes down one step."""
        self.step_times_s.append(elapsed_s)
        loss = values.pop("loss")
        record = values | {"step": step, "loss": loss, "step_time_s": elapsed_s, **self._rate(elapsed_s)}
        if evaluate is not None:
            record |= self._evaluate(evaluate)
        if (share := self.goodput.share()) is not None:
            record["goodput"] = share
        self.stragglers.note(record)
        train = self.experiment.train
        if step % train.log_every == 0 or step == train.steps or evaluate is not None:
            self.log.write(record | self.store.news() | self.stragglers.news())
        self.progress.update(record)
        self.last, self.clock = record, time.perf_counter()
        self.goodput.made(step)
        norm = values.get("grad_norm", 0.0)
        if not math.isfinite(loss) or not math.isfinite(norm):  # before a checkpoint of this state replaces a good one
            raise RunError(
                f"the loss is {loss} and the gradient norm {norm} at step {step}.",
                at=str(self.folder),
                hint="a lower optimizer.learning_rate, a longer warm-up, or clip; the last good checkpoint is kept",
            )

    def _rate(self, step_time_s: float) -> dict[str, float | None]:
        """Tokens per second and MFU at a step time."""
        facts = self.facts
        assert facts.tokens is not None
        assert facts.model_flops is not None
        peak = facts.peak_flops_per_gpu  # None for a CPU, whose virtual devices have none
        capacity = peak * self.program.mesh.size * step_time_s if peak else None
        return {
            "tokens_per_s": facts.tokens / step_time_s,
            "mfu": facts.model_flops / capacity if capacity else None,
        }

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        """Mean loss over the first `evaluate_batches` held-out batches, always the same ones."""
        began = time.perf_counter()
        self.phases.enter("evaluate")
        batches = Batches(self.data.validation, self.program.abstract_step_batch, None)
        sums = [self.program.evaluate(state, b) for b in batches.iterate(0, self.experiment.train.evaluate_batches)]
        loss_sum, weight = (sum(float(s[k]) for s in sums) for k in ("loss_sum", "weight"))
        self.evaluation_loss = loss_sum / weight
        self.phases.enter("step")
        return {"evaluation_loss": self.evaluation_loss, "evaluation_s": time.perf_counter() - began}

    @property
    def _captured_step(self) -> CapturedStep:
        return CapturedStep(
            self.compiled.program,
            cast(jax.sharding.Mesh, self.program.mesh),
            self.experiment.cluster,
            self.experiment.mesh,
            self.facts,
            self.compiled.options,
        )

    def _is_live(self, capture: Capture | None, step: int) -> bool:
        """Whether a call that ends with a step is captured live: one profiler runs at a time."""
        per_call = self.program.steps_per_call
        if capture is not None and capture.first <= step < capture.last + per_call:
            return False
        return self.live.is_due(step - per_call + 1, step)

    def _capture(self) -> Capture | None:
        steps = self.experiment.profile.steps
        if steps is None or steps[1] <= self.resumed_step:
            return None
        return Capture(
            self.folder / TRACE_FOLDER,
            self._captured_step,
            steps=(max(steps[0], self.resumed_step + 1) + self.program.steps_per_call - 1, steps[1]),
            processes=chosen_processes(self.experiment.profile.processes, jax.process_count()),
        )

    def _leave(self, state: TrainState) -> None:
        """Saves, and raises what the signal asks for."""
        step = int(state.step)
        self.phases.enter("save", step)
        # Of several processes one may have been interrupted and the others terminated: a save takes all of them.
        if self.stop.preempted or self.experiment.checkpoint.every or jax.process_count() > 1:
            self.store.save(state)
            self.store.wait()
        if self.stop.preempted:
            raise Preempted(f"stopped by SIGTERM after step {step}; a checkpoint is saved.", at=str(self.folder))
        raise KeyboardInterrupt

    def _greet(self, state: TrainState | None) -> None:
        if state is not None:
            self.progress.say(f"resuming {self.folder} after step {self.resumed_step}")
        elif read_metrics(self.folder / "metrics.jsonl"):
            self.progress.say(f"{self.folder} has metrics but no checkpoint: starting from the first step again")
        if self.data.unigram_entropy_nats is not None:
            self.progress.say(f"unigram entropy of the data: {self.data.unigram_entropy_nats:.3f} nats per token")
        self.progress.start(self.resumed_step)

    def result(self, wall_s: float) -> TrainResult:
        """The TrainResult of this attempt; of the last recorded step when there was nothing left to do."""
        recorded = read_metrics(self.folder / "metrics.jsonl")
        last = self.last or (recorded[-1] if recorded else {})
        median_s = statistics.median(self.step_times_s) if self.step_times_s else None
        rate = self._rate(median_s) if median_s else {"tokens_per_s": None, "mfu": None}
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
            tokens_per_s=rate["tokens_per_s"],
            mfu=rate["mfu"],
        )
