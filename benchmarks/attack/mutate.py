"""Damage bytes, text and values, each with a seeded random generator."""

from __future__ import annotations

import json
import random
import re
from typing import Any

NUMBERS = ("0", "-1", "1e999", "-0.0", "nan", "inf", "9" * 30, "1e308", "2147483648", "0x10", "1_000_000_007", "0.1")
TEXTS = (
    "", "../../etc/passwd", "/dev/zero", "\x00", "\x1b[2J", "a" * 5000, "é" * 50, "\u202eevil", "$(id)", "os:system",
    "builtins:exec", "%s%n", "{0}", "'; DROP", "\ufeff", "models.llama:nothing", ":", "a.b:c", "\n\n",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**70, -(2**63), 1.5, 1e308, "", "x", "\x1b[31m", "9" * 400, [], {}, [[]],
    [None], {"": 0}, "a" * 10_000, [1] * 1000,
)  # fmt: skip


def damage_bytes(data: bytes, random: random.Random) -> tuple[str, bytes]:
    """Return what was changed, and the data with some bytes changed."""
    how = random.choice(("flip", "flip", "set", "cut", "delete", "insert", "double", "zero", "ones"))
    found = bytearray(data)
    at = random.randrange(max(1, len(data)))
    length = min(random.choice((1, 2, 8, 64, 1024)), max(1, len(data) - at))
    if how == "flip":
        for _ in range(random.choice((1, 1, 3, 30))):
            i = random.randrange(max(1, len(data)))
            found[i : i + 1] = bytes(b ^ 1 << random.randrange(8) for b in found[i : i + 1])
    elif how == "set":
        found[at : at + 1] = bytes([random.choice((0, 1, 0x7F, 0x80, 0xFF))])
    elif how == "cut":
        del found[at:]
    elif how == "delete":
        del found[at : at + length]
    elif how == "insert":
        found[at:at] = random.randbytes(length)
    elif how == "double":
        found[at:at] = found[at : at + length]
    else:
        found[at : at + length] = bytes([0xFF * (how == "ones")]) * length
    return f"{how} at {at}", bytes(found)


def damage_text(text: str, random: random.Random) -> tuple[str, str]:
    """Return what was changed, and the text with a line, word, number or string changed."""
    lines = text.split("\n")
    i = random.randrange(len(lines))
    how = random.choice(
        ("number", "number", "string", "word", "drop", "double", "swap", "cut", "junk", "bytes", "nest")
    )
    if how in ("number", "string", "word"):
        pattern = {"number": r"\b\d[\d_.e]*\b", "string": r'"[^"\n]*"', "word": r"\b[A-Za-z_]{2,}\b"}[how]
        found = list(re.finditer(pattern, text))
        if found:
            at = random.choice(found)
            string = '"' + random.choice(TEXTS).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
            words = random.choice(found)[0], random.choice(TEXTS)[:50] or "x"
            new = {"number": random.choice(NUMBERS), "string": string, "word": random.choice(words)}[how]
            return f"{how} {at[0][:40]!r} -> {new[:40]!r}", text[: at.start()] + new + text[at.end() :]
    elif how == "drop":
        del lines[i]
    elif how == "double":
        lines.insert(i, lines[i])
    elif how == "swap":
        j = random.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
    elif how == "cut":
        lines[i] = lines[i][: random.randrange(len(lines[i]) + 1)]
        lines = lines[: i + random.choice((1, len(lines)))]
    elif how == "junk":
        lines.insert(
            i, random.choice(("[" * 500, "]", "= 1", "[[x]]", "a.b.c.d = 1", '"""', "\x00", "<a>", "-" * 9999))
        )
    elif how == "nest":
        depth = random.choice((10, 200, 3000))
        lines.insert(i, random.choice(("x = " + "[" * depth + "]" * depth, "a" + ".a" * depth + " = 1")))
    else:
        return how, damage_bytes(text.encode(), random)[1].decode(errors="replace")
    return f"{how} line {i + 1}", "\n".join(lines)


def damage_json(text: str, random: random.Random) -> tuple[str, str]:
    """Return what was changed, and the JSON document with one value replaced, removed or moved."""
    document = json.loads(text)
    places: list[tuple[Any, Any]] = []
    pending = [document]
    while pending:
        at = pending.pop()
        for key, value in list(at.items() if isinstance(at, dict) else enumerate(at)):
            places.append((at, key))
            if isinstance(value, dict | list):
                pending.append(value)
    if not places:
        return damage_text(text, random)
    holder, key = random.choice(places)
    how = random.choice(("value", "value", "value", "remove", "other", "many"))
    if how == "remove":
        del holder[key]
    elif how == "other":
        other, its = random.choice(places)
        holder[key] = json.loads(json.dumps(other[its]))
    elif how == "many" and isinstance(holder[key], list):
        holder[key] = holder[key] * 50
    else:
        holder[key] = random.choice(VALUES)
    return f"{how} of {key!r}", json.dumps(document)
