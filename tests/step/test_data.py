"""Test that data are deterministic and resume from one integer, and that every process loads only its rows."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from meshkit.config.experiment import load
from meshkit.errors import ConfigError, RunError
from meshkit.planning.resolved import find_tokenizer, resolve
from meshkit.sharding import build_mesh
from meshkit.step.data import (
    Batches,
    Rows,
    abstract_batch,
    open_data,
    open_tokens,
    stdlib_files,
    unigram_entropy_nats,
    windows,
)

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_debug_cpu.toml"


def experiment(*overrides: str):
    return load(EXPERIMENT, ["train.global_batch=8", "train.sequence_length=16", *overrides])


def data_of(spec):
    return open_data(resolve(spec), find_tokenizer(spec))


def tokens_of(spec):
    return open_tokens(resolve(spec), find_tokenizer(spec))


def batches_of(spec, tokens, seed=0):
    mesh = build_mesh(spec.mesh, spec.cluster)
    return Batches(Rows(windows(tokens, 16)), abstract_batch(resolve(spec), mesh, spec.rules), seed)


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 256, 16 * 20 + 1, np.uint8)


def test_a_window_predicts_the_token_after_each():
    window = Rows(windows(np.arange(100, dtype=np.uint8), 16))[3]
    np.testing.assert_array_equal(window["tokens"], np.arange(48, 64))
    np.testing.assert_array_equal(window["targets"], np.arange(49, 65))


def test_a_resumed_iterator_continues_exactly(tokens):
    batches = batches_of(experiment(), tokens)
    straight = [np.asarray(b["tokens"]) for b in batches.iterate(0, 6)]
    resumed = [np.asarray(b["tokens"]) for b in batches.iterate(4, 6)]
    np.testing.assert_array_equal(straight[4:], resumed)
    np.testing.assert_array_equal(straight[5], batches.at(5)["tokens"])


def test_an_epoch_shows_every_window_once_and_the_next_one_in_another_order(tokens):
    batches = batches_of(experiment(), tokens)  # There are 20 windows, so 40 rows are two epochs.
    rows = np.concatenate([np.asarray(batches.at(step)["tokens"]) for step in range(5)])
    whole = tokens[:-1].reshape(20, 16)
    for epoch in (rows[:20], rows[20:]):
        np.testing.assert_array_equal(np.unique(epoch, axis=0), np.unique(whole, axis=0))
    assert not np.array_equal(rows[:20], rows[20:])


def test_a_process_loads_only_the_rows_of_its_devices(tokens):
    """A sharding over the first two devices stands for one process of several."""
    spec = experiment("mesh.data=8", "mesh.fsdp=1", "mesh.tensor=1")
    batches = batches_of(spec, tokens)

    class TwoDevices:
        shape, dtype = (8, 16), np.int32

        class sharding:
            @staticmethod
            def addressable_devices_indices_map(_shape):
                return {0: (slice(2, 3), slice(None)), 1: (slice(5, 6), slice(None))}

    local = Batches(batches.examples, {"tokens": TwoDevices}, 0).load(3)["tokens"]
    np.testing.assert_array_equal(local, np.asarray(batches.at(3)["tokens"])[[2, 5]])


class _OfProcess:
    """A batch's array as one process of several sees it: the mesh's devices in equal runs, one run each."""

    def __init__(self, like, process, processes):
        self.shape, self.dtype, self.sharding = like.shape, like.dtype, self
        self._whole, self._process, self._processes = like.sharding, process, processes

    def addressable_devices_indices_map(self, shape):
        every = self._whole.devices_indices_map(shape)
        mine = len(every) // self._processes
        chosen = list(self._whole.mesh.devices.flat)[self._process * mine : (self._process + 1) * mine]
        return {device: every[device] for device in chosen}


@pytest.mark.parametrize("mesh", [(8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 8, 1)])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_number_of_processes_reads_the_same_examples_in_the_same_order(tokens, mesh, processes):
    """Each process reads the rows of its own devices; together they are the batch of one process, at every step."""
    sizes = [f"mesh.{axis}={size}" for axis, size in zip(("data", "fsdp", "tensor"), mesh)]
    batches = batches_of(experiment(*sizes), tokens)
    for step in (0, 3, 1):  # The order is arbitrary, because the step alone says what is read.
        found = {}
        for process in range(processes):
            like = {name: _OfProcess(x, process, processes) for name, x in batches.like.items()}
            reader = Batches(batches.examples, like, batches.seed)
            rows = reader.load(step)["tokens"]
            for row, values in zip(reader.local_rows(), rows, strict=True):
                np.testing.assert_array_equal(found.setdefault(row, values), values)
        np.testing.assert_array_equal([found[row] for row in range(8)], np.asarray(batches.at(step)["tokens"]))
        shuffled = np.asarray(batches_of(experiment(), tokens).at(step)["tokens"])
        np.testing.assert_array_equal([found[row] for row in range(8)], shuffled)  # They are the same on any mesh.


def test_batches_lie_as_the_rules_say(tokens):
    batch = batches_of(experiment(), tokens).at(0)["tokens"]
    assert {s.data.shape for s in batch.addressable_shards} == {(2, 16)}  # data x fsdp = 4 pieces of 8 rows.
    assert isinstance(batch, jax.Array)


def test_the_standard_library_is_real_text_in_a_fixed_order():
    files = stdlib_files()
    assert files == stdlib_files()
    assert {"argparse.py", "json"} <= {f.name for f in files} | {f.parent.name for f in files}
    assert not any("test" in f.parts for f in files)
    entropy = data_of(experiment()).unigram_entropy_nats
    assert entropy is not None
    assert 3.0 < entropy < 3.4


def test_splits_share_no_window():
    data = data_of(experiment("data.validation_fraction=0.1"))
    train, held_out = data.train.indices, data.validation.indices
    assert not np.intersect1d(train, held_out).size
    assert len(held_out) / (len(train) + len(held_out)) == pytest.approx(0.1, rel=0.01)


def test_unigram_entropy_of_a_fair_die():
    assert unigram_entropy_nats(np.arange(6).repeat(50)) == pytest.approx(np.log(6))
    assert unigram_entropy_nats(np.arange(-3, 3, dtype=np.int16).repeat(50)) == pytest.approx(np.log(6))


@pytest.mark.parametrize("suffix", [".npy", ".bin", ".u8", ".u16", ".u32"])
def test_token_files_are_mapped(tmp_path, suffix):
    values = np.arange(200) % 251
    path = tmp_path / f"tokens{suffix}"
    if suffix == ".npy":
        np.save(path, values.astype(np.uint16))
    else:
        values.astype({".u8": np.uint8, ".u32": np.uint32}.get(suffix, np.uint16)).tofile(path)
    tokens = tokens_of(experiment(f"data.source={path}"))
    np.testing.assert_array_equal(tokens, values)
    assert isinstance(tokens, np.memmap)


def test_a_folder_is_its_text_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("bb")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("aa")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("no")
    assert bytes(tokens_of(experiment(f"data.source={tmp_path}"))) == b"aabb"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "there is no file or folder"),
        ("tokens.pkl", b"1234", "is not a token file"),
        ("tokens.u16", b"123", "not whole uint16 tokens"),
        ("tokens.npy", b"not numpy", "cannot be read as .npy"),
        ("short.u8", b"12345", "5 tokens, too few for 20 examples of 16 tokens"),
    ],
)
def test_bad_sources_are_config_errors(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        data_of(experiment(f"data.source={tmp_path / name}"))


@pytest.mark.parametrize("name", ["sparse.txt", "sparse.jsonl", "folder/sparse"])
def test_a_text_that_no_memory_holds_is_refused_unread(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.truncate(file, 2**40)
    source = file if file.suffix else file.parent
    with pytest.raises(ConfigError, match="has 1,024 GiB, and text is read into memory whole: at most 32 GiB"):
        data_of(experiment(f"data.source={source}"))


def own(tmp_path, monkeypatch, code, *overrides):
    """Return an experiment whose data come from a module beside it."""
    (tmp_path / "own_source.py").write_text("import numpy as np\n" + textwrap.dedent(code))
    monkeypatch.delitem(sys.modules, "own_source", raising=False)
    path = tmp_path / "own.toml"
    path.write_text(EXPERIMENT.read_text())
    return load(path, ["train.global_batch=8", "train.sequence_length=16", "train.evaluate_every=0", *overrides])


COUNTER = """
    made = []
    def source(seed, experiment):
        made.append(seed)
        for i in range(20):
            yield {"tokens": np.full(16, 100 * seed + i, np.int32)}
