from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.security.certificates import Issued, issue, make_authority
from outrider.security.roles import Role
from outrider.security.tls import TlsConfig


@dataclass(frozen=True)
class Authority:
    """Makes certificates into a folder."""

    folder: Path
    issued: Issued

    def tls(self, role: Role, name: str | None = None, *, ca: Path | None = None, **options: Any) -> TlsConfig:
        """Files of a new certificate, which by default is good for a day and for 127.0.0.1."""
        made = issue(self.issued, role, **({"days": 1, "hosts": ["127.0.0.1"]} | options))
        certificate, key = (self.folder / f"{name or role}.{kind}" for kind in ("pem", "key"))
        certificate.write_bytes(made.certificate_pem)
        key.write_bytes(made.key_pem)
        return TlsConfig(ca=ca or self.ca, certificate=certificate, key=key)

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"


@pytest.fixture
def make_ca(tmp_path: Path) -> Callable[[str], Authority]:
    def make(name: str) -> Authority:
        (tmp_path / name).mkdir()
        authority = Authority(tmp_path / name, make_authority(days=1))
        authority.ca.write_bytes(authority.issued.certificate_pem)
        return authority

    return make


@pytest.fixture
def authority(make_ca: Callable[[str], Authority]) -> Authority:
    return make_ca("own")
