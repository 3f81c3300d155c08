"""TLS as every role and client uses it: three files, checked with errors that name the file and the remedy."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc

from outrider.errors import CertificateError
from outrider.security.roles import Role, roles_of

if TYPE_CHECKING:
    from cryptography import x509

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """TLS settings of one end of a connection. Constructing one reads no file.

    Attributes:
        ca: certificates (PEM) of the authorities whose certificates are believed.
        certificate: own certificate (PEM), those between it and the authority behind it; None for a client without one.
        key: the certificate's private key (PEM, no passphrase).
    """

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls_certificate and tls_key belong together: give both or none")

    @classmethod
    def of_options(cls, ca: Path | None, certificate: Path | None, key: Path | None) -> Self | None:
        """Return what the options of a role say, None where none is given; ValueError where only some are."""
        given = {"tls_ca": ca, "tls_certificate": certificate, "tls_key": key}
        missing = [name for name, path in given.items() if path is None]
        if len(missing) == len(given):
            return None
        if missing:
            raise ValueError(f"{missing[0]}: missing, tls_ca, tls_certificate and tls_key belong together")
        assert ca is not None
        return cls(ca=ca, certificate=certificate, key=key)

    @classmethod
    def of_folder(cls, folder: str | Path, role: Role) -> Self:
        """A role's files in a folder that `outrider certs` has made."""
        folder = Path(folder)
        return cls(ca=folder / "ca.pem", certificate=folder / f"{role}.pem", key=folder / f"{role}.key")

    def check(self, role: Role | None = None) -> None:
        """Check that peers will accept these files.

        Args:
            role: that the certificate has to be of; None for any.

        Raises:
            CertificateError: a file is missing or damaged, key and certificate do not belong together, the certificate
                is expired, not valid yet, of another authority or of another role.
        """
        authorities = _certificates(self.ca, "tls_ca")
        if self.certificate is None or self.key is None:
            if role is not None:
                raise CertificateError(f"a {role} needs tls_certificate and tls_key")
            return
        chain = _certificates(self.certificate, "tls_certificate")
        _check_key(self.key, self.certificate, chain[0])
        _check_time(self.certificate, chain[0])
        _check_issuer(self.certificate, chain, self.ca, authorities)
        if role is not None and role not in (roles := _roles(chain[0])):
            found = ", ".join(sorted(roles)) or "no role"
            needed = f"{role} needed ({role.dns_name} among its names)"
            raise CertificateError(f"{self.certificate} is a certificate of {found}, {needed}")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Read the files and return credentials for a channel."""
        key, certificate = (None, None) if self.key is None else (_read(self.key), _read(self.certificate))
        return grpc.ssl_channel_credentials(_read(self.ca), key, certificate)

    def server_credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """Return credentials for a server; changed files are reloaded without a restart.

        Args:
            client_certificates: who dials has to show one of the same authority; otherwise none is asked for. gRPC
                knows nothing between.
        """
        files = _RereadFiles(self, client_certificates=client_certificates)
        # The stubs do not know that the answer may be None: nothing has changed.
        changed: Callable[[], Any] = files.changed
        return grpc.dynamic_ssl_server_credentials(files.first, changed, client_certificates)


class _RereadFiles:
    """The files as gRPC asks for them, at every handshake and on a thread of its own."""

    def __init__(self, tls: TlsConfig, *, client_certificates: bool) -> None:
        assert tls.certificate is not None
        assert tls.key is not None
        self._paths = (tls.ca, tls.certificate, tls.key)
        self._client_certificates = client_certificates
        self._stamps = self._read_stamps()
        self.first = self._configuration()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The files' new contents, or None."""
        try:
            stamps = self._read_stamps()
            if stamps == self._stamps:
                return None
            configuration = self._configuration()
        except (OSError, CertificateError) as error:
            # Whoever renews them may be half way: what was read before stays in use.
            logger.warning("the TLS files are not read anew: %s", error)
            return None
        self._stamps = stamps
        logger.info("TLS files read anew: %s", ", ".join(map(str, self._paths)))
        return configuration

    def _read_stamps(self) -> list[tuple[int, int]]:
        try:
            return [(status.st_mtime_ns, status.st_ino) for status in (path.stat() for path in self._paths)]
        except OSError as error:
            raise CertificateError(str(error)) from error

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        ca, certificate, key = self._paths
        _check_key(key, certificate, _certificates(certificate, "tls_certificate")[0])
        root = _read(ca) if self._client_certificates else None
        return grpc.ssl_server_certificate_configuration([(_read(key), _read(certificate))], root)


def _roles(certificate: x509.Certificate) -> frozenset[Role]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    return roles_of(names.get_values_for_type(x509.DNSName))


def _read(path: Path | None) -> bytes:
    assert path is not None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from error


def _certificates(path: Path, option: str) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError as error:
        raise CertificateError(f"{option}: {path} holds no certificate in PEM form") from error


def _check_key(path: Path, certificate_path: Path, certificate: x509.Certificate) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"tls_key: {path} holds no private key in PEM form without a passphrase") from error
    if key.public_key() != certificate.public_key():
        raise CertificateError(f"tls_key: {path} is not the key of {certificate_path}")


def _check_time(path: Path, certificate: x509.Certificate) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        raise CertificateError(
            f"{path} is expired since {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: renew it"
        )
    if now < certificate.not_valid_before_utc:
        raise CertificateError(
            f"{path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: is the clock right?"
        )


def _check_issuer(
    path: Path, chain: list[x509.Certificate], ca_path: Path, authorities: list[x509.Certificate]
) -> None:
    for below, above in zip(chain, [*chain[1:], None], strict=True):
        if any(_is_issued_by(below, authority) for authority in authorities):
            return
        if above is None or not _is_issued_by(below, above):
            break
    raise CertificateError(f"{path} was not issued by an authority of {ca_path}")


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
