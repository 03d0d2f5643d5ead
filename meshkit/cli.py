"""The command line: one function per verb. Exit codes: see `main`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from meshkit.console import output, say
from meshkit.distributed.environment import leave_gang, say_lost_process
from meshkit.errors import BUG, DONE, INTERRUPTED, USER_ERROR, MeshkitError
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
        from importlib import metadata  # takes longer than all else here

        output(", ".join(f"{name} {metadata.version(name)}" for name in ("meshkit", "jax", "jaxlib")))
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Options before the verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        0 done (also when a step does not fit); 1 a bug of ours; 2 what the user gave is wrong or unreadable; 3 a
        condition the user asked for is not met; 4 the run failed and may be restarted; 75 preempted with a checkpoint
        saved; 130 interrupted.
    """
    # XLA's C++ side logs at INFO that it found no GPU; read when its library loads.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    redact_streams()
    code = _run(argv)
    if argv is None:
        leave_gang(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        code = app(args=list(argv) if argv is not None else None, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except MeshkitError as e:
        say(f"meshkit: {e.render()}")
        return e.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as e:
        if e.filename is None:
            return _bug()
        say(f"meshkit: {e.filename} cannot be read or written: {e.strerror}.")
        return USER_ERROR
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # the command-line library turned the closed pipe into an exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        return e.code if isinstance(e.code, int) else 1
    except Exception as e:
        if hasattr(e, "show") and hasattr(e, "format_message"):  # a usage error of the command-line library
            e.show()  # pyright: ignore[reportAttributeAccessIssue]
            return USER_ERROR
        return say_lost_process(e) or _bug()


def _bug() -> int:
    say(f"{traceback.format_exc()}meshkit: this is a bug of ours; please report it with the lines above.")
    return BUG


if __name__ == "__main__":
    sys.exit(main())
