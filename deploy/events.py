"""Events of a deployment, in words for whoever has started it."""

import logging
from collections import deque

logger = logging.getLogger(__name__)

_KEPT = 200


class Events:
    """The latest events, numbered from 0 on."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=_KEPT)
        self._count = 0

    def add(self, text: str) -> None:
        """Note an event."""
        logger.info(text)
        self._kept.append(text)
        self._count += 1

    def since(self, number: int) -> tuple[int, list[str]]:
        """Return the number of the next event, and the events from `number` on that are still kept."""
        fresh = min(max(self._count - number, 0), len(self._kept))
        return self._count, list(self._kept)[len(self._kept) - fresh :]
