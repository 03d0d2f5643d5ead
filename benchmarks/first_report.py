"""Minutes from an empty folder to the first report, for somebody who has the wheel alone.

`python -m benchmarks.first_report` builds the wheel, downloads it with what `[plan]` needs, installs that in a new
environment, and works in an empty folder with an empty HOME: an experiment of its own, then the guide's program about a
model of somebody else's. Writes first_report.md beside this file.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guides" / "use-in-your-flax-model.md"


def guides_program() -> str:
    """The first program of the guide, which plans a model of somebody else's after training and profiling it."""
    program = re.search(r"## In few lines.*?```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert program is not None
    return 'import meshkit as mk\n\nmk.prepare_platform(mk.Cluster.load("cpu8"))\n' + program[1]


def main() -> None:
    """Runs each command once, and prints its seconds."""
    rows: list[tuple[str, float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        home, empty, wheels = (Path(folder, name) for name in ("home", "empty", "wheels"))
        for made in (home, empty, wheels):
            made.mkdir()
        (empty / "theirs.py").write_text(guides_program(), encoding="utf-8")
        bin_ = Path(folder, "venv", "bin")
        path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
        pip_settings = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "LANG"))}

        def run(what: str, command: list[str], note: str = "") -> None:
            start = time.perf_counter()
            environment = {"HOME": str(home), "PATH": path, **pip_settings}
            done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - start
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
            rows.append((what, seconds, note))
            print(f"{seconds:6.1f} s  {what}", flush=True)

        quiet = ["-qq", "--disable-pip-version-check"]
        build = [sys.executable, "-m", "pip", "wheel", *quiet, "--no-deps", "-w", str(wheels), str(ROOT)]
        subprocess.run(build, check=True)
        (wheel,) = wheels.iterdir()
        wanted = ["-c", str(ROOT / "constraints.txt"), f"{wheel}[plan]"]
        run(
            "`pip download 'meshkit[plan]'`",
            [sys.executable, "-m", "pip", "download", *quiet, "-d", str(wheels), *wanted],
        )
        megabytes = sum(file.stat().st_size for file in wheels.iterdir()) / 1e6
        rows[-1] = (*rows[-1][:2], f"{megabytes:.0f} MB in {len(list(wheels.iterdir()))} wheels")
        run("`python -m venv`", [sys.executable, "-m", "venv", str(bin_.parent)])
        offline = ["--no-index", "--find-links", str(wheels)]
        run(
            "`pip install`, from those files", [str(bin_ / "python"), "-m", "pip", "install", *quiet, *offline, *wanted]
        )
        run("`meshkit new --out mine.toml`", ["meshkit", "new", "--out", "mine.toml"])
        plan = ["meshkit", "plan", "mine.toml", "--set", "cluster=dgx_h100", "--out", "runs/plan"]
        run(f"`{' '.join(plan)}`", plan, "the first report")
        train = ["meshkit", "train", "mine.toml", "--set", "train.steps=20", "--out", "runs/mine"]
        for command in (["meshkit", "explain", "mine.toml"], train, ["meshkit", "profile", "runs/mine"]):
            run(f"`{' '.join(command)}`", command)
        run(
            "the guide's program, `python theirs.py`", [str(bin_ / "python"), "theirs.py"], "a model of somebody else's"
        )
    first = sum(seconds for _, seconds, _ in rows[:5])
    foreign = sum(seconds for _, seconds, _ in (*rows[:3], rows[-1]))
    text = "\n".join(f"| {what} | {seconds:.1f} | {note} |" for what, seconds, note in rows)
    said = (
        f"{first / 60:.1f} minutes to the first report, {foreign / 60:.1f} to that of a foreign model by the guide. "
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}; "
        "a download takes what the network does."
    )
    head = "# Minutes to the first report\n\n`python -m benchmarks.first_report`\n\n| what | s | |\n|---|---|---|"
    Path(__file__).with_suffix(".md").write_text(f"{head}\n{text}\n\n{said}\n", encoding="utf-8")
    print(said)


if __name__ == "__main__":
    main()
