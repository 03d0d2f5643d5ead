"""The certificates by which the processes of a job know each other: where they lie, what is wrong with them.

    verbs/launch/certificates.py makes them -> folder, MESHKIT_MTLS -> read_certificates -> roll call, jax.distributed

Mutual TLS: the coordinator and every process show a certificate of one authority, which is made for the run. Whoever
has none is not let in, and learns nothing.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from meshkit.config.bounded import open_regular
from meshkit.distributed.environment import MTLS
from meshkit.errors import ConfigError

CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "certificate.pem", "key.pem"
FILES = (CA_FILE, CERTIFICATE_FILE, KEY_FILE)
MAKE_HINT = "meshkit launch certificates DIR --host NAME, on a file system that all hosts share"


@dataclass(frozen=True)
class Certificates:
    """A folder with the authority's certificate, one of this process, and its private key."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The authority's certificate: who else is let in."""
        return self.folder / CA_FILE

    @property
    def certificate(self) -> Path:
        """What this process shows."""
        return self.folder / CERTIFICATE_FILE

    @property
    def key(self) -> Path:
        """The private key of that."""
        return self.folder / KEY_FILE

    def server(self) -> ssl.SSLContext:
        """The context of the one that listens: it lets in who has a certificate of the authority."""
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def client(self) -> ssl.SSLContext:
        """The context of one that connects: it also compares the coordinator's name with its certificate."""
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.certificate, self.key)
        return context


def read_certificates(folder: str, *, coordinator_host: str | None = None) -> Certificates:
    """The certificates of a folder, after this process has shaken hands with itself by them.

    Args:
        folder: what MESHKIT_MTLS says.
        coordinator_host: of the process that listens: the name or address that its certificate must have; None for the
            other processes.

    Raises:
        ConfigError: a file is missing, unreadable or not a certificate, the key belongs to none of them or others may
            read it, the time of a certificate is over, or it has another host's name.
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
                hint=f"chmod 600 {found.key}, if nobody has; otherwise new certificates",
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
    """Both ends of a connection, in memory. OpenSSL says what a handshake over the network would."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = certificates.client()
    context.check_hostname = host is not None
    client = context.wrap_bio(to_client, to_server, server_hostname=host)
    server = certificates.server().wrap_bio(to_server, to_client, server_side=True)
    left = [client, server]
    for _ in range(8):  # flights; TLS 1.3 needs three
        for end in list(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:
                continue
        if not left:
            return
    raise ssl.SSLError("the handshake does not end")
