"""Test the cache of executables: the next attempt finds them, damage is noticed, and the folder must be private."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler

from meshkit.compile.attached import CompileCache, compile_cache
from meshkit.errors import ConfigError
from meshkit.private import MARK, private_folder

ROOT = Path(__file__).parents[2]
X = np.arange(4.0, dtype=np.float32)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return a cache folder that the user names; jax's own cache is not set."""
    monkeypatch.setenv("MESHKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MESHKIT_CACHE_BYTES", raising=False)
    return tmp_path / "cache"


def compile_once(x, scale):
    """Return the program's output as numpy; each call compiles a new function, which jax's own caches do not know."""
    return np.asarray(jax.jit(lambda v: jnp.sin(v) * scale).lower(x).compile()(x))


def attempts(scales):
    """Return hits and misses of attempts that compile one program each.

    All compile from one line, because the line is part of the key.
    """
    found = []
    for scale in scales:
        with compile_cache(print) as cache:
            values = compile_once(X, scale)
            found.append((cache.hits, cache.misses))
        # The tolerance allows a few roundings of fp32.
        np.testing.assert_allclose(values, np.sin(X) * scale, rtol=1e-6)
    return found


def test_what_was_compiled_is_found_again(root):
    assert attempts([3.0, 3.0, 4.0, 4.0]) == [(0, 1), (1, 0), (0, 1), (1, 0)]
    (folder,) = (p for p in (root / "compiled").iterdir() if p.is_dir())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}


def test_jax_is_left_as_it_was(root):
    write = compiler._cache_write
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
             "jax_compilation_cache_include_metadata_in_key")  # fmt: skip
    before = [getattr(jax.config, name) for name in names]
    with pytest.raises(ValueError, match="from inside"), compile_cache(print):
        raise ValueError("from inside")
    assert [getattr(jax.config, name) for name in names] == before
    assert compiler._cache_write is write
    compile_once(np.arange(5.0, dtype=np.float32), 2.0)
    assert {p.name for p in root.rglob("*") if p.is_file()} == {MARK}


def test_the_function_of_jax_that_is_replaced_is_as_expected(root):
    """If jax's function changed, processes beyond the first would compile again on CPUs, silently."""
    from meshkit.compile.attached import WRITE_ARGUMENTS

    with compile_cache(print):
        assert compiler._cache_write.__module__ == "meshkit.compile.attached"
    assert compiler._cache_write.__module__ == "jax._src.compiler"
    assert len(WRITE_ARGUMENTS) == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_entry_is_compiled_again(root, damage):
    def scales():
        yield 5.0
        (entry,) = (p for p in root.rglob("*") if p.is_file() and p.name != MARK)
        content = entry.read_bytes()
        flipped = content[:40] + bytes([content[40] ^ 1]) + content[41:]
        entry.write_bytes({"flip": flipped, "cut": content[: len(content) // 2], "empty": b""}[damage])
        yield 5.0
        yield 5.0

    assert attempts(scales()) == [(0, 1), (0, 1), (1, 0)]


def cache_in(folder, most_bytes):
    return CompileCache(private_folder(folder / "kept"), most_bytes)


def entries(folder):
    return sorted(p.name for p in (folder / "kept").iterdir() if p.name != MARK)


def test_entries_used_longest_ago_go_first(tmp_path):
    cache = cache_in(tmp_path, 3 * 132)
    for i, key in enumerate("abc"):
        cache.put(key, bytes(100))
        os.utime(tmp_path / "kept" / f"{key}.executable", (i, i))
    assert cache.get("a") == bytes(100)  # Now this entry is the most recently used.
    cache.put("d", bytes(100))
    assert entries(tmp_path) == ["a.executable", "c.executable", "d.executable"]


def test_a_full_disk_costs_the_entry_alone(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    cache = cache_in(tmp_path, 1000)
    monkeypatch.setattr(os, "replace", full)
    cache.put("a", b"x")
    assert entries(tmp_path) == []


ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user takes root")


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(lambda entry: os.chown(entry, 12345, -1), marks=ROOT_ONLY),
        lambda entry: entry.chmod(0o666),
        lambda entry: (entry.unlink(), entry.symlink_to("another.executable")),
        lambda entry: (entry.unlink(), os.mkfifo(entry)),
    ],
    ids=["owner", "writable", "link", "pipe"],
)
def test_an_entry_that_somebody_else_has_put_there_is_not_run(tmp_path, plant):
    cache = cache_in(tmp_path, 10_000)
    for name in ("k", "another"):
        cache.put(name, name.encode())
    assert cache.get("k") == b"k"
    plant(tmp_path / "kept" / "k.executable")
    assert cache.get("k") is None


def test_a_named_folder_that_is_not_private_is_an_error(root, monkeypatch):
    (root / "compiled").mkdir(parents=True)
    (root / "compiled").chmod(0o755)
    with (
        pytest.raises(ConfigError, match=r"MESHKIT_CACHE names cannot be used: others may enter it \(mode 0755"),
        compile_cache(print),
    ):
        pass


def test_a_default_folder_that_is_not_private_is_said_and_not_used(tmp_path, monkeypatch):
    monkeypatch.delenv("MESHKIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "meshkit" / "compiled").mkdir(parents=True)
    (tmp_path / "meshkit" / "compiled").chmod(0o755)
    said = []
    with compile_cache(said.append) as cache:
        assert cache is None
        compile_once(np.arange(6.0, dtype=np.float32), 2.0)
    assert len(said) == 1
    assert "a restart compiles again" in said[0]
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_it_can_be_off(monkeypatch):
    monkeypatch.setenv("MESHKIT_CACHE", "off")
    with compile_cache(print) as cache:
        assert cache is None


def test_jax_cache_of_the_users_own_must_be_private_too(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o755)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        with pytest.raises(ConfigError, match="holds code that would be run"), compile_cache(print):
            pass
        folder.chmod(0o700)
        with compile_cache(print) as cache:
            assert cache is None
            assert jax.config.jax_compilation_cache_dir == str(folder)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_attempt_of_two_processes_compiles_nothing(tmp_path):
    """Every process keeps what it compiles: the second run adds no entry, and it uses every entry."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"MESHKIT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "meshkit", "launch", "local", "--processes", "2", "--devices", "4"]
    command += [str(ROOT / "configs/experiments/llama_debug_cpu.toml"), "--set", "profile="]
    command += ["--set", "train.steps=2", "--set", "train.evaluate_every=2", "--set", "train.sequence_length=32"]
    losses, entries = [], []
    for run in ("first", "second"):
        subprocess.run([*command, "--out", str(tmp_path / run)], env=environment, cwd=ROOT, check=True, timeout=600)
        found = {p.name: p.stat().st_mtime for p in (tmp_path / "cache" / "compiled").glob("*/*.executable")}
        entries.append(found)
        losses.append((tmp_path / run / "metrics.jsonl").read_text().count('"loss"'))
    first, second = entries
    assert second.keys() == first.keys()
    assert any(name.startswith("jit_train_step") for name in first)
    assert [name for name in first if second[name] <= first[name]] == []
    assert losses == [2, 2]
