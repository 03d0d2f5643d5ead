"""Test `launch.hosts`: cluster, mesh and accumulation of an experiment are adapted to the hosts that are left."""

import pytest

from meshkit.config.experiment import load
from meshkit.errors import ConfigError

CLUSTER = 'cluster = { name = "dgx_h100", hosts = 8 }\n'
MODEL = '[model]\nclass = "models.llama:Llama"\npreset = "llama3_8b"\n'
TRAIN = "[train]\nglobal_batch = 192\nsequence_length = 4096\nsteps = 10\n"


def on(tmp_path, hosts, mesh, *, cluster=CLUSTER, rest='[rules]\npreset = "fsdp"\n', overrides=()):
    path = tmp_path / "e.toml"
    path.write_text(f"{cluster}{MODEL}{TRAIN}[mesh]\n{mesh}\n{rest}")
    return load(path, [*overrides, f"launch.hosts={hosts}"])


@pytest.mark.parametrize(
    ("hosts", "mesh", "sizes", "accumulate"),
    [
        (8, "fsdp = { nvlink = 8, infiniband = 8 }", {"fsdp": 64}, 1),
        (6, "fsdp = { nvlink = 8, infiniband = 8 }", {"fsdp": 48}, 2),
        (4, "fsdp = { nvlink = 8, infiniband = 8 }", {"fsdp": 32}, 2),
        (3, "fsdp = { nvlink = 8, infiniband = 8 }", {"fsdp": 24}, 4),
        (4, 'fsdp = { nvlink = 8, infiniband = "fill" }', {"fsdp": 32}, 2),
        # An axis that shards no parameters shrinks before one that does.
        (4, "data = { infiniband = 4 }\nfsdp = { nvlink = 8, infiniband = 2 }", {"data": 2, "fsdp": 16}, 2),
        (6, "data = { infiniband = 4 }\nfsdp = { nvlink = 8, infiniband = 2 }", {"data": 3, "fsdp": 16}, 2),
        (2, "data = { infiniband = 2 }\nfsdp = { nvlink = 8, infiniband = 4 }", {"data": 2, "fsdp": 8}, 4),
    ],
)
def test_one_axis_becomes_smaller_and_the_global_batch_is_accumulated_in_more_pieces(
    tmp_path, hosts, mesh, sizes, accumulate
):
    preset = "hsdp" if "data" in mesh else "fsdp"
    found = on(tmp_path, hosts, mesh, rest=f'[rules]\npreset = "{preset}"\n')
    assert found.cluster.hosts == hosts
    assert found.mesh.sizes == sizes
    assert found.train.global_batch == 192
    assert found.train.accumulate == accumulate
    # No device has more examples at once than it had with all hosts.
    assert 192 / found.mesh.size / accumulate <= 192 / 64


def test_hosts_of_part_of_a_rack_are_those_that_the_mesh_uses(tmp_path):
    cluster = 'cluster = { name = "gb200_nvl72", hosts = 72, gpus_used_per_domain = 64 }\n'
    overrides = ("train.global_batch=512",)
    found = on(tmp_path, 32, "fsdp = { nvlink = 64, infiniband = 4 }", cluster=cluster, overrides=overrides)
    assert (found.cluster.hosts, found.cluster.hosts_used, found.mesh.sizes) == (36, 32, {"fsdp": 128})
    with pytest.raises(ConfigError, match="54 hosts are not a whole number of NVLink domains of 16 hosts"):
        on(tmp_path, 54, "fsdp = { nvlink = 64, infiniband = 4 }", cluster=cluster, overrides=overrides)


def test_a_smaller_experiment_loads_back_as_it_is(tmp_path):
    found = on(tmp_path, 4, "fsdp = { nvlink = 8, infiniband = 8 }")
    (tmp_path / "resolved.toml").write_text(found.to_toml())
    again = load(tmp_path / "resolved.toml")
    assert (again.cluster, again.mesh, again.train) == (found.cluster, found.mesh, found.train)


def test_a_pipeline_gets_more_microbatches(tmp_path):
    mesh = "pipeline = { infiniband = 2 }\nfsdp = { nvlink = 8, infiniband = 4 }"
    rest = '[rules]\npreset = "fsdp"\n[pipeline]\naxis = "pipeline"\nmicrobatches = 3\n'
    found = on(tmp_path, 4, mesh, rest=rest)
    assert found.mesh.sizes == {"pipeline": 2, "fsdp": 16}
    assert (found.pipeline.microbatches, found.train.accumulate) == (6, 1)


@pytest.mark.parametrize(
    ("hosts", "overrides", "said"),
    [
        (9, (), "launch.hosts = 9 is more than the 8 hosts that the mesh uses"),
        (5, (), "a global batch of 192 cannot be split evenly into 40 shards on 5 hosts"),
        (4, ("mesh.fsdp=8", "mesh.context={infiniband=8}"), "can shrink to 1/2 of its NVLink domains"),
        (
            7,
            ("cluster.nvlink_domain_size=16", "mesh.fsdp={nvlink=16,infiniband=4}", "cluster.nvlink_switch=true"),
            "whole number of NVLink",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_the_key(tmp_path, hosts, overrides, said):
    with pytest.raises(ConfigError, match=said) as raised:
        on(tmp_path, hosts, "fsdp = { nvlink = 8, infiniband = 8 }", overrides=overrides)
    assert f"launch.hosts={hosts}" in str(raised.value)
    assert raised.value.hint


def test_the_suggested_batch_fits_both_numbers_of_hosts(tmp_path):
    mesh = "pipeline = { infiniband = 2 }\nfsdp = { nvlink = 8, infiniband = 4 }"
    pipeline = '[pipeline]\naxis = "pipeline"\nschedule = "interleaved_1f1b"\nvirtual_stages = 2\nmicrobatches = 2\n'
    refused = {"rest": f'[rules]\npreset = "fsdp"\n{pipeline}', "overrides": ("train.global_batch=64",)}
    with pytest.raises(ConfigError, match="at least 4 micro-batches") as raised:
        on(tmp_path, 6, mesh, **refused)
    assert raised.value.hint == "another number of hosts, or train.global_batch = 192"
    assert on(tmp_path, 6, mesh, **refused | {"overrides": ("train.global_batch=192",)}).pipeline.microbatches == 4


def test_an_axis_of_local_sgd_keeps_its_replicas(tmp_path):
    rest = '[rules]\npreset = "hsdp"\n[local_sgd]\naxis = "data"\n'
    found = on(tmp_path, 4, "data = { infiniband = 2 }\nfsdp = { nvlink = 8, infiniband = 4 }", rest=rest)
    assert found.mesh.sizes == {"data": 2, "fsdp": 16}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("checkpoint.snapshot_every=10",), "launch.spares = 0"),
        (("launch.spares=1",), "checkpoint.snapshot_every = 0 takes none"),
    ],
)
def test_draining_without_a_spare_or_a_snapshot_is_refused(tmp_path, overrides, said):
    with pytest.raises(ConfigError, match=said):
        on(tmp_path, 8, "fsdp = { nvlink = 8, infiniband = 8 }", overrides=(*overrides, "launch.drain=true"))
