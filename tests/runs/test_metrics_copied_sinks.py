"""Test the guide's sinks as a user would copy them, with the real packages where they are installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from meshkit.config.experiment import load
from meshkit.planning.resolved import find_sinks
from meshkit.runs.metrics import open_sinks

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "where-does-wandb-go.md").read_text(encoding="utf-8")
EXPERIMENT = 'cluster = "cpu8"\nmodel = { class = "models.mlp:Mlp" }\n[mesh]\ndata = 8\n[train]\nglobal_batch = 8\n'


@pytest.mark.parametrize(
    ("package", "module", "left"),
    [
        ("wandb", "my_wandb", "wandb/offline-run-*/*.wandb"),
        ("mlflow", "my_mlflow", "mlflow.db"),
        ("tensorboard", "my_board", "board/events.out.tfevents.*"),
    ],
)
def test_a_sink_of_the_guide_writes_what_its_package_reads(package, module, left, tmp_path, monkeypatch):
    pytest.importorskip(package)
    code = re.search(rf"```python\n(# {module}\.py\n.*?)```", PAGE, re.DOTALL)
    assert code is not None
    (tmp_path / f"{module}.py").write_text(code[1], encoding="utf-8")
    (tmp_path / "experiment.toml").write_text(EXPERIMENT + f'metrics = "{module}:write"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delitem(sys.modules, module, raising=False)
    said: list[str] = []
    sinks = open_sinks(find_sinks(load(tmp_path / "experiment.toml")), tmp_path, said.append)
    for step in (1, 2, 3):
        sinks.put({"step": step, "loss": 1 / step, "grad_norm": None})
    sinks.close(60)
    assert said == []
    assert list(tmp_path.glob(left))
