"""Roles as certificates name them.

A certificate belongs to a role when it has the DNS name ROLE.outrider.internal among its subject alternative names:

    coordinator.outrider.internal   target.outrider.internal   draft.outrider.internal   client.outrider.internal

One name serves both ends of a connection. A server reads it out of the caller's certificate; a caller asks TLS for a
server of that name, whatever the address it dials, so workers that move need no certificates of their own addresses.
`.internal` is kept for private use: no public authority issues such a name.
"""

from collections.abc import Iterable
from enum import StrEnum

_DOMAIN = ".outrider.internal"


class Role(StrEnum):
    """Role of a process or a caller."""

    COORDINATOR = "coordinator"
    TARGET = "target"
    DRAFT = "draft"
    CLIENT = "client"

    @property
    def dns_name(self) -> str:
        """DNS name in the role's certificates."""
        return f"{self.value}{_DOMAIN}"


def roles_of(dns_names: Iterable[str]) -> frozenset[Role]:
    """The roles among a certificate's names."""
    names = set(dns_names)
    return frozenset(role for role in Role if role.dns_name in names)
