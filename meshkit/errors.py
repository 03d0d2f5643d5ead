"""Every error that meshkit raises on purpose.

    MeshkitError
    ├── ConfigError       what the user wrote: experiment file, override, argument, environment   (exit code 2)
    ├── TraceError        a trace, report or checkpoint file that we cannot read                  (exit code 2)
    ├── ProgramError      a compiled program that we do not understand or XLA refuses             (exit code 2)
    ├── ConditionError    a condition the user asked for is not met (--require-fit, --fail-if)    (exit code 3)
    └── RunError          a run that failed and may be restarted                                  (exit code 4)

A message is one sentence with the numbers, then the place (file, line, key), then what to try.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable

from meshkit.redaction import printable, redact

DONE, BUG, USER_ERROR, CONDITION, RUN_FAILED, PREEMPTED, DRAINED, INTERRUPTED = 0, 1, 2, 3, 4, 75, 76, 130
"""The exit codes of meshkit. 75: a checkpoint was saved. 76: a snapshot was saved, and a spare host takes over."""


class MeshkitError(Exception):
    """Root of the tree. It prints `message`, `at WHERE` and `try HINT` on separate lines, without secrets.

    Args:
        message: one sentence that says what is wrong, with the numbers.
        at: place of the error: `file:line: key = value`, or a path.
        hint: what to do about it, an imperative without the leading "try".
    """

    exit_code = USER_ERROR

    def __init__(self, message: str, *, at: str | None = None, hint: str | None = None):
        self.message = printable(redact(message))
        self.at, self.hint = (text and printable(redact(text)) for text in (at, hint))
        super().__init__(self.render())

    def render(self) -> str:
        """Return the message as the terminal shows it, without the leading `meshkit: `."""
        lines = [self.message]
        if self.at:
            lines.append(f"  at {self.at}")
        if self.hint:
            lines.append(f"  try {self.hint}")
        return "\n".join(lines)


class ConfigError(MeshkitError):
    """The user's input is wrong, or something it needs is missing."""


class TraceError(MeshkitError):
    """A file that a run left behind (trace, report, checkpoint) cannot be read."""


class ProgramError(MeshkitError):
    """A program that XLA refuses to compile, or whose HLO we do not understand."""


class ConditionError(MeshkitError):
    """A condition the user asked us to check does not hold."""

    exit_code = CONDITION


class RunError(MeshkitError):
    """A run failed for a reason that a restart may fix."""

    exit_code = RUN_FAILED


_MADE_BY = {
    "Cluster": 'meshkit.Cluster.load("dgx_h100")',
    "Mesh": "meshkit.build_mesh(spec, cluster)",
    "MeshSpec": 'meshkit.MeshSpec.parse({"data": 2, "fsdp": 4})',
    "Report": "meshkit.read_report(folder)",
    "ShardingRules": 'meshkit.ShardingRules({"embed": "fsdp"})',
}


def check_kinds(function: Callable[..., object], **given: object) -> None:
    """Refuse arguments of a public function whose classes differ from its annotations, such as swapped arguments.

    Args:
        function: the function, which annotates these arguments with classes or unions of classes.

    Raises:
        ConfigError: one is of another class.
    """
    hints = _hints(function)
    for name, value in given.items():
        if not isinstance(value, hints[name]):
            kinds = [kind.__name__ for kind in typing.get_args(hints[name]) or (hints[name],)]
            made = next(filter(None, map(_MADE_BY.get, kinds)), None)
            taken = [*inspect.signature(function).parameters]
            order = ", ".join(taken[: max(map(taken.index, given)) + 1])
            raise ConfigError(
                f"{name} is {a_type(value)}, not a {' or '.join(kind for kind in kinds if kind != 'NoneType')}.",
                hint=(f"{name} = {made}; " if made else "") + f"the arguments in this order: {order}",
            )


@functools.cache
def _hints(function: Callable[..., object]) -> dict[str, typing.Any]:
    return typing.get_type_hints(function)


def a_type(value: object) -> str:
    """Return the type of a value, with its article: `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"
