"""Secrets taken out of texts and of what this process prints."""

import io
import json
import sys

import pytest

from meshkit.errors import ConfigError
from meshkit.redaction import (
    has_credentials,
    is_secret_name,
    recorded_environment,
    redact,
    redact_streams,
    redact_values,
)


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SECRET", "DB_PASSWORD", "password", "MY_SECRETS_FILE",
     "github_token", "SIGNING_KEYS", "GOOGLE_APPLICATION_CREDENTIALS"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["PATH", "KEYBOARD", "XLA_FLAGS", "TOKENIZERS_PARALLELISM", "tokens_total", "monkey",
                                  "key", "KEY_VALUE_STORE", "MESHKIT_CACHE"])  # fmt: skip
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
    ],
)
def test_what_is_taken_out(text, shown):
    assert redact(text, ENVIRONMENT) == shown


def test_json_stays_json():
    document = {"a": "hf_12345678", "MY_TOKEN": "x", "say": 'MY_KEY="x"', "url": "http://u:p@h/"}
    found = json.loads(redact_values(json.dumps(document), ENVIRONMENT))
    assert found == {"a": "***", "MY_TOKEN": "x", "say": 'MY_KEY="x"', "url": "http://***@h/"}


def test_a_url_with_a_password():
    assert has_credentials("see https://me:pw@host")
    assert not has_credentials("https://host:443/x")


def test_of_the_environment_an_allowed_list_is_recorded():
    environment = {**ENVIRONMENT, "XLA_FLAGS": "--xla_a=hf_12345678", "HOME": "/home/x"}
    assert recorded_environment(environment) == {"XLA_FLAGS": "--xla_a=***"}


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
    redact_streams()  # once is enough
    print("out: hf_12345678", flush=True)
    sys.stderr.writelines(["err: hf_12345678\n", "more\n"])
    assert streams["stdout"].getvalue() == "out: ***\n"
    assert streams["stderr"].getvalue() == "err: ***\nmore\n"
    assert sys.stdout.isatty() is False


def test_without_secrets_the_streams_are_left_alone(monkeypatch):
    monkeypatch.setattr("meshkit.redaction.os.environ", {"PATH": "/usr/bin"})
    before = sys.stdout, sys.stderr
    redact_streams()
    assert (sys.stdout, sys.stderr) == before
