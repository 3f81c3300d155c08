"""Where a role may be read, checked with its configuration: without Prometheus, which takes time to import."""

from outrider.security.binding import check_bind
from outrider.security.tls import TlsConfig


def check_metrics_options(port: int | None, host: str, *, insecure: bool, tls: TlsConfig | None) -> None:
    """Whether a role may be read there.

    Raises:
        ValueError: not a port, or a host that others reach without protection.
    """
    if port is None:
        return
    if not 0 <= port <= 65535:
        raise ValueError(f"metrics_port: {port} given, 0 to 65535 needed")
    try:
        check_bind(host, insecure=insecure, tls_ca=tls)
    except ValueError as error:
        raise ValueError(f"metrics_{error}") from error
