"""The embedded pair in larger shapes, written where workers read it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def widen(role: str, shape: str, folder: Path) -> Path:
    """Writes one of the embedded pair in a larger shape."""
    _finish(_start(role, shape, folder))
    return folder


def widen_pair(shapes: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """Writes target and draft in these two shapes, side by side."""
    target, draft = folder / "target", folder / "draft"
    for process in [_start("target", shapes[0], target), _start("draft", shapes[1], draft)]:
        _finish(process)
    return target, draft


def _start(role: str, shape: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "outrider.cli", "widen", role, shape, str(folder), "--check", "none"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)
