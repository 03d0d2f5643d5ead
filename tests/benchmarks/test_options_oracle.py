"""Test that the option oracle keeps its predictions until all new ones are there."""

import pytest

from benchmarks import options_oracle
from meshkit.errors import ProgramError


def test_an_arm_that_fails_leaves_the_predictions_as_they_were(monkeypatch, tmp_path):
    kept = options_oracle.PREDICTED.read_text(encoding="utf-8")
    (tmp_path / "predicted.csv").write_text(kept, encoding="utf-8")

    def fails(_):
        raise ProgramError("XLA refuses it")

    monkeypatch.setattr(options_oracle, "PREDICTED", tmp_path / "predicted.csv")
    monkeypatch.setattr(options_oracle, "plan_experiment", fails)
    monkeypatch.setattr("sys.argv", ["options_oracle", "--predict"])
    with pytest.raises(ProgramError, match="XLA refuses it"):
        options_oracle.main()
    assert (tmp_path / "predicted.csv").read_text(encoding="utf-8") == kept
