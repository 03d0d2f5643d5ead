"""Define hooks: functions that a training calls after every N-th step.

    [train] hooks = ["pkg.mod:name"] -> find_hooks -> Hook(fn, every) -> fn(TrainingStep) after every `every` steps

The optional parts of a training are hooks: the evaluation, the check of replicas, checkpoints, the user's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from meshkit.config.places import UserCode
from meshkit.config.user_code import check_function, load_code
from meshkit.errors import ConfigError, a_type
from meshkit.step.loss import RESERVED_METRICS

if TYPE_CHECKING:
    import jax

    from meshkit.config.experiment import Experiment
    from meshkit.step.state import TrainState

_KEY = "train.hooks"


@dataclass
class TrainingStep:
    """The argument of a hook: a training step that was dispatched. Devices may still be computing it."""

    number: int
    """The number of the step, from 1; of the last step if one call makes several, as with `[local_sgd]`."""
    steps: int
    """The number of steps of the whole run."""
    state: TrainState
    """The state after the step, on the devices. It is donated to the next step: copy arrays that you want to keep."""
    arrays: Mapping[str, jax.Array]
    """The results of the step, such as `loss` and `grad_norm`, on the devices and perhaps not computed yet."""
    read: Callable[[Mapping[str, jax.Array]], list[dict[str, float]]] = field(repr=False)
    """Waits for the arrays, and returns the numbers of each step of the call."""
    per_call: int = 1
    """The number of training steps that the call makes."""
    added: dict[str, float] = field(default_factory=dict)
    """The numbers that hooks add to the step's line in `metrics.jsonl`."""
    stops: bool = False
    """Whether a hook has called `stop`."""
    numbers: list[dict[str, float]] | None = None
    """The result of `read`; None before `read` is called."""

    @property
    def first(self) -> int:
        """The first training step of the call."""
        return self.number - self.per_call + 1

    @property
    def is_last(self) -> bool:
        """Whether the run ends after this step."""
        return self.stops or self.number == self.steps

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of the step, with their names in `metrics.jsonl`. Waits until the devices have computed it."""
        return dict(self.wait()[-1])

    def wait(self) -> list[dict[str, float]]:
        """Wait until the devices have computed the call, and return the numbers of each of its steps."""
        if self.numbers is None:
            self.numbers = self.read(self.arrays)
        return self.numbers

    def add(self, **numbers: float) -> None:
        """Add numbers to the step's record, which goes to `metrics.jsonl` and all sinks. Process 0's numbers are used.

        Raises:
            ValueError: the line has another number of that name.
        """
        for name, number in numbers.items():
            if name in RESERVED_METRICS or name in self.arrays:
                raise ValueError(
                    f"a step's record already has a key '{name}': choose another name, such as 'own_{name}'"
                )
            self.added[name] = float(number)

    def stop(self) -> None:
        """End the run after this step, as if it were the last one. Every process must call this."""
        self.stops = True


@dataclass(frozen=True)
class Hook:
    """A function that `meshkit train` calls every `every` steps, in every process of the job.

    Steps are counted from the beginning of the run, so a resumed run calls the function after the same steps as an
    uninterrupted one. It is called before the step's checkpoint is saved, and again if the step is made again.

        import meshkit as mk

        def watch(step):
            step.add(loss_in_bits=step.metrics["loss"] / 0.6931)

        watched = mk.Hook(watch, every=100)  # [train] hooks = ["my_hooks:watched"]

    Raises:
        ConfigError: `fn` cannot be called, or `every` is no number of steps.
    """

    fn: Callable[[TrainingStep], Any]
    """The function, called with the step that was made. Its result is ignored."""
    every: int = 1
    """The number of steps between two calls; 0 means never."""
    last: bool = False
    """Whether the function is also called after the last step."""

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ConfigError(f"the fn of a Hook is {a_type(self.fn)}, not a function.", hint="mk.Hook(fn, every=100)")
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 0:
            raise ConfigError(f"the every of a Hook is {self.every!r}, not a number of steps.", hint="every=100")

    def is_due(self, step: TrainingStep) -> bool:
        """Return whether the hook is to be called after this step, or after an earlier step of the same call."""
        crossed = self.every > 0 and step.number // self.every > (step.first - 1) // self.every
        return crossed or (self.last and self.every > 0 and step.is_last)


def find_hooks(experiment: Experiment) -> tuple[Hook, ...]:
    """Return the hooks that `train.hooks` names. Their exceptions are raised as ConfigErrors that name this key.

    Raises:
        ConfigError: no such module or name, or it is no Hook of the user's own function.
    """
    found = []
    for name in experiment.train.hooks:
        code = load_code(name, experiment.search_paths, _KEY, experiment.places)
        hook = code.found
        if not isinstance(hook, Hook):
            hint = f"mk.Hook(fn, every=100) as the value of {name.partition(':')[2]}"
            raise code.error(f"{name} is {a_type(hook)}, not a Hook.", hint)
        code = replace(code, found=hook.fn)
        check_function(code)
        found.append(replace(hook, fn=_located(code)))
    return tuple(found)


def _located(code: UserCode) -> Callable[[TrainingStep], Any]:
    """Return the user's function, with errors that report the file and key that name it."""

    def call(step: TrainingStep) -> None:
        what = f"{code.name}, called after step {step.number},"
        with code.calling(what, hint="the line it names; the same command resumes the run"):
            code.found(step)

    return call
