"""What a controller writes down for the one that takes over from it, in Ray's key-value store."""

import json
from typing import Any

from ray.experimental import internal_kv

NAMESPACE = "outrider"


class SavedState:
    """The state of one deployment, of plain values.

    Args:
        name: of the deployment.
    """

    def __init__(self, name: str) -> None:
        self._key = f"deployment/{name}".encode()
        self._written = b""

    def read(self) -> dict[str, Any] | None:
        """What was written last; None where nothing was."""
        packed = internal_kv._internal_kv_get(self._key, namespace=NAMESPACE)
        return None if packed is None else json.loads(packed)

    def write(self, state: dict[str, Any]) -> None:
        """Cheap where nothing has changed."""
        packed = json.dumps(state).encode()
        if packed != self._written:
            internal_kv._internal_kv_put(self._key, packed, namespace=NAMESPACE)
            self._written = packed

    def forget(self) -> None:
        """Of what has ended nothing is kept."""
        internal_kv._internal_kv_del(self._key, namespace=NAMESPACE)
