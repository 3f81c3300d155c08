"""Recipes as modules of a test: they find their neighbours as scripts do."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def import_train(monkeypatch: pytest.MonkeyPatch, *folders: str) -> Iterator[Any]:
    """Yield the `train` module of the last of these folders; afterwards no recipe's module is imported any more."""
    for folder in folders:
        monkeypatch.syspath_prepend(str(RECIPES / folder))
    before = set(sys.modules)
    yield importlib.import_module("train")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(RECIPES)):
            del sys.modules[name]
