"""Which files of meshkit a command enters: those of which a function is called, in its child processes too.

What only runs while a module is imported (decorators, tables) is no step of the walk.

    python -m benchmarks.walk plan configs/experiments/llama3_8b.toml --no-cache --out runs/plan

prints the files and their number, which is how much a reader meets on the way from the command line to the result.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Python imports it in every process that has its folder on PYTHONPATH. A function's first start is noted, then no more.
_RECORDER = """
import atexit, os, sys
_seen, _folder, _package = set(), os.environ["WALK_FOLDER"], os.environ["WALK_PACKAGE"]
def _importing():
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(_package) and "__main__" not in code.co_filename:
            return frame.f_globals["__name__"] != "__main__"
        frame = frame.f_back
    return False
def _start(code, offset):
    if code.co_flags & 1 and code.co_filename.startswith(_package) and code.co_filename not in _seen:
        if _importing():
            return None
        _seen.add(code.co_filename)
        with open(os.path.join(_folder, str(os.getpid())), "a") as file:
            file.write(code.co_filename + "\\n")
    return sys.monitoring.DISABLE
sys.monitoring.use_tool_id(4, "walk")
sys.monitoring.register_callback(4, sys.monitoring.events.PY_START, _start)
sys.monitoring.set_events(4, sys.monitoring.events.PY_START)
"""


def walk(arguments: list[str], package: Path) -> list[str]:
    """Files below `package` that `meshkit ARGUMENTS` enters, sorted."""
    with tempfile.TemporaryDirectory() as folder:
        site, found = Path(folder, "site"), Path(folder, "found")
        site.mkdir()
        found.mkdir()
        (site / "sitecustomize.py").write_text(_RECORDER, encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(site), str(package.parent), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "WALK_FOLDER": str(found), "WALK_PACKAGE": f"{package}{os.sep}"}
        done = subprocess.run([sys.executable, "-m", "meshkit", *arguments], env=env, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(done.returncode)
        lines = {line for file in found.iterdir() for line in file.read_text(encoding="utf-8").splitlines()}
    return sorted(str(Path(line).relative_to(package)) for line in lines)


if __name__ == "__main__":
    files = walk(sys.argv[1:], ROOT / "meshkit")
    print(*files, f"{len(files)} files", sep="\n")
