"""Caches of functions (`functools.lru_cache`) that are called on tensors without data."""

import contextlib
import functools
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_CACHE: Any = type(functools.lru_cache(int))
# Packages whose functions keep no tensors of models.
_WITHOUT_TENSORS = frozenset({"torch", "sympy", "mpmath", "triton", "numpy", *sys.stdlib_module_names})
# Objects that a cache holds beside its results: the function, its classes and files.
_NO_RESULTS = type, types.ModuleType, types.FunctionType, torch.nn.Module


@contextlib.contextmanager
def clean_caches(model: torch.nn.Module | None = None) -> Iterator[None]:
    """Empty the caches of `functools.lru_cache` that code has filled with fake tensors within the context, such as a
    table of frequencies: a later forward would get them.

    Args:
        model: its modules may hold such caches, too.
    """
    before = {id(cache): cache.cache_info().misses for cache in _caches(model)}
    try:
        yield
    finally:
        for cache in _caches(model):
            if cache.cache_info().misses > before.get(id(cache), 0) and _holds_fake(cache):
                cache.cache_clear()


def _caches(model: torch.nn.Module | None) -> Iterator[Any]:
    """Yields the cached functions and methods in a model's modules and in imported files, except the files of
    `_WITHOUT_TENSORS`."""
    for module in () if model is None else model.modules():
        yield from _caches_in(module, "")
    for name, file in list(sys.modules.items()):
        if name.partition(".")[0] not in _WITHOUT_TENSORS:
            yield from _caches_in(file, name)


def _caches_in(holder: object, file: str) -> Iterator[Any]:
    # Names of classes that this class defines begin with its own.
    inside = f"{holder.__qualname__}." if isinstance(holder, type) else ""
    for value in list(getattr(holder, "__dict__", {}).values()):
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(value, _CACHE):
            yield value
        elif isinstance(value, types.FunctionType):
            yield from _caches_of(value)
        elif isinstance(value, type) and value.__module__ == file and value.__qualname__.startswith(inside):
            yield from _caches_in(value, file)


def _caches_of(function: types.FunctionType) -> Iterator[Any]:
    """Yields the cached functions in a function's closure; a decorator may keep one there."""
    for cell in function.__closure__ or ():
        # A variable of the closure may not be set yet.
        with contextlib.suppress(ValueError):
            if isinstance(cell.cell_contents, _CACHE):
                yield cell.cell_contents


def _holds_fake(cache: object) -> bool:
    """True if a cached function has returned fake tensors, alone, in a container or as attributes of an object."""
    held = [cache]
    # A bounded cache links its results (`lru_list_elem` in CPython's `Modules/_functoolsmodule.c`).
    for _ in range(5):
        inside = (each for of in held for each in gc.get_referents(of))
        held = [each for each in inside if not isinstance(each, _NO_RESULTS)]
        if any(isinstance(each, FakeTensor) for each in held):
            return True
    return False
