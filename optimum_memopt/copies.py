"""Leaves this package's patches out of copies and pickles of models, Trainers and optimizers.

`copy`, `pickle` and spawned processes look up an object's class in `copyreg`. A class stays registered; objects
without patches are copied as before.
"""

import copyreg
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch

State = dict[str, Any]


class Patched(Protocol):
    """A function that replaces an attribute of an object; `mark` registers it.

    Attributes:
        name: the attribute's name.
        function: the replacement, bound or not.
        before: the replaced instance attribute; None if the instance had none.
    """

    name: str
    function: Callable[..., Any]
    before: Any


def mark(patched: Patched) -> None:
    patched.function.memopt_patched = patched  # type: ignore[attr-defined]


def patched_of(value: Any) -> Patched | None:
    """Returns the patch behind an attribute's value; None if it is no patch, or only a function that wraps one."""
    if not isinstance(value, types.FunctionType | types.MethodType):
        return None
    patched: Patched | None = getattr(value, "memopt_patched", None)
    # `functools.wraps` copies the mark.
    return patched if patched is not None and patched.function is getattr(value, "__func__", value) else None


_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if "hooks" in name)
# Ids of torch's hook handles, unique within a process.
_own_hooks: set[int] = set()


def add_hook(module: torch.nn.Module, kind: str, hook: Callable[..., Any], **options: Any) -> Callable[[], None]:
    """Register a hook that copies of the module leave out; returns a function that removes it.

    Args:
        kind: names the method `register_…_hook` of the module: `forward`, `forward_pre`, `full_backward`.
    """
    handle = getattr(module, f"register_{kind}_hook")(hook, **options)
    _own_hooks.add(handle.id)
    leave_out_of_copies(module)

    def remove() -> None:
        handle.remove()
        _own_hooks.discard(handle.id)

    return remove


def leave_out_of_copies(owner: Any, further: Callable[[State], State] = dict) -> None:
    """Leave patches and hooks of `add_hook` out of copies of all objects of this object's class.

    Args:
        further: takes an object's attributes and leaves out more of them; the same for all objects of a class.
    """
    kind = type(owner)
    known = copyreg.dispatch_table.get(kind)
    if not isinstance(known, _Reduction):
        copyreg.pickle(kind, _Reduction(known, further))


class _Reduction:
    """Reduces an object as `__reduce_ex__` does, without the patches among its attributes."""

    def __init__(self, known: Callable[[Any], Any] | None, further: Callable[[State], State]) -> None:
        self._known, self._further = known, further

    def __call__(self, value: Any) -> Any:
        reduced = value.__reduce_ex__(4) if self._known is None else self._known(value)
        # Other objects, such as torch.fx's GraphModule, rebuild themselves.
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        return *reduced[:2], self._further(_without_patches(reduced[2])), *reduced[3:]


def _without_patches(state: State) -> State:
    plain = {}
    for name, value in state.items():
        if (patched := patched_of(value)) is not None and patched.name == name:
            value = patched.before
            if value is None:
                continue
        elif name in _HOOKS and not _own_hooks.isdisjoint(value):
            value = type(value)((id, hook) for id, hook in value.items() if id not in _own_hooks)
        plain[name] = value
    return plain
