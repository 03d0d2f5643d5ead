"""A probe bundle: what discovery asked a machine and what it answered, in files, without names of anybody.

A folder (or tar) with `bundle.json`, `nvml.json`, `files.json` and `commands.json`; or a folder of such folders, one a
host. Identities that discovery needs become pseudonyms that are the same on every host; all others are removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import socket
import struct
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshkit.config.bounded import LARGEST_FILE_BYTES, decode, gunzip, read_bounded, short
from meshkit.discover.machine import discover
from meshkit.discover.probe import BUNDLE_HINT, FixtureProbe, Probe, RecordingProbe
from meshkit.discover.topology import Topology, merge
from meshkit.errors import ConfigError, TraceError

SCHEMA = "meshkit.topo-bundle/1"
_NAMES = ("bundle.json", "nvml.json", "files.json", "commands.json")
_MOST_MEMBERS = 40_000
_LARGEST_BUNDLE_BYTES = 64 * 2**20
_HEADER_BYTES = 1024  # of a member in a tar: its header, and what fills up its last block
_TAR_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, struct.error, OverflowError)

_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_PRIVATE = (  # port GUID or IPv6, MAC, IPv4; a PCI address (0000:17:00.0) is none of them
    (re.compile(r"\b(?:[0-9a-f]{4}:){3,7}[0-9a-f]{4}\b", re.IGNORECASE), "0000:0000:0000:0000"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5,19}[0-9a-f]{2}\b", re.IGNORECASE), "00:00:00:00:00:00"),
    (re.compile(r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b"), "0.0.0.0"),
    (re.compile(r"(?im)^.*\bserial\b.*$"), ""),
)
_KERNEL = re.compile(r"[0-9]+\.[0-9]+(\.[0-9]+)?")


def replay(path: Path) -> Topology:
    """The Topology of a recorded machine, or of several.

    Raises:
        ConfigError: there is no bundle.
        TraceError: it is damaged.
    """
    members = _read_tar(path) if path.is_file() else _read_folder(path)
    hosts = sorted({name.rpartition("/")[0] for name in members if name.endswith("bundle.json")}, key=_natural)
    if not hosts:
        raise TraceError("there is no bundle.json in it.", at=str(path), hint=BUNDLE_HINT)
    probes = [_probe(members, host, str(path)) for host in hosts]
    return merge([discover(probe) for probe in probes], str(path))


def record(out: Path, probe: Probe) -> Topology:
    """Writes a scrubbed bundle of what discovery asks this machine; returns what it is.

    Args:
        out: a folder that does not exist or is empty, or a file that ends in .tar or .tar.gz.
        probe: the machine.

    Raises:
        ConfigError: `out` exists, or cannot be written.
    """
    recording = RecordingProbe(probe)
    found = discover(recording)
    texts = {
        "bundle.json": {"schema": SCHEMA},
        "nvml.json": scrub_nvml(recording.answers),
        "files.json": {path: scrub_file(path, text) for path, text in sorted(recording.files.items())},
        "commands.json": {name: scrub_command(name, text) for name, text in sorted(recording.commands.items())},
    }
    _write(out, {name: json.dumps(value, indent=1) + "\n" for name, value in texts.items()})
    return found


def scrub_nvml(answers: Mapping[str, Any] | str) -> dict[str, Any]:
    """NVML's answers with pseudonyms for GPUs and fabric."""
    if isinstance(answers, str):
        return {"missing": scrub_text(answers)}
    gpus = []
    for gpu in answers.get("gpus", []):
        fabric = gpu.get("fabric")
        if fabric and fabric["cluster_uuid"].strip("0"):
            fabric = {**fabric, "cluster_uuid": pseudonym(fabric["cluster_uuid"])}
        uuid = "GPU-" + pseudonym(gpu["uuid"]) if gpu.get("uuid") else None
        gpus.append({**gpu, "uuid": uuid, "fabric": fabric})
    return {**answers, "gpus": gpus}


def scrub_file(path: str, text: str) -> str:
    """A file of the machine, with no more of it than discovery reads."""
    if path.endswith("/uevent"):
        return "".join(line + "\n" for line in text.split("\n") if line.startswith("PCI_SLOT_NAME="))
    if path == "/proc/driver/nvidia/version":
        return scrub_text(text.split("\n")[0].split("(")[0].strip()) + "\n"  # what follows is who built it
    if path == "/proc/sys/kernel/osrelease":
        match = _KERNEL.match(text)
        return match[0] + "\n" if match else ""
    return scrub_text(text)


def scrub_command(name: str, text: str) -> str:
    """What a command printed, with no more of it than discovery reads."""
    if name.startswith("lspci"):
        return "".join("\t" + line.strip() + "\n" for line in text.split("\n") if "ACSCtl:" in line)
    return scrub_text(text)


def scrub_text(text: str) -> str:
    """Text with pseudonyms for uuids, and without addresses, GUIDs, serials and this host's name."""
    text = _UUID.sub(lambda match: pseudonym(match[0]), text)
    for pattern, plain in _PRIVATE:
        text = pattern.sub(plain, text)
    for name in {socket.gethostname(), socket.gethostname().split(".")[0]}:
        if len(name) > 2:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "host", text)
    return text


