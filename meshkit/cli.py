"""The command line, with one function per verb. `main` has the exit codes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, TextIO

import typer

from meshkit.console import output, say
from meshkit.distributed.environment import leave_gang, say_lost_process
from meshkit.errors import BUG, DONE, INTERRUPTED, RUN_FAILED, USER_ERROR, MeshkitError
from meshkit.redaction import redact_streams
from meshkit.verbs.bench.cli import bench
from meshkit.verbs.checkpoint.cli import checkpoint_app
from meshkit.verbs.compare.cli import compare
from meshkit.verbs.doctor.cli import doctor
from meshkit.verbs.explain.cli import explain
from meshkit.verbs.launch.cli import launch_app
from meshkit.verbs.new.cli import new
from meshkit.verbs.plan.cli import plan
from meshkit.verbs.profile.cli import profile
from meshkit.verbs.rehearse.cli import rehearse
from meshkit.verbs.schema.cli import schema
from meshkit.verbs.topo.cli import topo
from meshkit.verbs.train.cli import train
from meshkit.verbs.tune.cli import tune

app = typer.Typer(
    name="meshkit",
    help="Declarative meshes, sharding rules and truthful communication reports for JAX on NVIDIA GPU clusters.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_GRACE_S = 1.0  # Time that an interrupted verb has to stop by itself.
_interrupted, _ending = threading.Event(), threading.Lock()
# Errors of the machine, not of the user's input: a full disk, quota or table of open files, or a failed device.
_OUT_OF = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_FEW_ADDRESSES = 8 * 2**30  # A step takes 4 GB of addresses on eight CPU devices; on GPUs, more than GPU memory.

app.add_typer(launch_app, name="launch")
app.add_typer(checkpoint_app, name="checkpoint")
_EXAMPLES = {
    doctor: "meshkit doctor llama3_8b",
    plan: "meshkit plan llama3_8b --set mesh.tensor=2",
    rehearse: "meshkit rehearse llama3_8b --out runs/rehearsal",
    tune: "meshkit tune llama3_8b --candidates 16 --out runs/tune",
    train: "meshkit train llama_debug_cpu --out runs/first",
    profile: "meshkit profile runs/first --plan runs/plan",
    compare: "meshkit compare runs/plan runs/first --fail-if 'exposed_s>1.1x'",
    explain: "meshkit explain llama3_8b --strict",
    topo: "meshkit topo --check llama3_8b",
    bench: "meshkit bench llama_debug_cpu --out runs/bench",
    new: "meshkit new --model models.llama:Llama --out my.toml",
    schema: "meshkit schema report",
}
for _verb, _example in _EXAMPLES.items():
    app.command(epilog=f"Example: {_example}")(_verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # This takes longer to import than the rest of the module.

        output(", ".join(f"{name} {metadata.version(name)}" for name in ("meshkit", "jax", "jaxlib")))
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Handle the options before the verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 done (also when a step does not fit); 1 a bug of ours; 2 what the user gave is wrong or unreadable; 3 a
        condition the user asked for is not met; 4 the run failed and may be restarted; 75 preempted, and a checkpoint
        is saved; 76 a snapshot is saved, and a spare host takes over; 130 interrupted.
    """
    if argv is not None:
        return _main(argv)
    _hear_interrupts()
    try:
        code = _main(None)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED or _interrupted.is_set():
        _end_at_once()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The verb has finished.
    return code


def _hear_interrupts() -> None:
    """Exit with 130 within two seconds of Ctrl-C, whatever code runs; verbs with an orderly stop handle it themselves.

    Python raises KeyboardInterrupt in the code that runs, but some C++ callbacks swallow it. Tearing down the
    interpreter while a thread of XLA runs would crash.
    """

    def interrupted(number: int, frame: Any) -> None:
        _interrupted.set()
        sys.unraisablehook = lambda _: None  # Python would print exceptions that destructors swallow.
        late = threading.Timer(_GRACE_S, _end_at_once)
        late.daemon = True
        late.start()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Leave a signal that is ignored, as under nohup.
        signal.signal(signal.SIGINT, interrupted)


def _end_at_once() -> None:
    """End the children and their folders, then this process with 130, without tearing the interpreter down."""
    from meshkit.children import end_all

    _interrupted.set()
    _ending.acquire()  # Only the first caller proceeds.
    end_all()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)


def _main(argv: Sequence[str] | None) -> int:
    # XLA's C++ library reads this when it loads; at INFO it would log that it found no GPU.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if sys.stdout is None or sys.stderr is None:  # The next opened file would take the free descriptor.
        _tell(f"standard {'output' if sys.stdout is None else 'error'} is closed.\n  try /dev/null in its place")
        return USER_ERROR
    redact_streams()
    _warn_of_limits()
    code = _run_verb(argv)
    if _fails(sys.stdout) or _fails(sys.stderr):
        code = code or RUN_FAILED
    if argv is None:
        leave_gang(code)
    return code


def _run_verb(argv: Sequence[str] | None) -> int:
    try:
        code = app(args=list(argv) if argv is not None else None, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except MeshkitError as e:
        _tell(e.render())
        return e.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as e:
        if e.filename is not None:
            _tell(f"{e.filename} cannot be read or written: {e.strerror}.")
            return USER_ERROR
        if e.errno not in _OUT_OF:
            return _bug()
        what = "standard output or a file cannot be written or read"
        _tell(f"{what}: {e.strerror}.\n  try making room for it: `df` and `ulimit -a` show what there is")
        return RUN_FAILED
    except MemoryError:
        _tell("this process gets no more memory.\n  try a higher limit (`ulimit -v`, the container's), or less input")
        return RUN_FAILED
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # The command-line library turned the closed pipe into an exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        return e.code if isinstance(e.code, int) else 1
    except Exception as e:
        if hasattr(e, "show") and hasattr(e, "format_message"):  # The command-line library's usage error.
            with suppress(OSError):
                e.show()  # pyright: ignore[reportAttributeAccessIssue]
            return USER_ERROR
        if "surrogates not allowed" in str(e):  # Any encoder's error, whatever library raised it.
            _tell(f"the name of a file is not UTF-8 text, but output must be: {e}.\n  try another name")
            return USER_ERROR
        return say_lost_process(e) or _bug()


def _tell(text: str) -> None:
    """Print an error on stderr if that is possible; print nothing after Ctrl-C, which causes errors itself."""
    if _interrupted.is_set():
        return
    with suppress(OSError):
        say(f"meshkit: {text}")


def _fails(stream: TextIO) -> bool:
    """Return whether a flush fails, except on a closed pipe; drop the buffer, or Python would set the exit code."""
    try:
        stream.flush()
    except OSError as e:
        with suppress(OSError):  # A stream that a user installed has no descriptor.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return not isinstance(e, BrokenPipeError)
    return False


def _warn_of_limits() -> None:
    """Warn of a limit on virtual memory, because XLA would abort without a message of ours."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _FEW_ADDRESSES:
        _tell(
            f"ulimit -v allows {limit / 2**30:.1f} GiB of virtual memory, and XLA aborts where it needs more.\n"
            "  try ulimit -v unlimited"
        )


def _bug() -> int:
    with suppress(OSError):
        if not _interrupted.is_set():
            say(f"{traceback.format_exc()}meshkit: this is a bug of ours; please report it with the lines above.")
    return BUG


if __name__ == "__main__":
    sys.exit(main())
