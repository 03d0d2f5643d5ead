"""Test the cache of compiled programs: its keys, damaged entries, the order of eviction, and who may read it."""

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.compile import cache
from meshkit.compile.lowering import export_for_cuda, on_own_stack
from meshkit.compile.program import compile_absent
from meshkit.private import MARK
from meshkit.sharding.mesh import DescribedMesh
from tests.hlo_text import printed

REQUEST = {"target_config": "sms: 132", "mesh_shape": [8], "compiler_options": {"xla_a": True}}
ENTRY = cache.KeptProgram({"memory": {"temp": 3}, "compile_s": 2.5}, "a line\n", b"\x00module" * 1000)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHKIT_CACHE", str(tmp_path))
    monkeypatch.delenv("MESHKIT_CACHE_BYTES", raising=False)
    found = cache.cache_folder()
    assert found is not None
    return found


def entries(folder):
    return sorted(p.name for p in folder.iterdir() if p.name != MARK)


def file_of(folder, key="k"):
    return folder / f"{key}.program"


def test_an_entry_comes_back_as_it_was(folder):
    assert cache.load(folder, "k") is None
    cache.store(folder, "k", ENTRY)
    assert cache.load(folder, "k") == ENTRY
    assert entries(folder) == ["k.program"]  # No temporary file stays.


def test_only_the_owner_can_read(folder):
    cache.store(folder, "k", ENTRY)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(folder).stat().st_mode) == 0o600


def test_a_folder_of_the_users_is_refused_and_left_as_it_is(monkeypatch, tmp_path):
    """The user sets MESHKIT_CACHE=$HOME and has a folder ~/programs."""
    theirs = tmp_path / "programs"
    theirs.mkdir(mode=0o755)
    for name in ("thesis.tex", f"{'0' * 64}.program", "old-0123456789abcdef.tmp"):
        (theirs / name).write_text("mine")
        os.utime(theirs / name, (0, 0))
    monkeypatch.setenv("MESHKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHKIT_CACHE_BYTES", "1")
    with pytest.raises(mk.ConfigError, match="there are files in it, and meshkit did not make it") as error:
        cache.cache_folder()
    assert "MESHKIT_CACHE=/a/new/folder" in (error.value.hint or "")
    assert len(os.listdir(theirs)) == 3
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o755


def test_only_entries_are_removed(folder, monkeypatch):
    """Somebody may have put files of their own into meshkit's folder."""
    for name in ("thesis.tex", "notes.tmp", "seal.key"):
        (folder / name).write_text("mine")
        os.utime(folder / name, (0, 0))
    monkeypatch.setenv("MESHKIT_CACHE_BYTES", "1")
    cache.store(folder, "k", ENTRY)
    assert entries(folder) == ["notes.tmp", "seal.key", "thesis.tex"]


def test_a_folder_that_was_opened_to_others_is_refused(folder):
    folder.chmod(0o777)
    with pytest.raises(mk.ConfigError, match=r"others may enter it \(mode 0777, not 0700\)"):
        cache.cache_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
        lambda content: b"another format" + content,
        lambda content: content + b"more",
    ],
    ids=["empty", "one byte short", "half", "one bit", "another format", "longer"],
)
def test_a_damaged_entry_is_a_miss_and_is_removed(folder, damage):
    cache.store(folder, "k", ENTRY)
    content = file_of(folder).read_bytes()
    file_of(folder).write_bytes(damage(content))
    with pytest.raises(cache.DamagedEntry, match=r"k\.program .* was damaged"):
        cache.load(folder, "k")
    assert cache.load(folder, "k") is None


def test_the_entries_used_longest_ago_go_first(folder, monkeypatch):
    for age, key in enumerate(["d", "c", "b", "a"]):
        cache.store(folder, key, ENTRY)
        then = time.time() - 1000 + age
        os.utime(file_of(folder, key), times=(then, then))
    cache.load(folder, "d")  # The oldest entry has just been used.
    size = file_of(folder, "a").stat().st_size
    monkeypatch.setenv("MESHKIT_CACHE_BYTES", str(3 * size))
    cache.store(folder, "e", ENTRY)
    assert entries(folder) == ["a.program", "d.program", "e.program"]


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_is_not(folder):
    left, written = (folder / f"k.program-{i:016x}.tmp" for i in (1, 2))
    left.write_bytes(b"half")
    os.utime(left, times=(time.time() - 7200, time.time() - 7200))
    written.write_bytes(b"half")
    cache.store(folder, "k", ENTRY)
    assert entries(folder) == ["k.program", written.name]


