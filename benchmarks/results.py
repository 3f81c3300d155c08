"""The provenance in every benchmark's results file, and how that file is written."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the command, the commit and the versions that figures were taken with."""
    return {
        "command": shlex.join(["python", f"benchmarks/{script}", *arguments]),
        "commit": commit(),
        "versions": {name: version(name) for name in ("torch", "grpcio")} | {"python": platform.python_version()},
    }


def commit() -> str:
    """Return the measured commit: $COMMIT where the checkout has no history, else what git says."""
    given = os.environ.get("COMMIT")
    if given:
        return given
    root = Path(__file__).resolve().parents[1]
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, timeout=10, check=False
    )
    return found.stdout.strip() or "unknown"


def write(document: Mapping[str, Any], path: Path | None) -> None:
    """Write a document whole or not at all, for a run may be killed at any time; without a path to standard output."""
    text = json.dumps(document, indent=2, default=str) + "\n"
    if path is None:
        sys.stdout.write(text)
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
