"""Measure the time to the first report, from the wheel alone or from a clone, and write first_report.md.

    python -m benchmarks.first_report
    python -m benchmarks.first_report --clone [--test]

The first command builds the wheel, downloads it with the packages that `[plan]` needs and installs them in a new
environment. It then works in an empty folder with an empty HOME: it runs README's commands and the program of the guide
that plans a model of another project. The second command clones this repository's HEAD and runs README's `make demo` in
the clone; `--test` also runs `make test`, which takes about 15 minutes. Each command rewrites its own section of
first_report.md, with the seconds of every step and the megabytes downloaded.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")
GUIDE = ROOT / "docs" / "guides" / "use-in-your-flax-model.md"
QUIET = ["-qq", "--disable-pip-version-check"]
HEADINGS = {"wheel": "## From the wheel, in an empty folder", "clone": "## From a clone"}
# Patterns of the lines that a reader looks for in a command's output, in order of preference.
SAID = (
    r"nothing looks wrong",
    r"^step +[\d.]+ [mu]?s(?: .*)?$",
    r"loss [\d.]+ nats per token",
    r"\d+ passed.*",
    r"^wrote .*",
)


def guides_program() -> str:
    """Return the guide's first program, which trains, profiles and plans a model of another project."""
    program = re.search(r"## In few lines.*?```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert program is not None
    return 'import meshkit as mk\n\nmk.prepare_platform(mk.Cluster.load("cpu8"))\n' + program[1]


def readmes_commands() -> list[str]:
    """Return the commands that README says work in any folder."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^(meshkit .*?) +#", text.split("work in any folder", 1)[1].split("\n## ")[0], re.MULTILINE)


def said(output: str) -> str:
    """Return the line of an output that the reader looks for, or an empty string."""
    for pattern in SAID:
        if found := re.findall(pattern, output, re.MULTILINE):
            return " ".join(found[-1].split())
    return ""


def megabytes(folder: Path) -> str:
    """Return the size and the number of the files in a folder of downloads, as text."""
    files = list(folder.iterdir())
    return f"{sum(file.stat().st_size for file in files) / 1e6:.0f} MB in {len(files)} files"


class Log:
    """A runner of commands that uses a fresh HOME and records each command's times and main output line."""

    def __init__(self, home: Path, folder: Path, path: str) -> None:
        self.folder, self.rows = folder, list[tuple[str, float, float, str]]()
        kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "LANG"))}
        self.environment = {"HOME": str(home), "PATH": path, **kept}

    def run(self, shown: str, command: list[str], note: str = "") -> None:
        """Run a command once and record it; exit with its output if it fails."""
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.rows.append((f"`{shown}`", seconds, cpu_s, note or said(done.stdout + done.stderr)))
        print(f"{seconds:7.1f} s  {shown}  {self.rows[-1][3]}", flush=True)

    def note(self, note: str) -> None:
        """Replace the note of the last command."""
        self.rows[-1] = (*self.rows[-1][:3], note)


def from_the_wheel(folder: Path) -> str:
    """Run the commands of the wheel's section and return its table."""
    home, empty, wheels = (folder / name for name in ("home", "empty", "wheels"))
    for made in (home, empty, wheels):
        made.mkdir()
    (empty / "theirs.py").write_text(guides_program(), encoding="utf-8")
    bin_ = folder / "venv" / "bin"
    log = Log(home, empty, f"{bin_}{os.pathsep}{os.environ['PATH']}")
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", *QUIET, "--no-deps", "-w", str(wheels), str(ROOT)], check=True)
    (wheel,) = wheels.iterdir()
    wanted = ["-c", str(ROOT / "constraints.txt"), f"{wheel}[plan]"]
    log.run("pip download 'meshkit[plan]'", [*pip, "download", *QUIET, "-d", str(wheels), *wanted])
    log.note(megabytes(wheels))
    log.run("python -m venv", [sys.executable, "-m", "venv", str(bin_.parent)])
    offline = ["--no-index", "--find-links", str(wheels)]
    install = [str(bin_ / "python"), "-m", "pip", "install", *QUIET, *offline, *wanted]
    log.run("pip install 'meshkit[plan]'", install, "from those files")
    for command in (*readmes_commands(), "meshkit profile runs/mine"):
        log.run(command, [word.strip("'") for word in command.split()])
    log.run("python theirs.py", ["python", "theirs.py"], "the guide's program about a model of somebody else's")
    at = next(i for i, row in enumerate(log.rows) if row[0].startswith("`meshkit plan"))
    first = sum(row[1] for row in log.rows[: at + 1])
    foreign = sum(row[1] for row in (*log.rows[:3], log.rows[-1]))
    return (
        f"{table(log)}\n\nIt takes {first / 60:.1f} minutes to the first report (the first plan), and "
        f"{foreign / 60:.1f} to that of a foreign model with the guide's program.\n{machine()}"
    )