def test_a_full_disk_costs_the_entry_alone(folder, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.store(folder, "k", ENTRY)
    assert entries(folder) == []


@pytest.mark.parametrize("word", ["off", "OFF", "0", "none", ""])
def test_it_can_be_off(monkeypatch, word):
    monkeypatch.setenv("MESHKIT_CACHE", word)
    assert cache.cache_folder() is None


def test_the_default_is_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("MESHKIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "meshkit" / "programs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_folder() == tmp_path / "home" / ".cache" / "meshkit" / "programs"


def test_a_home_that_cannot_be_written_keeps_nothing_and_says_nothing(monkeypatch, tmp_path):
    monkeypatch.delenv("MESHKIT_CACHE", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.cache_folder() is None


def test_a_named_folder_that_cannot_serve_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(mk.ConfigError, match=r"MESHKIT_CACHE names cannot be used"):
        cache.cache_folder()


def test_the_home_of_nobody_is_an_error(monkeypatch):
    monkeypatch.setenv("MESHKIT_CACHE", "~nobody-here/x")
    with pytest.raises(mk.ConfigError, match=r"MESHKIT_CACHE is '~nobody-here/x'"):
        cache.cache_folder()


def test_a_bound_that_is_no_number_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("MESHKIT_CACHE_BYTES", "2GB")
    with pytest.raises(mk.ConfigError, match=r"MESHKIT_CACHE_BYTES is '2GB'"):
        cache.cache_folder()


CHANGES = {
    "program": lambda: cache.program_key(b"other", REQUEST, {}),
    "target": lambda: cache.program_key(b"program", REQUEST | {"target_config": "sms: 108"}, {}),
    "option": lambda: cache.program_key(b"program", REQUEST | {"compiler_options": {"xla_a": False}}, {}),
    "option of another type": lambda: cache.program_key(b"program", REQUEST | {"compiler_options": {"xla_a": 1}}, {}),
    "environment": lambda: cache.program_key(b"program", REQUEST, {"JAX_USE_SHARDY_PARTITIONER": "0"}),
}


@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
def test_whatever_reaches_the_compiler_changes_the_key(change):
    assert change() != cache.program_key(b"program", REQUEST, {})


@pytest.mark.parametrize("name", ["jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"])
def test_another_version_is_another_key(monkeypatch, name):
    before = cache.program_key(b"program", REQUEST, {})
    version = cache.version_of
    monkeypatch.setattr(cache, "version_of", lambda n: "0.0.1" if n == name else version(n))
    assert cache.program_key(b"program", REQUEST, {}) != before


def test_what_does_not_reach_it_does_not():
    assert cache.program_key(b"program", REQUEST, {"TERM": "dumb"}) == cache.program_key(b"program", REQUEST, {})


def small(rows=64):
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), cluster, devices=mk.describe_devices(cluster))
    assert isinstance(mesh, DescribedMesh)
    x = jax.ShapeDtypeStruct((rows, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return mesh, cluster, (x,)


@pytest.mark.deviceless
def test_a_second_compile_reads_what_the_first_kept(folder):
    mesh, cluster, args = small()

    def compiled(step):
        return compile_absent(step, args, mesh=mesh, cluster=cluster)

    def total(x):
        return x.sum()

    # All three compile from one place, because the caller's line is part of a program.
    first, second, third = (compile_and_damage(compiled, total, folder, n) for n in range(3))
    assert (first.cached, second.cached) == (False, True)
    same = ("module", "memory", "host_memory", "options", "log", "rematerializations", "partitioner")
    assert {n: getattr(first, n) for n in same} == {n: getattr(second, n) for n in same}
    assert not third.cached
    assert printed(third.module) == printed(first.module)
    (said,) = third.log
    assert "was damaged; it was compiled anew" in said
    reports = [mk.plan(total, args, mesh=mesh, cluster=cluster) for _ in range(2)]
    assert reports[1].compile.cached
    assert reports[0].step == reports[1].step


def compile_and_damage(compiled, step, folder, attempt):
    """Compile the step; before the third attempt, cut the end of the kept entry."""
    if attempt == 2:
        (entry,) = folder.glob("*.program")
        entry.write_bytes(entry.read_bytes()[:-3])
    return compiled(step)


def test_kernels_are_shared_by_schedules_and_by_nothing_else(monkeypatch):
    def key(environment=None, **changes):
        options = {"xla_gpu_pipeline_all_gather": "ON", "xla_gpu_all_gather_combine_threshold_bytes": 1}
        return cache.kernels_key(REQUEST | {"compiler_options": options} | changes, environment or {})

    first = key()
    assert key(compiler_options={"xla_gpu_all_gather_combine_threshold_bytes": 2}, mesh_shape=[4, 2]) == first
    monkeypatch.setattr(cache, "version_of", lambda name: "0.0.1" if name == "jaxlib" else "0.0.2")
    others = (key(), key(target_config="sms: 108"), key({"XLA_FLAGS": ""}), key(compiler_options={"xla_gpu_ftz": True}))
    assert len({first, *others}) == 5


@pytest.mark.deviceless
def test_kernels_that_were_kept_change_no_program(folder, monkeypatch):
    """Two compiles at once read the kernels that a third kept, whole or damaged, and both write theirs."""
    mesh, cluster, args = small()
    steps = [eval(f"lambda x: jax.nn.softmax(x * {n}) + x.sum(0) / {1 + n % 2}") for n in range(3)]

    def compiled(step):
        return compile_absent(step, args, mesh=mesh, cluster=cluster)

    def both():
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(compiled, steps[:2]))

    def made(programs):
        return [(printed(one.module), one.memory, one.host_memory, one.live, one.symmetric_bytes) for one in programs]

    with monkeypatch.context() as alone:
        alone.setenv("MESHKIT_CACHE", "off")
        expected = made(both())
    compiled(steps[2])
    (entry,) = folder.glob("*.kernels")
    whole, other = entry.read_bytes(), b"of another format"
    for damaged in (whole, whole[: len(whole) // 2], other):
        for kept in folder.glob("*.program"):
            kept.unlink()
        entry.write_bytes(damaged)
        if damaged is other:
            cache.store_kernels(folder, entry.stem, other)  # Stored this way, the foreign bytes have a valid digest.
        found = both()
        assert made(found) == expected
        torn = f"kept kernels, {entry} ({len(damaged)} bytes) was damaged; they were compiled anew"
        assert {line for one in found for line in one.log} == ({torn} if damaged not in (whole, other) else set())
        assert [p.name for p in folder.glob("*.kernels")] == [entry.name]
        assert cache.load_kernels(folder, entry.stem) != other


PROGRAM = """
import hashlib, sys
import jax, jax.numpy as jnp
import meshkit as mk
from jax.sharding import NamedSharding, PartitionSpec
from meshkit.compile.lowering import export_for_cuda
cluster = mk.Cluster.load("dgx_h100", hosts=1)
mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), cluster, devices=mk.describe_devices(cluster))
x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
def step(x):
    return {name: jax.nn.softmax(x * i) for i, name in enumerate(["a", "b", "c"])}
print(hashlib.sha256(export_for_cuda(step, (x,), mesh, cluster).program).hexdigest())
"""


def test_another_process_gives_the_same_program():
    """Hash seeds differ between processes; the program and its source lines do not."""

    def run(seed):
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout

    assert run("1") == run("2")


def test_on_a_stack_of_its_own_a_program_does_not_depend_on_who_asks():
    """jax puts the lines of callers into a program; here two callers get the same program."""
    mesh, cluster, (x,) = small()

    def exported():
        def step(x):
            return x * 2.0

        return export_for_cuda(step, (x,), mesh, cluster).program

    def one_caller():
        return on_own_stack(exported), exported()

    own, on_callers = one_caller()
    assert on_own_stack(exported) == own
    assert exported() != on_callers


def test_what_the_work_raises_is_raised_where_it_was_asked_for():
    with pytest.raises(ZeroDivisionError, match="by zero"):
        on_own_stack(lambda: 1 // 0)
