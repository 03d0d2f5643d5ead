"""Run and time the guide's commands for MaxText with an installed meshkit in an empty folder: `make check-maxtext`."""

import os
import re
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
        start = time.perf_counter()
        with (tmp_path / "said").open("w") as said:
            running = subprocess.Popen(shlex.split(command), cwd=tmp_path, env=environment, stdout=said, stderr=said)
            # wait4 gives the CPU time of this command alone; other tests may have left compilers running.
            _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        assert running.returncode == 0, (tmp_path / "said").read_text()
        wall_s, cpu_s = time.perf_counter() - start, used.ru_utime + used.ru_stime
        print(f"\nROW | {' '.join(command.split()[:4])} | {wall_s:.0f} s | CPU {cpu_s:.0f} s")
    assert 'make = "meshkit.integrations.maxtext:make"' in (tmp_path / "llama.toml").read_text()
    assert all((tmp_path / "runs" / name / "report.html").is_file() for name in ("plan", "own"))