def from_a_clone(folder: Path, test: bool) -> str:
    """Run README's `make demo`, and `make test` if `test` is true, in a fresh clone; return the table."""
    home, wheels, clone = (folder / name for name in ("home", "wheels", "meshkit"))
    home.mkdir()
    log = Log(home, folder, os.environ["PATH"])
    log.run("git clone", ["git", "clone", "-q", "--no-local", str(ROOT), str(clone)])
    log.note(f"{sum(f.stat().st_size for f in (clone / '.git').rglob('*') if f.is_file()) / 1e6:.0f} MB")
    log.folder = clone
    download = ["download", *QUIET, "--no-cache-dir", "-c", "constraints.txt", "-d", str(wheels), ".[plan,dev]"]
    log.run("pip download '.[plan,dev]'", [sys.executable, "-m", "pip", *download])
    log.note(f"{megabytes(wheels)}: what `make` downloads")
    log.run("make setup", ["make", "setup"], "a new environment; downloads again")
    log.run("make demo", ["make", "demo"])
    log.note("trained, profiled, planned twice")
    if test:
        log.run("make test", ["make", "test"])
    return f"{table(log)}\n\n{machine()}"


def table(log: Log) -> str:
    """Return the recorded commands as a Markdown table."""
    rows = (f"| {shown} | {wall:.1f} | {cpu:.1f} | {note} |" for shown, wall, cpu, note in log.rows)
    return "\n".join(["| command | wall, s | CPU, s | |", "|---|---|---|---|", *rows])


def machine() -> str:
    """Return a sentence that names the Python version, the machine's CPUs and load, and the date."""
    return (
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load average {os.getloadavg()[2]:.1f}, "
        f"{time.strftime('%Y-%m-%d')}. The time of a download depends on the network."
    )


def main() -> None:
    """Run the commands of one section and write that section of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clone", action="store_true", help="run README's commands in a fresh clone")
    parser.add_argument("--test", action="store_true", help="run `make test` in the clone as well")
    asked = parser.parse_args()
    part, options = ("clone", " --clone" + " --test" * asked.test) if asked.clone else ("wheel", "")
    with tempfile.TemporaryDirectory() as folder:
        made = from_a_clone(Path(folder), asked.test) if asked.clone else from_the_wheel(Path(folder))
    old = PAGE.read_text(encoding="utf-8")
    kept = {name: re.search(rf"{heading}\n\n(.*?)(?=\n## |\Z)", old, re.DOTALL) for name, heading in HEADINGS.items()}
    texts = {name: found[1].strip() if found else "" for name, found in kept.items()}
    command = f"`python -m benchmarks.first_report{options}`"
    texts[part] = f"{command}, with an empty HOME:\n\n{made}"
    sections = [f"{heading}\n\n{texts[name]}\n" for name, heading in HEADINGS.items() if texts[name]]
    PAGE.write_text("\n".join(["# Time to the first report\n", *sections]), encoding="utf-8")


if __name__ == "__main__":
    main()
