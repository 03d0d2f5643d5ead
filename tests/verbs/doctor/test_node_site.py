"""Test that doctor says what the site allows, and whether a restart would compile again."""

import pytest

from meshkit.config import site
from meshkit.verbs.doctor.node import check_site


@pytest.fixture(autouse=True)
def own_site(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "SITE_FILE", tmp_path / "site.toml")
    monkeypatch.setenv("MESHKIT_CACHE", str(tmp_path / "cache"))
    for name in ("MESHKIT_MODEL_ROOTS", "MESHKIT_FILE_ROOTS"):
        monkeypatch.delenv(name, raising=False)


def test_all_well(tmp_path):
    (found,) = check_site()
    assert (found.check, found.status) == ("compile_cache", "ok")
    assert str(tmp_path / "cache" / "compiled") in found.message


def test_roots_are_said(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(tmp_path))
    found = check_site()[0]
    assert found.status == "ok"
    assert found.message == f"experiments may name models only from {tmp_path}"


def test_a_wrong_root_is_an_error(monkeypatch):
    monkeypatch.setenv("MESHKIT_FILE_ROOTS", "data")
    assert check_site()[0].status == "error"


@pytest.mark.parametrize(("mode", "words"), [(0o755, "others may enter it"), (None, "every restart compiles again")])
def test_a_cache_that_keeps_nothing_is_a_warning(monkeypatch, tmp_path, mode, words):
    if mode is None:
        monkeypatch.setenv("MESHKIT_CACHE", "off")
    else:
        (tmp_path / "cache" / "compiled").mkdir(parents=True)
        (tmp_path / "cache" / "compiled").chmod(mode)
    (found,) = check_site()
    assert found.status == "warning"
    assert words in found.message
    assert found.hint
