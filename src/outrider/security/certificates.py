"""A development set of certificates: an authority of one's own and a certificate for each role.

Keys are on the curve P-256: quick to make, and quick in a handshake. For production, let the authority that you run
(cert-manager, step-ca, Vault) issue the same names; nothing here is special but the roles' names (see roles.py).
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.security.files import replace_file, write_private
from outrider.security.roles import Role

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
# A clock that is a little behind must not refuse what was just made.
_BACKDATED = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Issued:
    """A certificate with its key."""

    certificate: x509.Certificate  # with the chain's first place
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """PEM of the certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """PEM of the key, without a passphrase."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def make_authority(*, days: float) -> Issued:
    """A new authority, which can issue certificates but no further authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Outrider development CA")
    certificate = (
        _begun(name, name, key, datetime.datetime.now(datetime.UTC) - _BACKDATED, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(issuing=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Issued(certificate, key)


def issue(
    authority: Issued,
    role: Role,
    *,
    hosts: Sequence[str] = (),
    days: float,
    not_before: datetime.datetime | None = None,
) -> Issued:
    """Issue a certificate for a role.

    Args:
        hosts: names and IP addresses under which clients dial it.
        days: that it is valid, from `not_before`.
        not_before: default a little before now.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    not_before = not_before or datetime.datetime.now(datetime.UTC) - _BACKDATED
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role is not Role.CLIENT:
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    signer = authority.key.public_key()
    certificate = (
        _begun(_name(f"outrider {role}"), authority.certificate.subject, key, not_before, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(issuing=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(role.dns_name), *map(_host_name, hosts)]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Issued(certificate, key)


def write_development_set(folder: Path, *, hosts: Sequence[str] = (), days: float, overwrite: bool = False) -> None:
    """Write ca.pem, ca.key and for every role ROLE.pem and ROLE.key.

    Args:
        hosts: under which clients dial coordinators, beside this machine's own names.
        days: that all of it is valid.

    Raises:
        FileExistsError: one of the files is there, and `overwrite` is not given.
    """
    names = ["ca", *Role]
    paths = [folder / f"{name}.{kind}" for name in names for kind in ("pem", "key")]
    present = [path for path in paths if path.exists()]
    if present and not overwrite:
        raise FileExistsError(f"{present[0]} is there already: choose another folder, or replace all with --force")
    authority = make_authority(days=days)
    hosts = list(dict.fromkeys((*LOCAL_HOSTS, *hosts)))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in names:
        issued = authority
        if name != "ca":
            role = Role(name)
            issued = issue(authority, role, hosts=hosts if role is Role.COORDINATOR else (), days=days)
        write_private(folder / f"{name}.key", issued.key_pem)
        replace_file(folder / f"{name}.pem", issued.certificate_pem, mode=0o644)


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    not_before: datetime.datetime,
    days: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_before + datetime.timedelta(days=days))
    )


def _usage(*, issuing: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not issuing,
        key_cert_sign=issuing,
        crl_sign=issuing,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)
