"""Test that secrets are removed from texts and from what this process prints."""

import hashlib
import io
import json
import shlex
import sys
import time
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.errors import ConfigError
from meshkit.redaction import (
    MASK,
    has_credentials,
    is_secret_name,
    printable,
    recorded_environment,
    redact,
    redact_streams,
    redact_values,
)


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SECRET", "DB_PASSWORD", "password", "MY_SECRETS_FILE",
     "github_token", "SIGNING_KEYS", "GOOGLE_APPLICATION_CREDENTIALS", "TOKEN", "GITHUB_PAT", "OPENAI_APIKEY",
     "MYSQL_PWD", "DB_PASS"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["PATH", "KEYBOARD", "XLA_FLAGS", "TOKENIZERS_PARALLELISM", "tokens_total", "monkey",
                                  "key", "KEY_VALUE_STORE", "MESHKIT_CACHE", "PWD", "OLDPWD", "pat"])  # fmt: skip
def test_names_of_no_secrets(name):
    assert not is_secret_name(name)


ENVIRONMENT = {"HF_TOKEN": "hf_12345678", "DB_PASSWORD": "two words", "A_KEY": "no", "PIN_SECRET": "123456",
               "PEM_KEY": "the first line\nthe second line\n", "PATH": "/usr/bin",
               "https_proxy": "http://me:p%40ss-word@proxy:3128", "B_SECRET": "hf_12345678-and-more"}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("it was hf_12345678!", "it was ***!"),
        ("the longer one: hf_12345678-and-more", "the longer one: ***"),
        ("two words", "***"),
        ("no, a short value stands in too many places", "no, a short value stands in too many places"),
        ("PATH=/usr/bin", "PATH=/usr/bin"),
        ("at 1795123456.25", "at 1795123456.25"),
        ("the first line, then the second line", "***, then ***"),
        ("proxy http://me:p%40ss-word@proxy:3128", "proxy http://***@proxy:3128"),
        ("decoded: p@ss-word", "decoded: ***"),
        ("git+ssh://a:b@host/x and s3://:x@y", "git+ssh://***@host/x and s3://***@y"),
        ("https://host:8080/a@b and a@b.c", "https://host:8080/a@b and a@b.c"),
        ("OTHER_TOKEN=abc, x", "OTHER_TOKEN=***, x"),
        ('model.api_key = "a b"', "model.api_key = ***"),
        ("SOME_PASSWORD: 'x y' z", "SOME_PASSWORD: *** z"),
        ("TOKEN=abc and unexpected token: x", "TOKEN=*** and unexpected token: x"),
        ("env: OTHER_TOKEN=abc", "env: OTHER_TOKEN=***"),
        ("{'GITHUB_PAT': 'a\\'b', 'x': 1}", "{'GITHUB_PAT': ***, 'x': 1}"),
        ("MY_KEY = 'no end", "MY_KEY = ***"),
    ],
)
def test_what_is_taken_out(text, shown):
    assert redact(text, ENVIRONMENT) == shown


def test_json_stays_json():
    document = {"a": "hf_12345678", "MY_TOKEN": "x", "say": 'MY_KEY="x"', "url": "http://u:p@h/"}
    found = json.loads(redact_values(json.dumps(document), ENVIRONMENT))
    assert found == {"a": "***", "MY_TOKEN": "x", "say": 'MY_KEY="x"', "url": "http://***@h/"}


@pytest.mark.parametrize(
    "value", ["pass\"word'\\end", "one\nand\ttwo", "p'ss'word", 'p"ss"word', "pässwörd ✓", "backs\\"]
)
@pytest.mark.parametrize(
    "write",
    [str, repr, ascii, json.dumps, shlex.quote, lambda v: repr([v, "'\""]), lambda v: repr(f"'\"{v}"),
     lambda v: json.dumps(v, ensure_ascii=False), lambda v: quote(v, safe=""), lambda v: json.dumps({"a": [v, 1]})],
)  # fmt: skip
def test_a_value_that_is_written_in_another_form_is_taken_out(value, write):
    text = f"it is {write(value)} there"
    found = redact_values(text, {"GITHUB_PAT": value})
    assert MASK in found
    for part in ("word", "end", "and", "two", "rd", "back"):
        assert part not in found


def test_json_with_a_value_that_is_escaped_stays_json():
    value = 'pass"word\\'
    assert json.loads(redact_values(json.dumps({"a": value, "b": [f"x{value}"]}), {"TOKEN": value})) == {
        "a": MASK,
        "b": [f"x{MASK}"],
    }


MIB = 2**20
# A quadratic search takes minutes for these: 100 kB of the first held the interpreter for 7 s.
LONG = {
    "letters": "a",
    "schemes": "a://",
    "users": "://a:",
    "at": "://a:b@",
    "colons": ":",
    "names": "A_KEY ",
    "assignments": "A_KEY='",
    "quotes": "TOKEN=\"'\\",
    "spaces": " ",
    "escapes": "\x1b[",
}


