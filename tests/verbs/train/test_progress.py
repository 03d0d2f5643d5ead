"""What a run says is printed as it is: a path or an error may hold what rich takes for markup."""

import io

from rich.console import Console

from meshkit.verbs.train.run_log import StepProgress


def test_brackets_are_no_markup():
    out = io.StringIO()
    progress = StepProgress(Console(file=out, width=80), 10, enabled=True)
    for text in ("resuming runs/[/x] after step 3", "[red]", "KeyError: '[/bold]'"):
        progress.say(text)
    assert out.getvalue().splitlines() == ["resuming runs/[/x] after step 3", "[red]", "KeyError: '[/bold]'"]
