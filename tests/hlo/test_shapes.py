"""Shapes from objects and from text agree, and count bytes."""

import pytest

from meshkit.hlo.instructions import Shape, parse_shape


@pytest.mark.parametrize(
    ("text", "shape", "size"),
    [
        ("%a.1 = bf16[4,8]{1,0} add(%b, %c)", Shape("bf16", (4, 8)), 64),
        ("ROOT %a = f32[] constant(0)", Shape("f32"), 4),
        ("%a = pred[3]{0} compare(%b, %c)", Shape("pred", (3,)), 3),
        ("%a = s4[3]{0:E(4)} convert(%b)", Shape("s4", (3,)), 2),
        ("%a = f8e4m3fn[16]{0} convert(%b)", Shape("f8e4m3fn", (16,)), 16),
        ("%a = token[] after-all()", Shape("token"), 0),
        (
            "%s = ((bf16[2,4]{1,0}, f32[2]{0}), /*index=5*/(bf16[2,8]{1,0}, f32[4]{0}), u32[]) all-gather-start(%x)",
            Shape(
                "tuple",
                parts=(
                    Shape("tuple", parts=(Shape("bf16", (2, 4)), Shape("f32", (2,)))),
                    Shape("tuple", parts=(Shape("bf16", (2, 8)), Shape("f32", (4,)))),
                    Shape("u32"),
                ),
            ),
            16 + 8 + 32 + 16 + 4,
        ),
    ],
)
def test_printed_shapes(text, shape, size):
    assert parse_shape(text) == shape
    assert shape.bytes == size


def test_objects_and_text_agree_on_a_compiled_module():
    import jax
    import jax.numpy as jnp

    from meshkit.hlo.instructions import shape_of

    compiled = jax.jit(lambda x: jax.lax.scan(lambda c, y: (c @ y, c.sum()), x, jnp.ones((3, 8, 8)))).lower(
        jnp.ones((8, 8))
    )
    (module,) = compiled.compile().runtime_executable().hlo_modules()
    for computation in module.computations():
        for i in computation.instructions():
            assert shape_of(i) == parse_shape(i.to_string())


@pytest.mark.parametrize("piece", ["/*", "/*/", "{"])
def test_a_text_of_megabytes_is_read_in_linear_time(piece):
    assert parse_shape(f"f32[2] {piece * 2**20}").dims == (2,)
