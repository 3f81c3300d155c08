from __future__ import annotations

import importlib
import inspect

import outrider.ops


def test_every_operator_is_re_exported_under_its_own_name() -> None:
    assert outrider.ops.__all__ == sorted(outrider.ops.__all__)
    for name in outrider.ops.__all__:
        operator = getattr(outrider.ops, name)
        assert operator.__name__ == name
        assert operator.__module__.startswith("outrider.kernels.")
        home = importlib.import_module(operator.__module__)
        assert getattr(home, name) is operator


def test_every_operator_with_a_reference_is_exported() -> None:
    modules = ("coupled_sampling", "noise", "processors", "tree_attention", "verify_tree")
    with_reference = {
        name.removesuffix("_reference")
        for module in modules
        for name, _ in inspect.getmembers(importlib.import_module(f"outrider.kernels.{module}"), inspect.isfunction)
        if name.endswith("_reference")
    }
    assert with_reference and with_reference <= set(outrider.ops.__all__)
