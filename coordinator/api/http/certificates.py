"""The certificate that the HTTP door shows: the coordinator's own, read anew when its files change."""

import logging
import ssl

from outrider.errors import CertificateError
from outrider.security.tls import TlsConfig

logger = logging.getLogger(__name__)

# A key with a passphrase is refused rather than asked for at a terminal.
_NO_PASSPHRASE = b""


class DoorCertificate:
    """A TLS context, and the files behind it. Clients need no certificate, as at the public gRPC door.

    Args:
        tls: of the coordinator.

    Attributes:
        context: for the listener; `refresh` changes what its next handshakes show.

    Raises:
        CertificateError: the files cannot be used.
    """

    def __init__(self, tls: TlsConfig) -> None:
        assert tls.certificate is not None
        assert tls.key is not None
        self._certificate, self._key = tls.certificate, tls.key
        self.context = _new_context()
        try:
            self._stamps = self._read_stamps()
            self._load(self.context)
        except OSError as error:
            raise CertificateError(f"{self._certificate}, {self._key}: {error}") from error

    def refresh(self) -> None:
        """Reads the files anew if they have changed; what cannot be used is logged, and what was there stays."""
        try:
            stamps = self._read_stamps()
            if stamps == self._stamps:
                return
            # A context into which only half of a new pair fits would be left broken.
            self._load(_new_context())
            self._load(self.context)
        except OSError as error:
            logger.warning("the TLS files of the HTTP door are not read anew: %s", error)
            return
        self._stamps = stamps
        logger.info("TLS files of the HTTP door read anew: %s, %s", self._certificate, self._key)

    def _load(self, context: ssl.SSLContext) -> None:
        # Its errors are OSErrors, too.
        context.load_cert_chain(self._certificate, self._key, password=_NO_PASSPHRASE)

    def _read_stamps(self) -> list[tuple[int, int]]:
        return [(status.st_mtime_ns, status.st_ino) for status in (self._certificate.stat(), self._key.stat())]


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