"""


def test_a_stream_is_read_in_its_order_and_made_anew_with_the_next_seed(tmp_path, monkeypatch):
    spec = own(tmp_path, monkeypatch, COUNTER, "data.source=own_source:source")
    mesh = build_mesh(spec.mesh, spec.cluster)
    batches = Batches(data_of(spec).train, abstract_batch(resolve(spec), mesh, spec.rules), spec.data.seed)
    steps = [np.asarray(b["tokens"])[:, 0] for b in batches.iterate(0, 4)]
    np.testing.assert_array_equal(np.concatenate(steps), [*range(20), *range(100, 112)])
    # A run that resumes gets what comes next, not the beginning.
    resumed = [np.asarray(b["tokens"])[:, 0] for b in batches.iterate(2, 4)]
    np.testing.assert_array_equal(resumed, steps[2:])


def test_a_grain_stream_and_a_stream_s_limits(tmp_path, monkeypatch):
    code = """
    import grain
    def source(seed, experiment):
        rows = grain.MapDataset.range(40).shuffle(seed=seed).map(lambda i: {"tokens": np.full(16, i, np.int32)})
        return rows.to_iter_dataset()
    def empty(seed, experiment):
        yield from ()
    def fails(seed, experiment):
        yield {"tokens": np.zeros(16, np.int32)}
        raise OSError("the disk is gone")
    """
    spec = own(tmp_path, monkeypatch, code, "data.source=own_source:source")
    mesh = build_mesh(spec.mesh, spec.cluster)
    batches = Batches(data_of(spec).train, abstract_batch(resolve(spec), mesh, spec.rules), None)
    rows = np.concatenate([np.asarray(b["tokens"])[:, 0] for b in batches.iterate(0, 5)])
    np.testing.assert_array_equal(np.sort(rows), range(40))
    with pytest.raises(ConfigError, match="is a stream, of which nothing can be held out"):
        data_of(own(tmp_path, monkeypatch, code, "data.source=own_source:source", "train.evaluate_every=5"))
    with pytest.raises(ConfigError, match="gave no examples: the iterable is empty"):
        data_of(own(tmp_path, monkeypatch, code, "data.source=own_source:empty"))
    fails = data_of(own(tmp_path, monkeypatch, code, "data.source=own_source:fails")).train
    with pytest.raises(RunError, match=r"the data of step 1 raised OSError: the disk is gone \(own_source.py:"):
        list(Batches(fails, batches.like, None).iterate(0, 1))


def test_rows_of_an_array_are_examples(tmp_path):
    rows = np.arange(40 * 17, dtype=np.uint16).reshape(40, 17) % 251
    np.save(tmp_path / "rows.npy", rows)
    data = data_of(experiment(f"data.source={tmp_path / 'rows.npy'}", "data.validation_fraction=0.1"))
    assert (len(data.train), len(data.validation)) == (36, 4)
    np.testing.assert_array_equal(data.train[9]["tokens"], rows[10][:-1])  # The tenth is held out.
    np.testing.assert_array_equal(data.validation[0]["targets"], rows[9][1:])
    with pytest.raises(ConfigError, match=r"rows of 17 ids; an example of 32 tokens takes one more(.|\n)*= 16"):
        data_of(experiment(f"data.source={tmp_path / 'rows.npy'}", "train.sequence_length=32"))
    with pytest.raises(ConfigError, match=r"has 40 rows, too few for 100 examples of 16 tokens(.|\n)*more rows, or"):
        data_of(experiment(f"data.source={tmp_path / 'rows.npy'}", "data.validation_fraction=0.01"))


def test_text_goes_through_the_tokenizer(tmp_path, monkeypatch):
    code = """
    def words(text):
        return [len(word) for word in text.split()]
    def wrong(text):
        return text
    """
    (tmp_path / "a.jsonl").write_text('{"content": "one three five"}\n\n{"content": "eleven"}\n')
    lines = (f"data.source={tmp_path / 'a.jsonl'}", "data.text_field=content")
    spec = own(tmp_path, monkeypatch, code, *lines, "data.tokenizer=own_source:words")
    np.testing.assert_array_equal(tokens_of(spec), [3, 5, 4, 6])
    assert bytes(tokens_of(own(tmp_path, monkeypatch, code, *lines))) == b"one three five\neleven\n"
    (tmp_path / "a.txt").write_text("one two")
    text = own(tmp_path, monkeypatch, code, f"data.source={tmp_path / 'a.txt'}", "data.tokenizer=own_source:words")
    np.testing.assert_array_equal(tokens_of(text), [3, 3])
    with pytest.raises(ConfigError, match=r"own_source:wrong gave <U15\[\], not a row of ids"):
        tokens_of(own(tmp_path, monkeypatch, code, *lines, "data.tokenizer=own_source:wrong"))
    with pytest.raises(ConfigError, match=r"line 1 of .* has no text under 'text'(.|\n)*data.text_field = \"content\""):
        tokens_of(own(tmp_path, monkeypatch, code, lines[0]))
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=r"line 1 of .* is no JSON"):
        tokens_of(own(tmp_path, monkeypatch, code, lines[0]))
