"""Modules whose parameters are gathered in hooks (FSDP2), while torch traces what is around them.

torch cannot trace these hooks, and breaks the graph at each. So they are taken from the modules, and Python runs them:
of a *closed* module around its forward, which is compiled by itself, as that of a layer. A module that computes the
logits is *open*: its forward is part of the graph around it, which may compute the loss without logits. The parameters
of an open one are gathered before the model's forward, and count as used until that returns.
"""

import contextlib
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from optimum_memopt.compat import hooks_around_call
from optimum_memopt.engines.compile.torch_compat import dynamo, fully_shard
from optimum_memopt.engines.compile.torch_compat.fake_tensors import with_attributes
from optimum_memopt.engines.compile.torch_compat.trace_fixes import kind_of
from optimum_memopt.engines.shared.forward_patch import weak_method


class ShardedModules:
    """Keeps no module alive.

    Args:
        closed: modules with a forward of their own, which the caller puts in place.
        opened: others.
    """

    def __init__(self, closed: Sequence[torch.nn.Module], opened: Sequence[torch.nn.Module]) -> None:
        self._closed = [weakref.ref(module) for module in closed]
        self._opened = [(weakref.ref(module), self._opened_forward(module)) for module in opened]
        # Of each module its hooks before and after the forward, and a closed one's around its backward, while they are
        # taken from it.
        self._taken: dict[torch.nn.Module, tuple[dict[int, Any], ...]] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Hooks are taken, and open modules are gathered."""
        opened = [(module, forward) for held, forward in self._opened if (module := held()) is not None]
        closed = [module for held in self._closed if (module := held()) is not None]
        for module, _ in opened:
            fully_shard.gather(module)
        try:
            for module in closed:
                self._taken[module] = _take(module, _ALL)
            for module, _ in opened:
                self._taken[module] = _take(module, _AROUND_FORWARD)
            with with_attributes((module, "forward", types.MethodType(forward, module)) for module, forward in opened):
                yield
        finally:
            for module, hooks in self._taken.items():
                _give_back(module, hooks)
            self._taken.clear()

    def run(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The forward of a closed module, between its hooks; of any other module the forward alone."""
        if module not in self._taken:
            return forward(*args, **kwargs)
        return self._hooked(module, (True,) * _ALL, forward, args, kwargs)

    @property
    def hooks(self) -> list[Callable[..., Any]]:
        """Those that are taken."""
        return [hook for taken in self._taken.values() for hooks in taken for hook in hooks.values()]

    def finish(self, outputs: Any) -> Any:
        """The model's outputs behind the hooks of its open modules."""
        opened = [module for held, _ in self._opened if (module := held()) in self._taken]
        for module in filter(None, opened):
            outputs = self._hooked(module, (False, True), functools.partial(_same, outputs), (), {})
        return outputs

    def _opened_forward(self, module: torch.nn.Module) -> types.FunctionType:
        """The forward of an open module, for torch to trace: its hooks before the forward are one operator."""
        held, run = weakref.ref(module), dynamo.untraced(weak_method(self._run_hooks))

        def hooks_before(given: torch.Tensor) -> torch.Tensor:
            module = held()
            assert module is not None
            if dynamo.Trace.current() is None:
                return run(module, given)
            ((given,), _) = fully_shard.with_cast_inputs(module, (given,), {})
            return given.view_as(given)

        operator = dynamo.as_operator(cast(types.FunctionType, hooks_before))

        def forward(module: torch.nn.Module, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return type(module).forward(module, operator(given), *args, **kwargs)

        return cast(types.FunctionType, forward)

    def _run_hooks(self, module: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
        (given,) = self._hooked(module, (True, False), lambda *given: given, (given,), {})
        return given

    def _hooked(
        self,
        module: torch.nn.Module,
        kinds: Sequence[bool],
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """A call of a module with this forward and the kinds of its hooks that are wanted."""
        inner, taken = module.__dict__.get("forward"), self._taken[module]
        _give_back(module, [hooks if wanted else {} for hooks, wanted in zip(taken, kinds, strict=True)])
        module.__dict__["forward"] = forward
        try:
            return module(*args, **kwargs)
        finally:
            # Hooks may remove themselves, and register others.
            left = zip(_take(module, len(kinds)), taken, kinds, strict=True)
            self._taken[module] = tuple(now if wanted else {**hooks, **now} for now, hooks, wanted in left)
            if inner is not None:
                module.__dict__["forward"] = inner


def _same(value: Any) -> Any:
    return value


# How many of the kinds of `hooks_around_call` are taken.
_AROUND_FORWARD, _ALL = 2, 4


def _take(module: torch.nn.Module, kinds: int) -> tuple[dict[int, Any], ...]:
    """Leave a module without hooks of the first kinds, and return them. Those that collect its outputs stay where they
    are the last: torch can trace them."""
    places = hooks_around_call(module)[:kinds]
    taken = tuple(map(_before_collectors, places))
    for place, hooks in zip(places, taken, strict=True):
        for number in hooks:
            del place[number]
    return taken


def _before_collectors(hooks: Mapping[int, Any]) -> dict[int, Any]:
    collectors = itertools.takewhile(lambda number: kind_of(hooks[number]) is not None, reversed(hooks))
    return dict(itertools.islice(hooks.items(), len(hooks) - len(list(collectors))))


def _give_back(module: torch.nn.Module, taken: Sequence[Mapping[int, Any]]) -> None:
    """Put hooks before those that have been registered since they were taken."""
    for place, hooks in zip(hooks_around_call(module), taken, strict=False):
        since = dict(place)
        place.clear()
        place.update({**hooks, **since})
