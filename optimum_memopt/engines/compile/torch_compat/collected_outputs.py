"""Hidden states, attentions and others that transformers collects while a forward runs, by hooks on the modules that
return them (`transformers/utils/output_capturing.py`, 5.23).

It puts all hooks of a model in the first forward that is asked for one kind, and leaves them there; a hook of another
kind does nothing. LLaVA and the models like it ask for the hidden states of their vision tower in each forward.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from optimum_memopt.engines.compile.torch_compat.dynamo import Trace, untraced

_FILE = "transformers.utils.output_capturing"
_HOOK = "output_capturing_hook"
_COLLECTOR = "_active_collector"
_PUTS_HOOKS = "maybe_install_capturing_hooks"
_HAS_HOOKS = "_output_capturing_hooks_installed"


class HooksPutError(Exception):
    """A forward has put hooks on modules that collect what these return."""


class _Collector:
    """The outputs that the running forward collects, by their kinds.

    It stands for a `ContextVar`, which torch does not trace: transformers' own class is a global while torch traces
    and none where Python runs, so that nothing is collected from a traced module in one that is not.
    """

    collected: dict[str, Any] | None = None

    def get(self) -> dict[str, Any] | None:
        return self.collected

    def set(self, value: dict[str, Any] | None) -> tuple[dict[str, Any] | None]:
        before, self.collected = self.collected, value
        return (before,)

    def reset(self, token: tuple[dict[str, Any] | None]) -> None:
        (self.collected,) = token


# torch guards on it: each forward has the same.
_collector = _Collector()


def kind_of(hook: Any) -> str | None:
    """The kind of output that a hook of a module collects; None: it is not transformers'."""
    code = getattr(hook, "__code__", None)
    if code is None or code.co_name != _HOOK or "key" not in code.co_freevars:
        return None
    kind: str = hook.__closure__[code.co_freevars.index("key")].cell_contents
    return kind


def collected_kinds() -> frozenset[str]:
    """The kinds that are collected where a module is called, traced or not; within `around_call`."""
    traced = Trace.keys_set_to(_collector, "collected") if Trace.current() is not None else None
    return frozenset(_collector.collected or ()) if traced is None else traced


def without_collecting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in which hooks collect nothing."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, _collector.collected = _collector.collected, None
        try:
            return forward(*args, **kwargs)
        finally:
            _collector.collected = before

    return run


@contextlib.contextmanager
def around_call(stops_at_hooks: bool) -> Iterator[None]:
    """Within it transformers' hooks are such that torch can trace them.

    Args:
        stops_at_hooks: a forward that puts hooks ends in `HooksPutError` there, before more of it is compiled.
    """
    file: Any = sys.modules.get(_FILE)
    if not all(hasattr(file, name) for name in (_COLLECTOR, _PUTS_HOOKS)):
        yield
        return
    puts = getattr(file, _PUTS_HOOKS)

    @untraced
    def stopped(model: torch.nn.Module) -> None:
        puts(model)
        if stops_at_hooks:
            raise HooksPutError

    def put(model: torch.nn.Module) -> None:
        if not getattr(model, _HAS_HOOKS, False):
            stopped(model)

    _collector.collected = getattr(file, _COLLECTOR).get()
    with mock.patch.object(file, _COLLECTOR, _collector), mock.patch.object(file, _PUTS_HOOKS, put):
        yield
