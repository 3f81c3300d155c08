"""Rules for binds: beyond loopback only with TLS, and the public API only with tokens as well."""

import ipaddress
import logging

logger = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def missing_protection(host: str, protections: dict[str, object | None]) -> list[str]:
    """The options among `protections` (option: its value) that listening on `host` lacks."""
    return [] if is_loopback(host) else [option for option, value in protections.items() if value is None]


def check_bind(host: str, *, insecure: bool, **protections: object | None) -> None:
    """Refuse to listen without protection where others than this machine reach it.

    Args:
        protections: what is needed beyond loopback, by name; None where it is missing.

    Raises:
        ValueError: it is refused.
    """
    missing = missing_protection(host, protections)
    if missing and not insecure:
        raise ValueError(
            f"host: {host} given, which other machines may reach: give {' and '.join(missing)} as well, or listen on "
            "127.0.0.1 (insecure serves whoever comes, unencrypted)"
        )


def check_metrics_options(port: int | None, host: str, *, insecure: bool, tls: object | None) -> None:
    """Raise ValueError for what is no port, or a host that others reach without protection."""
    if port is None:
        return
    if not 0 <= port <= 65535:
        raise ValueError(f"metrics_port: {port} given, 0 to 65535 needed")
    try:
        check_bind(host, insecure=insecure, tls_ca=tls)
    except ValueError as error:
        raise ValueError(f"metrics_{error}") from error


def warn_of_bind(host: str, **protections: object | None) -> None:
    """Warn of a bind that only `insecure` allows."""
    missing = missing_protection(host, protections)
    if missing:
        logger.warning(
            "INSECURE: listening on %s without %s: whoever reaches this port may use it", host, " and ".join(missing)
        )
