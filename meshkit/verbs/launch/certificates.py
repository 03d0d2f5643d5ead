"""Certificates made for one run: an authority whose key is forgotten at once, and one certificate of it.

    hosts of the coordinator -> make_certificates -> write_certificates (a folder for this user alone) | a Secret

All processes of the run share the certificate: they are one program of one user, and whoever has the key is in.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshkit.distributed.mtls import CA_FILE, CERTIFICATE_FILE, FILES, KEY_FILE
from meshkit.errors import ConfigError

# Longer than a run; they are removed with it. The start lies back, for machines whose clocks are behind.
VALID_DAYS = 365
_BACK = datetime.timedelta(days=1)
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)


def make_certificates(hosts: Sequence[str], *, days: int = VALID_DAYS) -> dict[str, bytes]:
    """A new authority's certificate, a certificate of it for servers and clients, and that one's private key.

    The authority's own key is never written: nobody can make another certificate for this run.

    Args:
        hosts: names and addresses of the coordinator, which the other processes compare with the certificate.
        days: for which they are valid.

    Returns:
        File name -> PEM, as `distributed/mtls.py` names them.

    Raises:
        ConfigError: no host, or one that is no name and no address.
    """
    names = [_alternative(host) for host in dict.fromkeys(hosts)]
    if not names:
        raise ConfigError(
            "a certificate needs the name or address of the coordinator.", at="--host", hint="--host gpu7"
        )
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    uses = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    uses += ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")

    def certificate(
        subject: str, of: ec.EllipticCurvePrivateKey, use: str, authority: bool, *extensions: x509.ExtensionType
    ) -> x509.Certificate:
        name = lambda text: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
        builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("meshkit run authority"))
        builder = builder.public_key(of.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - _BACK).not_valid_after(now + datetime.timedelta(days=days))
        constraints = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
        for extension in (x509.SubjectKeyIdentifier.from_public_key(of.public_key()), *extensions):
            builder = builder.add_extension(extension, critical=False)
        for extension in (constraints, x509.KeyUsage(**{name: name == use for name in uses})):
            builder = builder.add_extension(extension, critical=True)
        return builder.sign(ca_key, hashes.SHA256())

    ca = certificate("meshkit run authority", ca_key, "key_cert_sign", True)
    leaf = certificate(
        "meshkit run",
        key,
        "digital_signature",
        False,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
        x509.SubjectAlternativeName(names),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {CA_FILE: ca.public_bytes(pem), CERTIFICATE_FILE: leaf.public_bytes(pem), KEY_FILE: secret}


def _alternative(host: str) -> x509.GeneralName:
    text = host.strip().strip("[]")
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not _HOST.fullmatch(text):
        raise ConfigError(f"'{host[:80]}' is no name and no address of a host.", at="--host", hint="--host gpu7")
    return x509.DNSName(text)


def write_certificates(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes them into a folder that this user alone can open; replaces those of an earlier run.

    Raises:
        ConfigError: the folder belongs to somebody else or is a link, has other files in it, cannot be written, or its
            file system keeps no permissions.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(
                f"{folder} is no folder of this user; certificates are not written there.", hint="another folder"
            )
        if strange := sorted(p.name for p in folder.iterdir() if p.name not in FILES):
            raise ConfigError(f"{folder} has other files in it: {', '.join(strange[:4])}.", hint="a folder of its own")
        folder.chmod(0o700)
        for name, data in files.items():
            (folder / name).unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            with os.fdopen(os.open(folder / name, flags, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # other hosts read it at once
        mode = stat.S_IMODE((folder / KEY_FILE).stat().st_mode)
    except OSError as e:
        raise ConfigError(f"certificates cannot be written to {folder}: {e.strerror}.", hint="another folder") from None
    if mode & 0o077:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"the file system of {folder} keeps no permissions (mode {mode:04o}): others could read the private key.",
            hint="another folder",
        )


@contextmanager
def certificates_for(folder: Path, hosts: Sequence[str]) -> Iterator[Path]:
    """New certificates in a folder, for as long as the block runs.

    Raises:
        ConfigError: see `make_certificates` and `write_certificates`.
    """
    write_certificates(folder, make_certificates(hosts))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # nothing else is in it: `write_certificates` sees to that