@pytest.mark.parametrize("piece", LONG.values(), ids=LONG)
def test_a_line_of_4_mib_is_read_in_linear_time(piece):
    def seconds(size):
        text = piece * (size // len(piece))
        began = time.process_time()
        redact(text, ENVIRONMENT)
        has_credentials(text)
        printable(text)
        return time.process_time() - began

    short = max(seconds(MIB), seconds(MIB))
    assert seconds(4 * MIB) < 12 * short + 1


def lines_run(work) -> int:
    """Return how many lines of meshkit's redaction run in a call."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.endswith("redaction.py"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def secret_of_lines(count: int) -> dict[str, str]:
    digest = lambda line: hashlib.sha256(str(line).encode()).hexdigest()
    return {"PEM_KEY": "\n".join(digest(line) for line in range(count))}


@pytest.mark.parametrize("text", ["a line\n", "0123456789abcdef" * 64], ids=["prose", "hexadecimal"])
def test_a_write_takes_no_more_work_with_thousands_of_secrets(text):
    def work(count):
        environment = secret_of_lines(count)
        redact_values(text, environment)  # An environment is processed only once.
        return lines_run(lambda: redact_values(text, environment))

    assert work(3500) <= work(100)


def test_work_grows_with_the_text_and_not_faster():
    environment, text = secret_of_lines(3500), "0123456789abcdef" * 64
    redact_values(text, environment)
    once, four = (lines_run(lambda times=times: redact_values(text * times, environment)) for times in (1, 4))
    assert once < four <= 5 * once  # The joints between the four have places that one text does not have.


def test_every_line_of_a_long_secret_is_taken_out():
    environment = secret_of_lines(3500)
    lines = environment["PEM_KEY"].splitlines()
    assert redact_values(f"x{lines[0]}, {lines[1700]}{lines[-1]}.", environment) == "x***, ******."


def test_of_secrets_that_overlap_no_part_is_left():
    environment = {"A_KEY": "xx-hf_123", "B_KEY": "hf_12345678"}
    assert redact_values("it is xx-hf_12345678, or hf_12345678", environment) == "it is ***, or ***"


@settings(max_examples=300)
@given(st.lists(st.text("abc", min_size=6, max_size=12), min_size=1, max_size=8), st.text("abc", max_size=60))
def test_exactly_the_places_of_secrets_are_taken_out(secrets, text):
    environment = {f"N{number}_KEY": secret for number, secret in enumerate(secrets)}
    hidden = [False] * len(text)
    for secret in secrets:
        for at in (at for at in range(len(text)) if text.startswith(secret, at)):
            hidden[at : at + len(secret)] = [True] * len(secret)
    left = "".join(letter for letter, is_hidden in zip(text, hidden, strict=True) if not is_hidden)
    assert redact_values(text, environment).replace(MASK, "") == left


def test_what_moves_a_cursor_is_written_out():
    written = "\\x1b[2Jc\\x07\\x7f\\x9b\\r\\u202e\\udc80"
    assert printable("a\tb\n\x1b[2Jc\x07\x7f\x9b\r\u202e\udc80é✓") == f"a\tb\n{written}é✓"


def test_a_url_with_a_password():
    assert has_credentials("see https://me:pw@host")
    assert not has_credentials("https://host:443/x")


def test_of_the_environment_an_allowed_list_is_recorded(monkeypatch):
    environment = {**ENVIRONMENT, "XLA_FLAGS": "--xla_a=hf_12345678", "HOME": "/home/x"}
    monkeypatch.setattr("os.environ", environment)
    assert recorded_environment() == {"XLA_FLAGS": "--xla_a=***"}


def test_errors_show_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_12345678")
    error = ConfigError("it is hf_12345678", at="x.toml:1: url = 'http://a:b@c'", hint="HF_TOKEN=hf_12345678")
    assert error.render() == "it is ***\n  at x.toml:1: url = 'http://***@c'\n  try HF_TOKEN=***"
    assert "hf_12345678" not in str(error)
    assert "hf_12345678" not in error.message


def test_what_is_printed_shows_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_12345678")
    streams = {name: io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    redact_streams()
    redact_streams()  # A second call changes nothing.
    print("out: hf_12345678", flush=True)
    sys.stderr.writelines(["err: hf_12345678\n", "more\n"])
    assert streams["stdout"].getvalue() == "out: ***\n"
    assert streams["stderr"].getvalue() == "err: ***\nmore\n"
    assert sys.stdout.isatty() is False


def test_bytes_that_are_printed_show_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_12345678")
    below = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(below, write_through=True))
    redact_streams()
    assert sys.stderr.buffer.write(b"raw: hf_12345678\n") == 17
    sys.stderr.buffer.writelines([b"\xff\x00hf_12345678"])
    sys.stderr.buffer.flush()
    assert below.getvalue() == b"raw: ***\n\xff\x00***"


def test_without_secrets_the_streams_are_left_alone(monkeypatch):
    monkeypatch.setattr("meshkit.redaction.os.environ", {"PATH": "/usr/bin"})
    before = sys.stdout, sys.stderr
    redact_streams()
    assert (sys.stdout, sys.stderr) == before
