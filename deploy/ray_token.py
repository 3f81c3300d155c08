"""Ray's token authentication: whoever reaches a Ray cluster without it may run code there.

Ray reads RAY_AUTH_MODE when it is imported. By itself it turns tokens on for a cluster that it starts, and for the one
that "auto" finds, but never for an address that is given. So this is decided here, before the import.
"""

import os
import sys
from pathlib import Path

_TOKEN_FILE = Path(".ray") / "auth_token"


def prefer_token(address: str) -> None:
    """Authenticate with the user's token where there is one, or where a Ray is started; what the user has set counts.

    Args:
        address: of the Ray cluster that is going to be joined; "local" starts one.
    """
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if "ray" not in sys.modules and (address == "local" or given or (Path.home() / _TOKEN_FILE).exists()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
