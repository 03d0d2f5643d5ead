"""The guide's commands for MaxText by an installed meshkit in an empty folder, timed: `make check-maxtext`."""

import os
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("maxtext", reason="needs MaxText: `make check-maxtext`")
pytestmark = [pytest.mark.deviceless, pytest.mark.slow]
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "your-own-program.md").read_text(encoding="utf-8")


def test_the_commands_of_the_guide_work_as_they_stand(tmp_path):
    section = GUIDE.split("## MaxText\n")[1].split("\n## ")[0]
    (tmp_path / "my_maxtext.py").write_text("# my_maxtext.py\n" + section.split("# my_maxtext.py\n")[1].split("```")[0])
    commands = re.findall(r"^\$ (meshkit .*)", section.replace("\\\n", ""), re.MULTILINE)
    assert len(commands) == 3
    scripts = Path(sys.executable).parent
    environment = {"HOME": str(tmp_path), "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]])}
    for command in commands:
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"\nROW | {' '.join(command.split()[:4])} | {time.perf_counter() - start:.0f} s | CPU {cpu:.0f} s")
    assert 'make = "meshkit.integrations.maxtext:make"' in (tmp_path / "llama.toml").read_text()
    assert all((tmp_path / "runs" / name / "report.html").is_file() for name in ("plan", "own"))
