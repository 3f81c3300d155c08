"""Ports that have to be known before their servers listen, and room for the files of their connections."""

import random
import socket
import sys

# Below those that systems give to connections on their own, and above those that Ray gives to its workers: of these
# any may be taken between the look and the bind.
_RANGE = range(20_000, 30_000)
_ATTEMPTS = 100
# Every connection is an open file, and shells commonly allow 1,024.
_FILES = 65_536


def free_port(host: str = "127.0.0.1", *, count: int = 1) -> int:
    """The first of `count` ports in a row that nothing listens on now; another process may still be quicker.

    Args:
        host: an address of this machine; "" is all of them.

    Raises:
        OSError: none was found.
    """
    for _ in range(_ATTEMPTS):
        first = random.choice(_RANGE[: len(_RANGE) - count + 1])
        if all(_is_free(host, port) for port in range(first, first + count)):
            return first
    raise OSError(f"{host or 'this machine'}: no {count} free ports in a row found from {_RANGE[0]} to {_RANGE[-1]}")


def check_free(address: str) -> None:
    """Raise OSError where something listens at host:port now, or it is no address of this machine; port 0 is free."""
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, found = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # What a former owner's connections have left behind does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(found)


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as the machine lets it, up to 65,536."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
