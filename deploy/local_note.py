"""Address of a local `outrider serve`'s Ray, stored so that other terminals find it by deployment name."""

import json
import logging
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 1.0


def remember_local(name: str, address: str) -> None:
    """Write down where the Ray of this process is, for as long as the process lives."""
    if (other := local_address(name)) is not None and _answers(other):
        logger.warning("another `outrider serve` of the name %s runs here, which other commands will find", name)
        return
    path = _note_of(name)
    note = {"address": address, "pid": os.getpid()}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Whoever made it first may have put a link there, to a file of ours.
        if path.parent.lstat().st_uid != os.getuid():
            raise PermissionError(f"{path.parent} belongs to somebody else")
        path.write_text(json.dumps(note), encoding="utf-8")
    except OSError as error:
        logger.warning("other terminals need --address %s to find this deployment: %s", address, error)


def forget_local(name: str) -> None:
    """Take the note away, if it is this process's own."""
    if _read_note(name).get("pid") == os.getpid():
        _note_of(name).unlink(missing_ok=True)


def local_address(name: str) -> str | None:
    """Return the Ray address of a running `outrider serve` of this name; None if there is none on this machine."""
    note = _read_note(name)
    if not note or not _is_running(note["pid"]):
        return None
    return note["address"]


def _note_of(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}" / f"{name}.json"


def _read_note(name: str) -> dict[str, Any]:
    path = _note_of(name)
    try:
        # In a folder that everybody may write to: a note of somebody else would lead us to their cluster.
        if path.parent.stat().st_uid != os.getuid() or path.stat().st_uid != os.getuid():
            return {}
        note = json.loads(path.read_text(encoding="utf-8"))
        return {"address": str(note["address"]), "pid": int(note["pid"])}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _answers(address: str) -> bool:
    """Return True if Ray answers there; the process id may have been reused."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
