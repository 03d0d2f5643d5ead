"""Test that the key locator finds the same keys as tomllib, and at each position the text of the same value."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.config.toml import entries, find_duplicate, inline, key_text, locate, split_key, string_text

keys = st.one_of(
    st.text("abcXYZ019-_", min_size=1, max_size=4),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.floats(allow_nan=False),
    texts,
    st.datetimes().map(lambda t: t.replace(microsecond=0)),
    st.dates(),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=8,
)
spaces = st.sampled_from(["", " ", "\t", "  "])
lines = st.sampled_from(["\n", "\n\n", '  # a = 1 [x] "\n', "\n# [comment]\n\t"])


@st.composite
def spelled(draw, value):
    """Draw one of the spellings that TOML has for a value."""
    if isinstance(value, str):
        forms = [string_text(value)]
        if "'" not in value and value.isprintable():
            forms += [f"'{value}'", f"'''{value}'''", f"'''\n{value}'''"]
        if value.isprintable() and '"' not in value and "\\" not in value:
            forms += [f'"""\\\n   {value.lstrip()}"""', f'"""\n{value}"""'] if value == value.lstrip() else []
        return draw(st.sampled_from(forms))
    if isinstance(value, list):
        comma = [draw(spaces) + draw(st.sampled_from(["", "\n", "# ] , }\n"])) for _ in range(2 * len(value) + 1)]
        items = [draw(spelled(item)) for item in value]
        body = ",".join(f"{comma[2 * i]}{item}{comma[2 * i + 1]}" for i, item in enumerate(items))
        return f"[{body}{',' if value and draw(st.booleans()) else ''}{comma[-1]}]"
    if isinstance(value, dict):
        body = ",".join(
            f"{draw(spaces)}{key_text(k)}{draw(spaces)}={draw(spaces)}{draw(spelled(v))}{draw(spaces)}"
            for k, v in value.items()
        )
        return f"{{{body}}}"
    return inline(value)


@st.composite
def documents(draw):
    """Draw a TOML text with headers, dotted and quoted keys, arrays of tables, comments and every kind of string."""
    out = [draw(lines)]
    for key, value in draw(st.dictionaries(keys, values, max_size=3)).items():
        out += [key_text(key), draw(spaces), "=", draw(spaces), draw(spelled(value)), draw(lines)]
    for table, content in draw(st.dictionaries(keys, st.dictionaries(keys, values, max_size=3), max_size=3)).items():
        form = draw(st.sampled_from(["header", "array", "dotted", "below"]))
        name = key_text(table)
        headers = {"header": f"[{name}]", "array": f"[[ {name} ]]", "dotted": "[]", "below": f"[{name} . below]"}
        for _ in range(2 if form == "array" else 1):
            if form != "dotted":
                out += [headers[form], draw(lines)]
            for key, value in content.items():
                prefix = f"{name}{draw(spaces)}.{draw(spaces)}" if form == "dotted" else ""
                out += [prefix, key_text(key), draw(spaces), "=", draw(spaces), draw(spelled(value)), draw(lines)]
            if form == "array":
                out += [f"[{name}.sub]", "\n"]
    return "".join(out)


def paths_of(value, path=()):
    """Return every path of a parsed document with its value."""
    found = {path: value} if path else {}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found.update(paths_of(item, (*path, str(key))))
    return found


def parsed(text):
    """Return the document that tomllib parses, or None where two tables have drawn the same name."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


@settings(max_examples=400)
@given(documents())
def test_every_key_is_found_where_tomllib_finds_its_value(text):
    table = parsed(text)
    if table is None:
        return
    expected = paths_of(table)
    found = {entry.path: entry for entry in entries(text)}
    assert set(found) == set(expected)
    for path, entry in found.items():
        if entry.value is not None:
            assert tomllib.loads(f"v = {entry.value}")["v"] == expected[path]


@settings(max_examples=200)
@given(documents())
def test_a_position_points_at_the_key(text):
    if parsed(text) is None:
        return
    for entry in entries(text):
        position = locate(text, entry.path)
        assert position is not None
        assert 1 <= position.line <= text.count("\n") + 1


@settings(max_examples=300)
@given(st.text("ab.=\"'[]{}# \n\\,1", max_size=40))
def test_any_text_is_survived(text):
    entries(text)
    find_duplicate(text)


TEXT = """\
# comment
name = "x"
[mesh]
data = { infiniband = 2, nvlink = 4 }
a . "b c" = 3
[[rules.override]]
path = "**/kernel"
[[rules.override]]
path = '''
[mesh]
tensor = 1'''
spec = [
  "fsdp",  # first
  "replicated",
]
"""


@pytest.mark.parametrize(
    ("key", "line", "value"),
    [
        ("name", 2, '"x"'),
        ("mesh", 3, None),
        ("mesh.data", 4, "{ infiniband = 2, nvlink = 4 }"),
        ("mesh.data.nvlink", 4, "4"),
        ('mesh.a."b c"', 5, "3"),
        ("rules.override", 6, None),
        ("rules.override.0.path", 7, '"**/kernel"'),
        ("rules.override.1.path", 9, "'''\n[mesh]\ntensor = 1'''"),
        ("rules.override.1.spec.1", 14, '"replicated"'),
    ],
)
def test_known_positions(key, line, value):
    position = locate(TEXT, split_key(key))
    assert position is not None
    assert (position.line, position.value) == (line, value)


@pytest.mark.parametrize("key", ["tensor", "mesh.tensor", "rules.override.2", "mesh.data.tensor"])
def test_what_is_not_written_has_no_position(key):
    assert locate(TEXT, split_key(key)) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1\nb = 2\na = 3\n", (("a",), 1, 3)),
        ("[m]\nx = 1\n[n]\n[m]\n", (("m",), 1, 4)),
        ('[m]\nx = 1\n"x" = 2\n', (("m", "x"), 2, 3)),
        ("[[m]]\nx = 1\n[[m]]\nx = 2\n", None),
        ("m = [1, 1]\n", None),
    ],
)
def test_duplicates(text, expected):
    assert find_duplicate(text) == expected


@pytest.mark.parametrize(
    ("text", "path"),
    [("a", ("a",)), ("a.b-c.0", ("a", "b-c", "0")), ('a."x.y"', ("a", "x.y")), ("a . 'b'", ("a", "b"))],
)
def test_split_key(text, path):
    assert split_key(text) == path


@pytest.mark.parametrize("text", ["", ".", "a.", "a b", "a=1", '"a', "a..b", "ä"])
def test_what_is_no_key(text):
    with pytest.raises(ValueError, match="is not a key"):
        split_key(text)
