"""MeshSpec + Cluster -> a jax mesh, on attached devices or on described ones."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec, Placement
from meshkit.errors import ConfigError
from meshkit.sharding.devices import DescribedDevice, attached_devices


class DescribedMesh(AbstractMesh):
    """A mesh of GPUs that are not there: what jax traces and lowers with, and where each device would be.

    An `AbstractMesh` (so `NamedSharding` and `with_sharding_constraint` take it) that also keeps the described devices
    in `devices`, an object array of the mesh's shape. Two of them are equal only if they are the same object.
    """

    _devices: np.ndarray

    def __new__(cls, devices: np.ndarray, axis_names: Sequence[str]) -> DescribedMesh:
        mesh = object.__new__(cls)
        values = {
            "axis_sizes": devices.shape,
            "axis_names": tuple(axis_names),
            "axis_types": (AxisType.Auto,) * devices.ndim,
            "abstract_device": None,
            "size": devices.size,
            "_devices": devices,
        }
        for name, value in values.items():
            object.__setattr__(mesh, name, value)
        return mesh

    @property
    def devices(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Object array of `DescribedDevice` with the mesh's shape."""
        return self._devices

    def placement(self, cluster: Cluster) -> Placement:
        """Partition id -> GPU, NVLink domain and host."""
        gpus = np.array([d.id for d in self._devices.flat])
        return Placement.of_gpus(self.axis_names, self._devices.shape, gpus, cluster)

    def __repr__(self) -> str:
        shape = ", ".join(f"'{n}': {s}" for n, s in zip(self.axis_names, self.axis_sizes))
        return f"DescribedMesh({shape}; {self.size} x {self._devices.flat[0].device_kind}, absent)"


AnyMesh = jax.sharding.Mesh | DescribedMesh


def build_mesh(spec: MeshSpec, cluster: Cluster, *, devices: Sequence | None = None) -> AnyMesh:
    """The mesh of a spec on a cluster, with Auto axes in the spec's order.

    Args:
        spec: axes with their NVLink and InfiniBand factors; `"fill"` is resolved here.
        cluster: where the axes lie.
        devices: by GPU index. None takes the attached devices, after a check that their NVLink domains are what the
            cluster says; `describe_devices(cluster)` gives a mesh that is not there; jax devices are taken in the
            order given.

    Raises:
        ConfigError: sizes that do not multiply to the cluster, or devices that do not match it.
    """
    spec = spec.resolve(cluster)
    chosen = attached_devices(cluster) if devices is None else tuple(devices)
    if len(chosen) != cluster.num_gpus:
        raise ConfigError(
            f"the mesh needs {cluster.num_gpus} devices ({spec.shape} over {spec.axis_names}), "
            f"but {len(chosen)} are given."
        )
    table = np.empty(len(chosen), dtype=object)
    table[:] = chosen
    ordered = table[spec.device_order(cluster)]
    if isinstance(chosen[0], DescribedDevice):
        return DescribedMesh(ordered, spec.axis_names)
    return jax.sharding.Mesh(ordered, spec.axis_names, axis_types=(AxisType.Auto,) * len(spec.axis_names))
