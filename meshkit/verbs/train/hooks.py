"""Functions that a training calls between its steps, every so many of them.

    [train] hooks = ["pkg.mod:name"] -> find_hooks -> Hook(fn, every) -> fn(TrainingStep), after each step that is due

What is optional in a training is such a function: the evaluation, the check of replicas, what the user brings.
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
    """A training step that was called, as hooks see it. Devices may still be computing it."""

    number: int
    """Of the step, from 1. Where one call makes several steps, as with `[local_sgd]`, of the last."""
    steps: int
    """Of the whole run."""
    state: TrainState
    """After the step, on the devices. The next step takes over its memory: copy what is to be kept."""
    arrays: Mapping[str, jax.Array]
    """The results of the step, such as `loss` and `grad_norm`, on the devices and perhaps not computed yet."""
    read: Callable[[Mapping[str, jax.Array]], list[dict[str, float]]] = field(repr=False)
    """Waits for the arrays; the numbers of each step of the call."""
    per_call: int = 1
    """Training steps of the call."""
    added: dict[str, float] = field(default_factory=dict)
    """The numbers that hooks add to the step's line in `metrics.jsonl`."""
    stops: bool = False
    """Whether a hook has called `stop`."""
    numbers: list[dict[str, float]] | None = None
    """The result of `read`; None before the call."""

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
        """The numbers of the step, as its line in `metrics.jsonl` has them. Waits until the devices have made it."""
        return dict(self.wait()[-1])

    def wait(self) -> list[dict[str, float]]:
        """Returns the numbers of each step of the call, once the devices have made it."""
        if self.numbers is None:
            self.numbers = self.read(self.arrays)
        return self.numbers

    def add(self, **numbers: float) -> None:
        """Adds numbers to the step's line in `metrics.jsonl`, and for all that gets it. That of process 0 counts.

        Raises:
            ValueError: the line has another number of that name.
        """
        for name, number in numbers.items():
            if name in RESERVED_METRICS or name in self.arrays:
                raise ValueError(f"the line of a step has a '{name}' of its own: another name, such as 'own_{name}'")
            self.added[name] = float(number)

    def stop(self) -> None:
        """Ends the run after this step, as if it were the last one. Every process has to ask for it."""
        self.stops = True


@dataclass(frozen=True)
class Hook:
    """A function that `meshkit train` calls every so many steps, in every process of the job.

    Steps are counted from the beginning of the run: one that resumes calls it after the same steps as one that was not
    interrupted. It runs before a checkpoint of the step is saved, and again for steps that are made again.

        import meshkit as mk

        def watch(step):
            step.add(loss_in_bits=step.metrics["loss"] / 0.6931)

        watched = mk.Hook(watch, every=100)  # [train] hooks = ["my_hooks:watched"]

    Raises:
        ConfigError: `fn` cannot be called, or `every` is no number of steps.
    """

    fn: Callable[[TrainingStep], Any]
    """Called with the step that was made; what it returns is not looked at."""
    every: int = 1
    """Steps; 0 is never."""
    last: bool = False
    """Whether it is called after the last step, too."""

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ConfigError(f"the fn of a Hook is {a_type(self.fn)}, not a function.", hint="mk.Hook(fn, every=100)")
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 0:
            raise ConfigError(f"the every of a Hook is {self.every!r}, not a number of steps.", hint="every=100")

    def is_due(self, step: TrainingStep) -> bool:
        """Return whether it is called after this step, or after one that was made in the same call."""
        crossed = self.every > 0 and step.number // self.every > (step.first - 1) // self.every
        return crossed or (self.last and self.every > 0 and step.is_last)


def find_hooks(experiment: Experiment) -> tuple[Hook, ...]:
    """Return the hooks that `train.hooks` names; what they raise later is a ConfigError at that key.

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
    """Return the user's function, whose errors say which key of which file names it."""

    def call(step: TrainingStep) -> None:
        what = f"{code.name}, called after step {step.number},"
        with code.calling(what, hint="the line it names; the same command resumes the run"):
            code.found(step)

    return call
