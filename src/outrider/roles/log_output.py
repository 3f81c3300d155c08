"""Logs on stderr that nobody has to read: a role never waits for whoever takes its log.

    record -> formatted -> queue -> a thread of its own -> stderr

A pipe whose reader has stopped is full after 64 KiB, a log file on a disk that hangs even sooner, and from then on
every write waits. With the usual handler it is the event loop that waits, and with it heartbeats, streams and all
sessions. Here the thread waits alone; lines that find the queue full are counted, and how many are missing is said once
there is room again.

A line is text for people, or one JSON object for programs. Either holds the ids of what it is about, which whoever
writes it names: `logger.info("...", extra=about(request_id=request_id))`.
"""

import atexit
import contextlib
import datetime
import json
import logging
import os
import queue
import sys
import threading
from typing import Any, Literal

LogFormat = Literal["text", "json"]
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_WAITING_LINES = 4096
# Of a process that ends: what is still to be written has so long.
_LAST_LINES_S = 1.0


def log_to_stderr(level: str, log_format: LogFormat = "text", *, role: str = "") -> None:
    """Send the log of this process to stderr, from this level on; call it once, where the process begins.

    Args:
        role: of the process; in every JSON line.
    """
    handler = QueuedHandler(sys.stderr.fileno())
    handler.setFormatter(JsonFormatter(role) if log_format == "json" else TextFormatter(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    atexit.register(handler.finish, timeout_s=_LAST_LINES_S)


def about(**ids: str | int) -> dict[str, Any]:
    """Return the ids of a line, for logging's `extra`: request_id, session_id, worker_id and the like."""
    return {"ids": ids}


class TextFormatter(logging.Formatter):
    """A line for people, with the ids behind it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The line without a traceback."""
        line, ids = super().formatMessage(record), getattr(record, "ids", None)
        return f"{line} [{' '.join(f'{name}={value}' for name, value in ids.items())}]" if ids else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, role, message, the ids, and a traceback where there is one."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        at = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "role": self._role,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= getattr(record, "ids", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class QueuedHandler(logging.Handler):
    """Hands its lines to a thread that writes them.

    Args:
        waiting_lines: that may wait for it; further ones are dropped.
    """

    def __init__(self, descriptor: int, *, waiting_lines: int = _WAITING_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(waiting_lines)
        self._dropped = 0
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; under the handler's lock, so that none is counted twice."""
        try:
            if self._dropped:
                if self._lines.maxsize - self._lines.qsize() < 2:
                    raise queue.Full
                text = f"{self._dropped} lines of the log are missing here: nobody read it"
                own = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (), None)
                self._lines.put_nowait(self.format(own))
                self._dropped = 0
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001 - a line that cannot be formatted must not end what it tells of
            self.handleError(record)

    def finish(self, *, timeout_s: float) -> None:
        """Write what waits, as far as it can be written in this time."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._writer.join(timeout_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            left = f"{line}\n".encode(errors="backslashreplace")
            # A full disk may have room again, and a reader that is gone misses nothing: the next line is tried again.
            with contextlib.suppress(OSError):
                # Past Python's buffer, whose lock a write that waits would hold to the end of the process.
                while left:
                    left = left[os.write(self._descriptor, left) :]
