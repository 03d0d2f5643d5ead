"""Make, write, read and check the certificates by which the processes of a job authenticate each other (mutual TLS).

    hosts of the coordinator -> make_certificates -> write_certificates (a private folder) | a Kubernetes Secret
    folder, MESHKIT_MTLS -> read_certificates -> roll call, jax.distributed

The coordinator and every process show a certificate from one authority. The authority is made for the run, and its key
is discarded at once. A process without a certificate cannot connect and learns nothing. All processes of the run share
one certificate and key, since they are one program of one user. Whoever has the key can connect.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import shutil
import ssl
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshkit.config.files import open_regular
from meshkit.distributed.environment import MTLS
from meshkit.errors import ConfigError
from meshkit.private import MARK, NotPrivate, private_folder

if TYPE_CHECKING:  # a process that only reads certificates does not import cryptography
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

# Longer than a run, which removes its certificates at its end. They are valid from `_BACK` before now, for machines
# whose clocks are behind.
VALID_DAYS = 365
_BACK = datetime.timedelta(days=1)
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "certificate.pem", "key.pem"
FILES = (CA_FILE, CERTIFICATE_FILE, KEY_FILE)
MAKE_HINT = "meshkit launch certificates DIR --host NAME, on a file system that all hosts share"


def make_certificates(hosts: Sequence[str], *, days: int = VALID_DAYS) -> dict[str, bytes]:
    """Return the certificate of a new authority, a certificate that it signed, and the private key of the second.

    The second certificate is for servers and clients. The authority's own key is never written, so nobody can make
    another certificate for this run.

    Args:
        hosts: names and addresses of the coordinator, which the other processes compare with the certificate.
        days: the days for which the certificates are valid.

    Returns:
        File name (one of `FILES`) -> PEM.

    Raises:
        ConfigError: there is no host, or a host is neither a name nor an address.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

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
    """Return a host as an entry of a certificate: an address or a name."""
    from cryptography import x509

    text = host.strip().strip("[]")
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not _HOST.fullmatch(text):
        raise ConfigError(f"'{host[:80]}' is no name and no address of a host.", at="--host", hint="--host gpu7")
    return x509.DNSName(text)


def write_certificates(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write certificates to a folder that only this user can open, and replace those of an earlier run.

    Args:
        folder: a private folder of meshkit (private.py), made if missing.
        files: file name -> PEM, from `make_certificates`; each file gets mode 0600.

    Raises:
        ConfigError: the folder is not private, has other files in it, cannot be written, or its file system does not
            store permissions.
    """
    try:
        private_folder(folder)
        if strange := sorted(p.name for p in folder.iterdir() if p.name not in (*FILES, MARK)):
            raise ConfigError(f"{folder} has other files in it: {', '.join(strange[:4])}.", hint="a folder of its own")
        for name, data in files.items():
            (folder / name).unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            with os.fdopen(os.open(folder / name, flags, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # other hosts read the file at once
        mode = stat.S_IMODE((folder / KEY_FILE).stat().st_mode)
    except (NotPrivate, OSError) as e:
        problem = getattr(e, "strerror", None) or e
        raise ConfigError(f"certificates cannot be written to {folder}: {problem}.", hint="another folder") from None
    if mode & 0o077:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"the file system of {folder} keeps no permissions (mode {mode:04o}): others could read the private key.",
            hint="another folder",
        )


@contextmanager
def certificates_for(folder: Path, hosts: Sequence[str]) -> Iterator[Path]:
    """Write new certificates to a folder, and remove the folder when the context ends.

    Raises:
        ConfigError: see `make_certificates` and `write_certificates`.
    """
    write_certificates(folder, make_certificates(hosts))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # `write_certificates` has checked that nothing else is in it


@dataclass(frozen=True)
class Certificates:
    """A folder with the authority's certificate, the certificate of the processes, and its private key."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The authority's certificate, by which this process checks other processes."""
        return self.folder / CA_FILE

    @property
    def certificate(self) -> Path:
        """The certificate that this process shows."""
        return self.folder / CERTIFICATE_FILE

    @property
    def key(self) -> Path:
        """The private key of `certificate`."""
        return self.folder / KEY_FILE

    def server(self) -> ssl.SSLContext:
        """Return the TLS context of the listener, which accepts every process with a certificate of the authority."""
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def client(self) -> ssl.SSLContext:
        """Return the TLS context of a connecting process, which also checks the coordinator's name."""
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.certificate, self.key)
        return context


def read_certificates(folder: str, *, coordinator_host: str | None = None) -> Certificates:
    """Return the certificates of a folder, after a test handshake inside this process.

    Args:
        folder: the value of MESHKIT_MTLS.
        coordinator_host: the name or address that the certificate must have, for the process that listens; None for
            the other processes.

    Raises:
        ConfigError: a file is missing, unreadable or no certificate; the key belongs to another certificate, or all
            users may read it; a certificate has expired, or has another host's name.
    """
    found = Certificates(Path(folder))
    at = f"{MTLS}={folder}"
    for name in FILES:
        try:
            with open_regular(found.folder / name) as file:
                mode = os.fstat(file.fileno()).st_mode
        except OSError as e:
            raise ConfigError(f"{name} cannot be read: {e.strerror}.", at=at, hint=MAKE_HINT) from None
        if name == KEY_FILE and mode & stat.S_IRWXO:
            raise ConfigError(
                f"everybody on this machine may read the private key {name} (mode {stat.S_IMODE(mode):04o}).",
                at=at,
                hint=f"chmod 600 {found.key}, if nobody has read it; otherwise new certificates",
            )
    try:
        _shake_hands(found, coordinator_host)
    except ssl.SSLCertVerificationError as e:
        raise ConfigError(
            f"the certificate is not valid: {e.verify_message.rstrip('.')}.", at=at, hint=MAKE_HINT
        ) from None
    except (ssl.SSLError, OSError) as e:
        reason = getattr(e, "reason", None) or str(e)
        raise ConfigError(f"the certificates cannot be used: {reason}.", at=at, hint=MAKE_HINT) from None
    return found


def _shake_hands(certificates: Certificates, host: str | None) -> None:
    """Do a handshake between two ends in memory; OpenSSL raises the errors of a handshake over the network."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = certificates.client()
    context.check_hostname = host is not None
    client = context.wrap_bio(to_client, to_server, server_hostname=host)
    server = certificates.server().wrap_bio(to_server, to_client, server_side=True)
    left = [client, server]
    for _ in range(8):  # rounds of messages; TLS 1.3 needs three
        for end in list(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:
                continue
        if not left:
            return
    raise ssl.SSLError("the handshake does not end")
