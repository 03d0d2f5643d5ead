"""`meshkit explain`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from meshkit.console import output, say, status, stdout
from meshkit.errors import ConfigError
from meshkit.verbs.arguments import ExperimentArg, JsonOption, SetOption


def explain(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if there is a warning.")] = False,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the step, to check its collectives.")
    ] = True,
    propose: Annotated[
        bool, typer.Option("--propose", help="Say which link each mesh axis belongs on (default).")
    ] = False,
    rules: Annotated[bool, typer.Option("--rules", help="Print the resolved [rules] table as TOML and exit.")] = False,
) -> None:
    """Show where every parameter and activation is placed.

    Lists logical axes, mesh axes and bytes per GPU; findings, which are legal but probably not intended; the reason for
    each collective of the compiled step; and the best placement of the axes on links. Needs no GPU.
    """
    from meshkit.config.experiment import load_any
    from meshkit.verbs.explain.explainer import explain as explain_experiment
    from meshkit.verbs.explain.explainer import render, rules_toml

    start = time.perf_counter()
    loaded = load_any(experiment, set_)
    if rules:
        output(rules_toml(loaded), end="")
        return
    if propose and not compile_:
        raise ConfigError("--propose compiles the step, but --no-compile forbids that.", hint="one of the two")
    with status(f"checking {loaded.name}"):
        explanation = explain_experiment(loaded, compile=compile_)
    if as_json:
        output(explanation.model_dump_json(by_alias=True))
    else:
        stdout().print(render(explanation))
        say(f"explained in {time.perf_counter() - start:.1f} s")
    if propose and explanation.placement is None:
        raise ConfigError(f"there is no placement to propose: {explanation.collectives_note}.")
    if strict:
        from meshkit.linting.placements import check_strict

        check_strict(explanation.findings)
