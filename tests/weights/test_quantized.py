"""Test that block-scaled fp8 matrices are read as the numbers that they stand for, whole and in parts."""

from __future__ import annotations

import json
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshkit.errors import ConfigError
from meshkit.weights.files import open_file, read_weights
from meshkit.weights.layout import Layout, Row
from meshkit.weights.quantized import dequantized

ROWS, COLUMNS = 200, 264
VALUES = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.float8_e4m3fn)
SCALES = np.random.default_rng(1).uniform(0.01, 1, (2, 3)).astype(np.float32)
WANTED = VALUES.astype(np.float32) * np.repeat(np.repeat(SCALES, 128, 0)[:ROWS], 128, 1)[:, :COLUMNS]


def write(folder, scales=SCALES):
    arrays = {"w.weight": ("F8_E4M3", VALUES), "w.weight_scale_inv": ("F32", scales)}
    header, end = {}, 0
    for name, (dtype, x) in arrays.items():
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + b"".join(x.tobytes() for _, x in arrays.values())
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")


def test_every_part_is_scaled_by_its_own_block(tmp_path):
    write(tmp_path)
    files = dequantized(open_file(tmp_path / "model.safetensors"))
    assert set(files) == {"w.weight"}
    for rows, columns in ((slice(None), slice(None)), (slice(120, 137), slice(256, 264)), (slice(5, 6), slice(0, 129))):
        np.testing.assert_array_equal(files["w.weight"].values[rows, columns], WANTED[rows, columns])


def test_a_parameter_cut_over_devices_gets_its_own_part(tmp_path):
    write(tmp_path)
    row = Row("w", "w.weight", "out in", "in out")
    layout = Layout((row,), {"out": ROWS, "in": COLUMNS}, {}, {}, lambda config: {})
    cut = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec("all"))
    read = read_weights(tmp_path, layout, {"w": jax.ShapeDtypeStruct((COLUMNS, ROWS), np.float32, sharding=cut)})
    np.testing.assert_array_equal(read["w"], WANTED.T)


def test_scales_of_other_blocks_are_refused(tmp_path):
    write(tmp_path, SCALES[:, :2].copy())
    with pytest.raises(ConfigError, match=r"w.weight_scale_inv is F32 \(2, 2\), but \(200, 264\) has F32 \(2, 3\)"):
        dequantized(open_file(tmp_path / "model.safetensors"))
