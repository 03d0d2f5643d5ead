"""Save the checkpoints of a run asynchronously, and verify and restore them.

    checkpoints/120/state/...         orbax's arrays; each process writes its own shards
    checkpoints/120/meshkit.json      manifest: sha256 of every file, shapes, dtypes, mesh, experiment, versions

    save    -> saving.py: background thread -> manifest, rename -> older checkpoints are removed
    restore -> newest manifest -> every process verifies a share of the files -> restore, or try the checkpoint before

A folder has the name of its step only when all is on disk, and every wait of one process for another has a time limit.
A save that fails is reported, and training goes on without that checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import chex
import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding

from meshkit.config.experiment import Experiment
from meshkit.config.sections import CheckpointTable
from meshkit.distributed.join import Agreement
from meshkit.errors import ConfigError, RunError, TraceError
from meshkit.runs.owner import RunOwner, is_owned
from meshkit.sharding.resolve import path_name
from meshkit.step.data import Data, Stream
from meshkit.step.pipelined import Arrangement
from meshkit.step.state import TrainState
from meshkit.verbs.checkpoint.manifest import (
    MANIFEST,
    PAUSES_S,
    Manifest,
    describe_failure,
    explain,
    find_break,
    find_corruption,
    kept_steps,
    read_manifest,
    remove_unfinished,
    set_aside,
    steps_aside,
    unreadable_error,
    whole_steps,
)
from meshkit.verbs.checkpoint.saving import STATE, Saving, remove_failed, silence_orbax

_stores = itertools.count()  # Every process makes its stores in the same order.
# Time limit for all processes to read and hash their parts, or to write and hash them: long enough for slow storage.
_READ_S = 3600.0
_LEAST_WRITE_S, _SLOWEST_BYTES_PER_S = 600.0, 20e6  # For all processes together.
_ABANDON_S = 5.0  # Seconds that a save of several processes has to end when the run ends.
SAID_AFTER_S = 1.0  # Waiting longer than this for an earlier save is reported.


class CheckpointStore:
    """The checkpoints of one run folder. Every process of the job makes a store, and calls it at the same steps.

    Args:
        folder: the folder of the checkpoints; made if missing.
        table: `[checkpoint]` of the experiment: which checkpoints are saved and kept, and how they are verified before
            they are restored. If any are saved, a folder that cannot be written raises an error now.
        arrangement: the order of layers in a pipeline's state. The state is saved in the order without a pipeline.
        facts: facts on the run for the manifest, a JSON object. A resumed run with other `data` gives a warning.
        say: prints one line; by default it is a Python warning.
        owner: the owner of the run folder. After another owner has taken the folder over, nothing is committed or
            removed. Checkpoints of other runs are refused. None for a folder that no other job can use.

    Raises:
        ConfigError: the folder may not be read, or cannot be written although checkpoints are to be saved.
        RunError: the folder cannot be listed.
    """

    def __init__(
        self,
        folder: Path,
        table: CheckpointTable | None = None,
        *,
        arrangement: Arrangement | None = None,
        facts: Mapping[str, Any] | None = None,
        say: Callable[[str], None] | None = None,
        owner: RunOwner | None = None,
    ):
        self.folder, self.table = Path(folder).absolute(), table or CheckpointTable()
        self.arrangement, self._owner = arrangement, owner
        self._facts: dict[str, Any] = dict(facts or {}) | ({"run": owner.run} if owner else {})
        self._say = say or _warn
        self._numbers, self.saving, self._failed = itertools.count(), None, None
        self._removed: list[Path] = []  # Folders of failed saves, which threads of orbax may create again.
        self._news: dict[str, Any] = {}
        self._said_slow = False
        silence_orbax()
        self.agreement = Agreement(f"checkpoints/{next(_stores)}")
        opened = self.agreement.reach("open", None, lambda _: self._open(), timeout_s=_READ_S)
        self._steps, unwritable, unreadable = opened
        if unreadable:  # A folder without checkpoints is no error.
            raise unreadable_error("the folder of checkpoints", unreadable, str(self.folder))
        if self.table.every and unwritable:
            raise ConfigError(
                f"the folder of checkpoints cannot be written: {unwritable}.",
                at=str(self.folder),
                hint="another --out, or checkpoint.every = 0 for a run without checkpoints",
            )

    def _open(self) -> tuple[list[int], str | None, dict[str, Any] | None]:
        """Return the steps with a checkpoint, and why the folder cannot be written or read. Runs on process 0."""
        unwritable = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._owner is not None:
                self._owner.check()
            # Otherwise another job may be writing these files.
            if self._owner is not None or not is_owned(self.folder.parent):
                remove_unfinished(self.folder)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            unwritable = error.strerror or str(error)
        try:
            return whole_steps(self.folder), unwritable, None
        except OSError as error:
            return [], unwritable, describe_failure(error)

    def save(self, state: TrainState) -> None:
        """Wait for an earlier save, start to write the state, and return when it is copied to host memory.

        A step that has a checkpoint is not written again. `check` and `wait` report how the save ended.
        """
        self._settle()
        self._remove_again()
        step, number = int(state.step), next(self._numbers)
        if step in self._steps:
            return
        if self.arrangement:
            state = self.arrangement.to_saved(state)
        record = {
            "step": step,
            "arrays": _describe(state),
            "mesh": _mesh_of(state),
            "processes": self.agreement.size,
            **self._facts,
        }
        kept = kept_steps([step, *self._steps], keep=self.table.keep, keep_every=self.table.keep_every)
        self.saving = Saving(
            self.folder,
            number,
            record,
            self.agreement,
            limit_s=write_limit_s(sum(leaf.nbytes for leaf in jax.tree.leaves(state))),
            superseded=[s for s in self._steps if s not in kept],
            owner=self._owner,
        )
        self.saving.start(state)

    def check(self) -> None:
        """Report the outcome of a background save, once it has ended; cheap enough for every step."""
        if self.saving is not None and self.saving.ended:
            self._settle()

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            RunError: the last save failed.
        """
        self._settle(say=False)
        if self._failed is not None:
            newest = f"the newest checkpoint is {self._steps[0]}" if self._steps else "there is no checkpoint"
            raise RunError(
                f"saving checkpoint {self._failed.step} failed: {self._failed.error}; {newest}.",
                at=str(self.folder),
                hint="the same command, which resumes, once the folder can be written",
            )

    def close(self) -> None:
        """Wait for a background save; in a job of several processes only briefly, since others may be gone.

        Does not raise errors of the save, because a run without a failure has called `wait` before.
        """
        if self.saving is not None and self.saving.wait(_ABANDON_S if self.agreement.size > 1 else None):
            self._settle()
        self._remove_again()

    def news(self) -> dict[str, Any]:
        """Return metrics on what happened since the last call.

        After a save these are `checkpoint_step` and `checkpoint_s` (its seconds), or `checkpoint_error`.
        `checkpoint_wait_s` is the time that training waited for a save. `checkpoint_corrupt` is a skipped checkpoint.
        """
        news, self._news = self._news, {}
        return news

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first."""
        return list(self._steps)

    def restore_latest(self, abstract: TrainState) -> TrainState | None:
        """Return the newest intact state, on the shardings of `abstract`; None if there is no checkpoint.

        All processes restore the same step. A corrupt checkpoint is skipped with a warning, and set aside
        (`120.corrupt`) once an earlier one is restored. If no checkpoint is intact, none is renamed, and each further
        attempt raises the same error. A checkpoint that cannot be read is not corrupt: it is read again, and if that
        fails an error is raised.

        Args:
            abstract: ShapeDtypeStructs with shardings. The mesh, the number of processes, and the pipeline's stages may
                differ from those of the run that saved the checkpoint.

        Raises:
            ConfigError: the checkpoint belongs to another run, or has arrays of another shape or dtype, since the model
                or the optimizer has changed. Or a file may not be read.
            RunError: a checkpoint cannot be read, or cannot be restored although its files are as written.
            TraceError: there are checkpoints, but none is intact.
        """
        corrupt: list[int] = []
        for step in self._steps:
            corruption, state = self._try(step, abstract)
            if corruption is None:
                self._set_aside(corrupt)
                assert state is not None
                return self.arrangement.from_saved(state) if self.arrangement else state
            before = "trying the one before it" if step != self._steps[-1] else "there is none before it"
            warnings.warn(f"checkpoint {step} is corrupt ({corruption}); {before}.", stacklevel=2)
            self._news["checkpoint_corrupt"] = f"checkpoint {step}: {corruption}"
            corrupt.append(step)
        aside = self._agree("aside", None, lambda _: len(steps_aside(self.folder)))
        if corrupt or aside:
            raise TraceError(
                f"none of the {len(corrupt) + aside} checkpoints is intact.",
                at=str(self.folder),
                hint="meshkit checkpoint verify RUN, which says what is wrong with each; another --out to start over",
            )
        return None

    def _try(self, step: int, abstract: TrainState) -> tuple[str | None, TrainState | None]:
        """Return a checkpoint's corruption, the same on every process, and its state if the corruption is None.

        Raises:
            ConfigError, RunError: nothing is known to be wrong with it, but it cannot be restored; on every process.
        """
        corruption, manifest = self._verify(step, contents=self.table.verify != "off")
        if corruption is not None:
            return corruption, None
        assert manifest is not None
        saved = self.arrangement.saved if self.arrangement else abstract
        self._check_fits(step, manifest, saved)
        # All processes try again together, because orbax's processes may wait for each other.
        for pause_s in (None, *PAUSES_S):
            if pause_s is not None:
                time.sleep(pause_s)
            state, found = _read(self.folder / str(step), saved, step)
            corruption, failure = self._agree(f"restore/{step}", found, first_problem)
            if failure is None:
                return corruption, state
            if failure["forbidden"]:
                break
            # A failed restore does not prove corruption, so compare the contents of the files.
            if pause_s is None and (corruption := self._verify(step, contents=True)[0]):
                return corruption, None
        raise unreadable_error(f"checkpoint {step}", failure, str(self.folder / str(step)))

    def _verify(self, step: int, *, contents: bool) -> tuple[str | None, Manifest | None]:
        """Return how a checkpoint differs from its manifest, the same on every process, and the manifest."""
        checkpoint, mine = self.folder / str(step), (self.agreement.rank, self.agreement.size)
        manifest, found = None, {}
        try:
            share = (0, 1) if self.table.verify == "full" else mine
            found["corruption"] = find_corruption(checkpoint, contents=contents, share=share)
            if found["corruption"] is None:
                manifest = read_manifest(checkpoint)
                found["seal"] = manifest.seal
        except ValueError as error:  # The manifest has changed since `find_corruption`.
            found["corruption"] = str(error)
        except OSError as error:
            found["failure"] = describe_failure(error)
        corruption, failure = self._agree(f"verify/{step}", found, first_problem)
        if failure is not None:
            raise unreadable_error(f"checkpoint {step}", failure, str(checkpoint))
        return corruption, manifest

    def _check_fits(self, step: int, manifest: Manifest, abstract: TrainState) -> None:
        """Raise an error if the checkpoint has other arrays or is of another run; orbax would silently cast dtypes."""
        self._check_run(step, manifest.record.get("run"))
        saved, wanted, at = manifest.arrays, _describe(abstract), str(self.folder / str(step))
        for path in [*wanted, *(p for p in saved if p not in wanted)]:
            if saved.get(path) != wanted.get(path):
                was, now = saved.get(path, "not there"), wanted.get(path, "not there")
                raise ConfigError(
                    f"checkpoint {step} does not fit the experiment: {path} was {was} and is now {now}.",
                    at=at,
                    hint="the model and optimizer of the run's experiment.toml, or another --out",
                )
        was, now = manifest.record.get("data"), self._facts.get("data")
        if was is not None and now is not None and was != json.loads(json.dumps(now)):
            warnings.warn(
                f"checkpoint {step} was trained on other data ({_text(was)}) than there is now ({_text(now)}): the run "
                "goes on, but not with the examples that would have come next.",
                stacklevel=4,
            )

    def _check_run(self, step: int, run: Any) -> None:
        """Raise an error if the checkpoint is of another run, or does not follow the one before it in the folder."""
        if self._owner is None:
            return
        at = str(self.folder / str(step))
        if run not in (None, self._owner.run):
            raise ConfigError(
                f"checkpoint {step} belongs to run {run!r:.80}, but this folder belongs to run {self._owner.run!r}.",
                at=at,
                hint="moving that checkpoint out of this folder; or, for a run that goes on from it, another --out "
                "with only that checkpoint",
            )
        if problem := self._agree(f"chain/{step}", None, lambda _: find_break(self.folder, step)):
            raise ConfigError(
                f"checkpoint {step} does not belong to the other checkpoints here: {problem}.",
                at=at,
                hint="moving what was put into this folder out again; meshkit checkpoint verify RUN names it",
            )
        if run is None:
            what = f"checkpoint {step} comes from an earlier version and names no run; it is taken as this run's"
            self._say_first(f"note: {what}")

    def _set_aside(self, steps: list[int]) -> None:
        """Rename corrupt checkpoints on process 0; the others wait, so that none saves one of these steps earlier."""

        def rename(_: Any) -> list[str]:
            refused = []
            if self._owner is not None:
                self._owner.check()
            for step in steps:
                try:
                    set_aside(self.folder, step)
                except OSError as error:
                    refused.append(f"checkpoint {step} is corrupt and cannot be set aside: {explain(error)}.")
            return refused

        if not steps:
            return
        for refusal in self._agree("aside/rename", None, rename):
            warnings.warn(refusal, stacklevel=3)
        self._steps = [step for step in self._steps if step not in steps]

    def _agree(self, topic: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        return self.agreement.reach(f"{topic}/{next(self._numbers)}", mine, decide, timeout_s=_READ_S)

    def _settle(self, *, say: bool = True) -> None:
        if self.saving is None:
            return
        saving, self.saving = self.saving, None
        began = time.monotonic()
        outcome = saving.wait()
        assert outcome is not None
        waits_s = time.monotonic() - began
        self._failed = outcome if outcome.error is not None else None
        if outcome.error is not None and self.agreement.rank == 0:
            self._removed.append(saving.partial)
        if outcome.error is None:
            self._steps = sorted({*self._steps, outcome.step} - {*saving.superseded}, reverse=True)
            self._news |= {"checkpoint_step": outcome.step, "checkpoint_s": outcome.seconds}
            for note in outcome.notes:
                self._say_first(note)
        else:
            self._news["checkpoint_error"] = f"checkpoint {outcome.step}: {outcome.error}"
            if say:
                newest = f"; the newest is {self._steps[0]}" if self._steps else ", and there is none before it"
                self._say_first(
                    f"warning: checkpoint {outcome.step} could not be saved{newest}: {outcome.error}. Training goes on."
                )
        if waits_s > SAID_AFTER_S:
            self._news["checkpoint_wait_s"] = waits_s
            if not self._said_slow:
                self._said_slow = True
                self._say_first(
                    f"warning: training waited {waits_s:.1f} s for checkpoint {outcome.step}, which took "
                    f"{outcome.seconds:.1f} s to write; a larger checkpoint.every or faster storage avoids that."
                )

    def _remove_again(self) -> None:
        for partial in self._removed:
            if partial.exists():
                remove_failed(partial)

    def _say_first(self, line: str) -> None:
        """Print a line on process 0 only; every process calls this."""
        if self.agreement.rank == 0:
            self._say(line)


def write_limit_s(state_bytes: int) -> float:
    """Return the seconds that a job may take to write a checkpoint: the time at 20 MB/s, at least 600, at most 3600."""
    return min(max(_LEAST_WRITE_S, state_bytes / _SLOWEST_BYTES_PER_S), _READ_S)


def open_store(
    experiment: Experiment,
    folder: Path,
    *,
    owner: RunOwner,
    arrangement: Arrangement | None,
    data: Data,
    say: Callable[[str], None],
) -> CheckpointStore:
    """Return the checkpoint store of an experiment's run folder, with the settings of `[checkpoint]`.

    Raises:
        ConfigError, RunError: see `CheckpointStore`.
    """
    order = {
        "examples": None if isinstance(data.train, Stream) else len(data.train),
        "examples a step": experiment.train.global_batch,
        "seed": experiment.data.seed,
    }
    facts = {"experiment": experiment.to_toml(), "data": order}
    table = experiment.checkpoint
    return CheckpointStore(folder / "checkpoints", table, arrangement=arrangement, facts=facts, say=say, owner=owner)


def run_of_checkpoints(folder: Path) -> str | None:
    """Return the run ID that all checkpoints of a run folder carry; None if they carry none or different ones.

    Raises:
        ConfigError, RunError: one cannot be read.
    """
    runs, at = set(), folder / "checkpoints"
    try:
        for step in whole_steps(at):
            with contextlib.suppress(ValueError):
                runs.add(read_manifest(at / str(step)).record.get("run"))
    except OSError as error:
        raise unreadable_error("a checkpoint", describe_failure(error), str(at)) from None
    return runs.pop() if len(runs) == 1 else None


def _read(checkpoint: Path, saved: TrainState, step: int) -> tuple[TrainState | None, dict[str, Any]]:
    """Return (state, {}), or (None, problem) with `failure` (the state cannot be read) or `corruption`."""
    try:
        handler = ocp.StandardCheckpointHandler()
        state = handler.restore(epath.Path(checkpoint / STATE), args=ocp.args.StandardRestore(saved))
        found = int(state.step)
    except Exception as error:  # orbax and tensorstore raise many types for files that they cannot read.
        return None, {"failure": describe_failure(error)}
    try:
        chex.assert_trees_all_equal_shapes_and_dtypes(state, saved)
    except AssertionError:
        return None, {"corruption": "the shapes or dtypes of its arrays differ from its manifest"}
    return (state, {}) if found == step else (None, {"corruption": f"its state has step {found}"})


def first_problem(every: list[dict[str, Any]]) -> tuple[str | None, dict[str, Any] | None]:
    """Return (corruption, failure) over all processes; at most one is set. A differing `seal` is a corruption."""
    for key in ("corruption", "failure"):
        for rank, found in enumerate(every):
            if said := found.get(key):
                where = "" if len(every) == 1 else f", found by process {rank}"
                if key == "corruption":
                    return f"{said}{where}", None
                return None, {**said, "reason": f"{said['reason']}{where}"}
    for rank, found in enumerate(every):
        if found.get("seal") != every[0].get("seal"):
            return f"{MANIFEST} differs between process {rank} and process 0", None
    return None, None


def _warn(line: str) -> None:
    warnings.warn(line.removeprefix("warning: "), stacklevel=4)


def _describe(state: TrainState) -> dict[str, str]:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {path_name(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _mesh_of(state: TrainState) -> dict[str, int]:
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf.sharding, NamedSharding):
            return {str(name): int(size) for name, size in leaf.sharding.mesh.shape.items()}
    return {}


def _text(facts: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{value:,} {name}" if isinstance(value, int) else f"{name} {value}" for name, value in facts.items()
    )
