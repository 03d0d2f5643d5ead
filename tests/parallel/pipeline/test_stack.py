"""Test arranging layers in a pipeline's order and back, which loses and repeats none in any layout."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshkit.errors import ConfigError
from meshkit.parallel.pipeline import Stack, parse_layout


@pytest.mark.parametrize(
    ("layers", "stages", "chunks"),
    [c for c in itertools.product((1, 2, 7, 8, 13, 126), (1, 2, 4, 16), (1, 2, 3)) if c[1] * c[2] <= c[0]],
)
def test_arrange_and_restore_are_inverse(layers, stages, chunks):
    stack = Stack.of(layers, stages, chunks)
    tree = {"a": np.arange(1.0, layers + 1), "b": np.arange(3 * layers).reshape(layers, 3) + 1}
    arranged = stack.arrange(tree)
    assert arranged["a"].shape == (stack.size,)
    assert stack.size - np.count_nonzero(arranged["a"]) == stack.size - layers
    restored = stack.restore(arranged)
    for name, x in tree.items():
        np.testing.assert_array_equal(restored[name], x)
    assert max(stack.counts) - min(stack.counts) <= 1
    assert stack.padded == bool(layers % (stages * chunks))


def test_a_stage_holds_its_chunks_side_by_side():
    stack = Stack.of(8, 2, 2)
    np.testing.assert_array_equal(stack.arrange(np.arange(8)), [0, 1, 4, 5, 2, 3, 6, 7])
    assert not stack.natural


def test_one_chunk_and_even_layers_leave_arrays_alone():
    x = jnp.arange(8)
    assert Stack.of(8, 4).arrange(x) is x
    assert Stack.of(8, 4).restore(x) is x


def test_the_ends_of_the_model_are_the_short_ones():
    """Llama 3 405B itself puts one layer less on the first and on the last stage: 126 layers on 16 stages."""
    assert Stack.of(126, 16).counts == (7, *[8] * 14, 7)


def test_arrays_of_jax_under_jit_and_abstract_ones():
    stack = Stack.of(7, 2, 2)
    x = jnp.arange(14.0).reshape(7, 2)
    np.testing.assert_array_equal(jax.jit(lambda x: stack.restore(stack.arrange(x)))(x), x)
    assert stack.abstract(jax.ShapeDtypeStruct(x.shape, x.dtype)).shape == (8, 2)


def test_another_number_of_stages_reads_what_one_has_written():
    """The order on disk is the model's, so two pipelines agree through it."""
    x = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
    on_disk = Stack.of(12, 4, 3).restore(Stack.of(12, 4, 3).arrange(x))
    there = Stack.of(12, 2, 2).arrange(on_disk)
    np.testing.assert_array_equal(Stack.of(12, 2, 2).restore(there), x)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("3|4|4|3", (3, 4, 4, 3)),
        ("7 | 8*14 | 7", (7, *[8] * 14, 7)),
        ("Ett|tt|ttL", (2, 2, 2)),
        ("Et*3|(tt|)*3,tL", (3, 2, 2, 2, 1)),
        ("E t*7 | (t*8|)*14 t*7 L", (7, *[8] * 14, 7)),
    ],
)
def test_layouts(text, counts):
    assert parse_layout(text) == counts


@pytest.mark.parametrize("text", ["", "3||3", "t|Et", "tL|t", "3|x", "3|-1", "(t|t", "E|t"])
def test_texts_that_are_no_layout_are_refused(text):
    with pytest.raises(ConfigError, match=r"(?s)is not layers.*try numbers of layers"):
        parse_layout(text)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 8), r"(?s)8 stages need at least 8 layers, and the model has 4.*at most 4 stages"),
        ((8, 4, 4), r"(?s)4 stages x 4 virtual stages need at least 16 layers.*virtual_stages = 2"),
        ((8, 4, 1, "2|2|2"), r"has 3 parts, but 4 stages x 1 virtual stages are 4"),
        ((8, 4, 1, "2|2|2|3"), r"places 9 layers \(2\|2\|2\|3\).*the model has 8"),
        ((8, 4, 1, (8, 0, 0, 0)), r"at least one"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Stack.of(*sizes)


def test_arrays_of_another_depth_are_refused():
    with pytest.raises(ConfigError, match=r"a/w has shape \(7, 2\), but a stack of 8 layers"):
        Stack.of(8, 2, 2).arrange({"a": {"w": np.zeros((7, 2))}})
