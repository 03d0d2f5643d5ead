"""Test that tomllib reads back what the emitter writes, in the same order."""

from __future__ import annotations

import datetime
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.config.toml import inline, to_toml

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.floats(allow_nan=False),
    texts,
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.none() | st.just(datetime.UTC)),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)


def ordered(value):
    """Return the value with the order of its tables made visible to `==`."""
    if isinstance(value, dict):
        return [(key, ordered(item)) for key, item in value.items()]
    return [ordered(item) for item in value] if isinstance(value, list) else (type(value), value)


@settings(max_examples=150)
@given(st.dictionaries(texts, values, max_size=5))
def test_round_trip(table):
    assert ordered(tomllib.loads(to_toml(table))) == ordered(table)


@settings(max_examples=200)
@given(values)
def test_inline_is_one_line_that_reads_back(value):
    text = inline(value)
    assert "\n" not in text
    assert ordered(tomllib.loads(f"v = {text}")["v"]) == ordered(value)


def test_the_order_of_mesh_axes_is_kept():
    mesh = {"data": {"infiniband": 2}, "tensor": 4, "fsdp": {"nvlink": 2, "infiniband": 4}}
    assert list(tomllib.loads(to_toml({"mesh": mesh}))["mesh"]) == ["data", "tensor", "fsdp"]


def test_none_is_left_out():
    assert to_toml({"a": None, "b": {"c": None, "d": 1}}) == "[b]\nd = 1\n"


@pytest.mark.parametrize(("value", "text"), [(1e16, "1e+16"), (float("inf"), "inf"), (True, "true"), (1.0, "1.0")])
def test_scalars(value, text):
    assert inline(value) == text