def pseudonym(identity: str) -> str:
    """32 hexadecimal digits that stand for a random identity, on every host alike."""
    plain = identity.lower().removeprefix("gpu-").replace("-", "")
    return hashlib.sha256(f"meshkit:{plain}".encode()).hexdigest()[:32]


def _write(out: Path, texts: Mapping[str, str]) -> None:
    as_tar = out.name.endswith((".tar", ".tar.gz", ".tgz"))
    try:
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise ConfigError(f"{out} exists, and `topo record` overwrites nothing.", hint="another path")
        (out.parent if as_tar else out).mkdir(parents=True, exist_ok=True)
        if not as_tar:
            for name, text in texts.items():
                (out / name).write_text(text, encoding="utf-8")
            return
        with tarfile.open(out, "w" if out.suffix == ".tar" else "w:gz") as archive:
            for name, text in texts.items():
                info = tarfile.TarInfo(name)  # a fresh one: no user, no time of this machine
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}.", hint="another path") from None


def _probe(members: Mapping[str, bytes], host: str, at: str) -> FixtureProbe:
    prefix = f"{host}/" if host else ""
    where = f"{at}/{host}" if host else at
    tables = {}
    for name in _NAMES:
        if prefix + name not in members:
            raise TraceError(f"the bundle has no {name}.", at=where, hint=BUNDLE_HINT)
        tables[name] = _json(members[prefix + name], f"{where}/{name}")
    if tables["bundle.json"].get("schema") != SCHEMA:
        raise TraceError(f"the bundle's schema is not {SCHEMA}.", at=f"{where}/bundle.json", hint=BUNDLE_HINT)
    for name in ("files.json", "commands.json"):
        wrong = next((key for key, text in tables[name].items() if not isinstance(text, str)), None)
        if wrong is not None:
            raise TraceError(f"'{short(wrong)}' is not text.", at=f"{where}/{name}", hint=BUNDLE_HINT)
    nvml = tables["nvml.json"]
    missing = nvml.get("missing")
    return FixtureProbe(
        files=tables["files.json"],
        commands=tables["commands.json"],
        nvml=short(missing, 200) if isinstance(missing, str) else nvml,
        name=where,
    )


def _json(data: bytes, at: str) -> dict[str, Any]:
    try:
        value = json.loads(decode(data, "bundle", at))
    except (ValueError, RecursionError) as error:
        why = short(str(error)) if isinstance(error, ValueError) else "nested too deeply"
        raise TraceError(f"it is not JSON: {why}.", at=at, hint=BUNDLE_HINT) from None
    if not isinstance(value, dict):
        raise TraceError("it is not a JSON object.", at=at, hint=BUNDLE_HINT)
    return value


def _read_folder(path: Path) -> dict[str, bytes]:
    if not path.is_dir():
        raise ConfigError("there is no such bundle.", at=str(path), hint="a folder or tar of `meshkit topo record`")
    found = {}
    try:
        folders = [path, *sorted(entry for entry in path.iterdir() if entry.is_dir())]
        for folder in folders[:_MOST_MEMBERS]:
            for name in _NAMES:
                if (folder / name).is_file():
                    key = name if folder == path else f"{folder.name}/{name}"
                    found[key] = read_bounded(folder / name, "bundle")
    except OSError as error:
        what = f"the bundle cannot be read: {error.strerror}."
        raise ConfigError(what, at=str(path), hint="a readable one") from None
    return found


def _read_tar(path: Path) -> dict[str, bytes]:
    """The members of a tar, in memory; nothing is ever unpacked."""
    data = read_bounded(path, "bundle", _LARGEST_BUNDLE_BYTES)
    found: dict[str, bytes] = {}
    total = 0
    try:
        if data[:2] == b"\x1f\x8b":
            data = gunzip(data, _LARGEST_BUNDLE_BYTES + _HEADER_BYTES * _MOST_MEMBERS)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for number, member in enumerate(archive):
                total += member.size
                if number > _MOST_MEMBERS or member.size > LARGEST_FILE_BYTES or total > _LARGEST_BUNDLE_BYTES:
                    raise TraceError("the bundle is larger than 64 MiB.", at=str(path), hint=BUNDLE_HINT)
                name = member.name.removeprefix("./")
                if member.isfile() and name.rpartition("/")[2] in _NAMES and name.count("/") <= 1:
                    file = archive.extractfile(member)
                    found[name] = file.read() if file else b""
    except _TAR_DAMAGE as error:
        raise TraceError(f"the bundle is not a tar: {short(str(error))}.", at=str(path), hint=BUNDLE_HINT) from None
    return found


def _natural(name: str) -> list:
    """A sort key that puts host2 before host10."""
    return [(int(part), "") if part.isdigit() and part.isascii() else (0, part) for part in re.split(r"([0-9]+)", name)]
