"""Reading the JSON files of a checkpoint folder (torch-free)."""

import json
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is no such file.

    Raises:
        CheckpointError: it is not JSON, or no object.
    """
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return document
