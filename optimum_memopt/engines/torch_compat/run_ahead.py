"""The module that puts images into a text runs ahead of the forward that calls it.

Its forward reads values, so torch cannot trace it. A graph break at its call would split the model's forward, and put
the logits and the loss into different frames. So the module runs first, on the arguments of its call, and the traced
forward gets these results at the call.

The code before the call then runs twice in each step. That is right only if it changes nothing: in a forward of
transformers that computes a loss from the module's results and stores into no object, inside PEFT's wrappers or none.
A forward of a script may count its calls, call the model twice, or call it without gradients; there the graph breaks.
"""

import dis
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from optimum_memopt.compat.torch import hooks_around_call
from optimum_memopt.engines.torch_compat.dynamo import file_of, global_hooks
from optimum_memopt.engines.torch_compat.fake_tensors import with_attributes
from optimum_memopt.generators import GeneratorStates

# Files of models; methods that all models inherit from other files compute losses and set up generation.
_MODELS = "transformers.models."
# Instructions that store into an object.
_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR"})


class _ReachedError(Exception):
    """Raised when a forward has called a given module."""


class RunAhead:
    """Runs a module ahead of the forward that calls it.

    Args:
        finders: modules that find the places of images in a text, inside the model.
    """

    def __init__(self, model: torch.nn.Module, finders: Sequence[torch.nn.Module]) -> None:
        calls = [
            (path, outer, module)
            for path, outer in model.named_modules()
            for module in outer.children()
            if module in finders and file_of(outer) is file_of(module)
        ]
        self._module: torch.nn.Module | None = None
        if len(calls) == len(finders) == 1:
            path, outer, module = calls[0]
            if _may_run_twice(model, path, outer):
                self._module = module
        inside = set() if self._module is None else set(self._module.modules())
        # Modules whose hooks would run twice. The model's own hooks run outside of its forward.
        self._others = [each for each in model.modules() if each is not model and each not in inside]
        # `recompiles.RUN_AHEAD` has this name.
        self.results_of_run_ahead: Any = None

    def is_for(self, module: torch.nn.Module) -> bool:
        """True for the module that runs ahead; with hooks on it or on modules outside of it, it runs at its call."""
        if module is not self._module or global_hooks():
            return False
        return not any(any(hooks_around_call(each)) for each in (module, *self._others))

    def forward(self) -> Callable[..., Any]:
        """Returns the stand-in for the module's forward, which returns the results of the run ahead."""

        def results(*args: Any, **kwargs: Any) -> Any:
            return self.results_of_run_ahead

        return results

    def run(self, forward: Callable[[], Any]) -> None:
        """Run a forward until it calls the module, and the module under the modes of that call.

        Args:
            forward: the model's own forward, with the arguments of the call to trace.
        """
        module = self._module
        if module is None or not self.is_for(module):
            return
        before = GeneratorStates.of(next((each.device for each in module.parameters()), None))
        reached_with: GeneratorStates | None = None

        def reached(*args: Any, **kwargs: Any) -> None:
            nonlocal reached_with
            reached_with = GeneratorStates.of(before.device) if before.changed() else None
            self.results_of_run_ahead = type(module).forward(module, *args, **kwargs)
            raise _ReachedError

        try:
            with with_attributes([(module, "forward", reached)]):
                forward()
        except _ReachedError:
            pass
        else:
            return
        if reached_with is not None:
            # The traced forward draws the numbers before the module again. Later ones are right if the module draws
            # none.
            if reached_with.changed():
                self._module = None
            before.restore()

    def forget(self) -> None:
        """Release the results."""
        self.results_of_run_ahead = None


def _may_run_twice(model: torch.nn.Module, path: str, outer: torch.nn.Module) -> bool:
    """True if a model's forward up to a call in the forward of one of its modules is that of libraries, and changes
    nothing.

    Args:
        path: path of that module, `outer`, in the model.
    """
    names = path.split(".") if path else []
    wrappers = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
    # The engine has replaced the forward of the model itself.
    are_replaced = any("forward" in vars(each) for each in (*wrappers, outer) if each is not model)
    is_of_libraries = _is_of(outer, "transformers") and all(_is_of(each, "peft") for each in wrappers)
    return is_of_libraries and not are_replaced and not any(_stores(type(outer), "forward", set()))


def _is_of(module: torch.nn.Module, library: str) -> bool:
    """True if a library defines the module's class; that of a script may have a forward of its own."""
    return type(module).__module__.partition(".")[0] == library


def _stores(kind: type, method: str, seen: set[str]) -> Iterator[bool]:
    """Yields True for each instruction that stores into an object, and for each in-place operator (`add_`), in a
    method and in the methods of the same class that it calls.

    Args:
        seen: names of the methods that were looked at; updated.
    """
    function = inspect.getattr_static(kind, method, None)
    function = inspect.unwrap(getattr(function, "__func__", function))
    is_of_model = isinstance(function, types.FunctionType) and function.__module__.startswith(_MODELS)
    if method in seen or not is_of_model:
        return
    seen.add(method)
    for code in _codes(function.__code__):
        yield any(instruction.opname in _STORES for instruction in dis.get_instructions(code))
        yield any(name.endswith("_") and not name.startswith("_") for name in code.co_names)
        for name in code.co_names:
            yield from _stores(kind, name, seen)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and the code objects nested in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)
