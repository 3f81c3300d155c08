"""The embedded pair in larger shapes, written where workers read it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# A channel more than the embedded target's 384 is needed, and a multiple of the heads.
_NARROW_HIDDEN, _NARROW_HEADS = 512, 4
_SHARD_BYTES = 1 << 30


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


def narrow_target(draft: Path, folder: Path) -> Path:
    """The embedded target with as many entries of the vocabulary as a draft has; where it has fewer, little wider."""
    import torch

    from outrider.models import embedded_target_path
    from outrider.models.widen import load_small, plan_checkpoint, write_checkpoint
    from outrider.models.widened_weights import LlamaShape, WidenedLlama

    config, weights = load_small(embedded_target_path())
    vocab = json.loads((draft / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    if vocab == config["vocab_size"]:
        return embedded_target_path()
    shape = replace(LlamaShape.of(config), hidden=_NARROW_HIDDEN, heads=_NARROW_HEADS, vocab=vocab)
    model = WidenedLlama(config, weights, shape, dtype=torch.bfloat16, fill_seed=0)
    plan = plan_checkpoint(model, embedded_target_path(), max_shard_bytes=_SHARD_BYTES)
    write_checkpoint(
        model, embedded_target_path(), folder, plan, before_publishing=lambda _: None, on_written=lambda _: None
    )
    return folder


def _start(role: str, shape: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "outrider.cli", "widen", role, shape, str(folder), "--check", "none"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)
