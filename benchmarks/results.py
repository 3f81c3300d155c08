"""Provenance, machine and CPU time for results files, and how these are written."""

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


def machine(device: str) -> dict[str, Any]:
    """Return the machine that figures are taken on; its GPUs unless the device is cpu."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "processor": _processor()}
    if device != "cpu":
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        found["gpus"] = asked.stdout.splitlines()
    return found


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    for line in described.read_text(encoding="utf-8").splitlines() if described.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process's threads, without its children's; 0 where there is no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write(document: Mapping[str, Any], path: Path | None) -> None:
    """Write a document whole or not at all, for a run may be killed at any time; without a path to standard output."""
    text = json.dumps(document, indent=2, default=str) + "\n"
    if path is None:
        sys.stdout.write(text)
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
