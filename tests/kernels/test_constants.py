"""Globals of kernels: Triton compares them with themselves before each compilation."""

import importlib
import pkgutil

import triton.language as tl

import tp3.kernels


def test_every_constant_equals_itself():
    names = [module.name for module in pkgutil.iter_modules(tp3.kernels.__path__)]
    found = {
        (name, key): value.value
        for name in names
        for key, value in vars(importlib.import_module(f"tp3.kernels.{name}")).items()
        if isinstance(value, tl.constexpr)
    }
    assert len(found) > 20
    assert {place for place, value in found.items() if value != value} == set()
