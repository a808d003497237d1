"""Regions: the layers of a model that are equal, each group compiled once. Its forward is one operator of the graph
around the layers.

Parameters are inputs of a graph, so that one trace serves all layers of a group. Hooks of a layer, and activation
checkpointing around it, stay outside. Regional compilation by hand: https://docs.pytorch.org/tutorials/recipes/
regional_compilation.html, `compile_regions` in accelerate's `utils/other.py` (1.15).

torch cannot trace the hooks in which parameters are gathered (FSDP2), and breaks the graph at each. So they are taken
from the modules while torch traces what is around them, and Python runs them: those of a layer around its forward. A
module that computes the logits is *open*: its forward is part of the graph around layers, which may compute the loss
without logits. The parameters of an open one are gathered before the model's forward, and count as used until that
returns.
"""

import contextlib
import functools
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from optimum_memopt.compat.deepspeed import full_shape
from optimum_memopt.compat.torch import hooks_around_call, hooks_around_forward, writes_to
from optimum_memopt.compat.transformers import embeddings
from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.compile.torch_compat import autograd, dynamo, fully_shard, trace_fixes, traced_sizes
from optimum_memopt.engines.compile.torch_compat.fake_tensors import (
    DESCRIBED,
    attribute_set_by,
    described,
    replaced,
    with_attributes,
    without_launches,
)
from optimum_memopt.engines.shared.forward_patch import weak_method
from optimum_memopt.engines.shared.function_state import variables_around
from optimum_memopt.errors import UnsupportedModelError
from optimum_memopt.generators import preserved_generators

# Layers of one class and structure, by their paths in the model, in order.
LayerGroup = Mapping[str, torch.nn.Module]


def layer_groups(model: torch.nn.Module) -> tuple[LayerGroup, ...]:
    """The layers of a model that are equal to another one in the same `ModuleList`, in the order of the modules.

    A list in an item of a list is part of that item: the experts of a layer are no layers. Left out are single
    operators, which are cheaper compiled with what is around them, and layers whose forward somebody has replaced.
    """
    groups: list[LayerGroup] = []
    inside: set[torch.nn.Module] = set()
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or module in inside:
            continue
        kinds: dict[Hashable, dict[str, torch.nn.Module]] = {}
        for name, layer in module.named_children():
            is_called = not isinstance(layer, torch.nn.ModuleList | torch.nn.ModuleDict)
            if is_called and next(layer.children(), None) is not None and "forward" not in vars(layer):
                kinds.setdefault(_structure(layer), {})[f"{path}.{name}" if path else name] = layer
        for layers in kinds.values():
            if len(layers) > 1:
                groups.append(layers)
                inside.update(inner for layer in layers.values() for inner in layer.modules())
    return tuple(groups)


# Fewer equal layers are traced about as fast in one graph.
_ENOUGH = 4
# Graphs of one group: more are so many that the group is none, as where each layer has a number that differs.
_MOST_GRAPHS = 3


def regions_of(model: torch.nn.Module, unit: str) -> tuple[LayerGroup, ...]:
    """The groups that are compiled by themselves where `unit` is one of `options.UNITS`: layers, and modules whose
    parameters are gathered in hooks.

    Raises:
        UnsupportedModelError: layers are asked for, and no two of them are equal.
    """
    groups = () if unit == MODEL else layer_groups(model)
    if unit == LAYER and not groups:
        raise UnsupportedModelError(
            f"--memory_opt_unit layer: no list of modules in {type(model).__name__} has two equal ones",
            "leave the flag out",
        )
    sharded = () if unit == MODEL else _sharded_modules(model, groups)
    # Where hooks gather parameters, each would break the graph of the whole.
    is_hooked = unit != MODEL and fully_shard.is_sharded(model)
    is_worth_it = unit == LAYER or is_hooked or any(len(group) >= _ENOUGH for group in groups)
    return (*groups, *sharded) if is_worth_it else ()


def _sharded_modules(model: torch.nn.Module, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Each module by itself that FSDP2 has sharded by itself, less layers, what is in them and around them, and what
    is open."""
    layers = [path for group in groups for path in group]
    opened = opened_modules(model)
    return tuple(
        {path: model.get_submodule(path)}
        for paths in fully_shard.sharded_groups(model)
        for path in paths
        if path not in opened and not any(_contains(path, layer) or _contains(layer, path) for layer in layers)
    )


def opened_modules(model: torch.nn.Module) -> LayerGroup:
    """The modules that FSDP2 gathers with the one that computes the logits, by their paths."""
    computes_logits = embeddings(model, "output")
    groups = ({path: model.get_submodule(path) for path in paths} for paths in fully_shard.sharded_groups(model))
    return next((modules for modules in groups if computes_logits in modules.values()), {})


def _contains(path: str, inner: str) -> bool:
    return inner == path or inner.startswith(f"{path}.")


def _structure(layer: torch.nn.Module) -> Hashable:
    """Equal for layers of one class with the same modules and the same shapes of parameters."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    kinds = tuple((name, type(module)) for name, module in layer.named_modules())
    return kinds, tuple((name, full_shape(tensor), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)


class ResultsChangedError(RuntimeError):
    """A layer's outputs no longer match what its caller was traced with."""


@dataclass(eq=False)
class Region:
    """A group of equal layers that is compiled once.

    Attributes:
        name: the class of its layers.
        layers: held weakly.
        constants: numbers and sizes that all layers are given, as far as they were traced; see `_constants`.
        graphs: traced in this call.
    """

    name: str
    layers: list["weakref.ref[torch.nn.Module]"]
    constants: Sequence[list[int | None]] = ()
    graphs: int = 0


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer of a region.

    Attributes:
        path: in the model.
        forward: compiled, of which the first argument is the layer.
        hooks: around the modules in it: they are called while it runs, and write to what is traced before that.
    """

    path: str
    held: "weakref.ref[torch.nn.Module]"
    region: Region
    forward: Callable[..., Any]
    hooks: Sequence[Mapping[int, Any]]

    @property
    def module(self) -> torch.nn.Module:
        module = self.held()
        assert module is not None
        return module

    @property
    def collected_kinds(self) -> set[str | None]:
        """The kinds of output that hooks in it collect; None among them: one is no such hook."""
        if not any(self.hooks):
            return set()
        return {trace_fixes.kind_of(hook) for hooks in self.hooks for hook in hooks.values()}


class Regions:
    """The forwards of a model's layers while its training forward runs. It keeps no module alive: torch keeps what
    was compiled until the process ends.

    Args:
        compiled: compiles a forward, of which the first argument is the layer.
        opened: open modules.
        only_layers: nothing is traced around the layers, so that hooks stay where they are.

    Attributes:
        all: one for each group.
        has_checkpointed: a layer has run in plain PyTorch, under the user's own checkpoint.
        has_run_others: the same, or hooks have run around a layer.
        refusal: why layers cannot be compiled by themselves; empty: they can, as far as is known.
    """

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
        opened: Sequence[torch.nn.Module] = (),
        only_layers: bool = False,
    ) -> None:
        self.all: list[Region] = []
        self.refusal = ""
        self.has_checkpointed = self.has_run_others = False
        # That the whole forward runs in.
        self._checkpoint: object = None
        self._only_layers = only_layers
        # The layer whose forward runs.
        self._running: _Layer | None = None
        # While dynamo traces what is around layers: their results on fake tensors, by what they are given, and those
        # of their attributes that these depend on.
        self._results: dict[Hashable, Any] = {}
        self._attributes: dict[Region, dict[torch.nn.Module, Hashable]] = {}
        # The results that it was traced with, by the trace, the layer, and the kinds of the layer's arguments.
        self._traced_results: dict[Hashable, set[_TracedResults]] = {}
        self._trace: Hashable = None
        self._forwards: list[tuple[_Layer, Callable[..., Any]]] = []
        self._opened = [(weakref.ref(module), self._opened_forward(module)) for module in opened]
        # The hooks of each module before and after the forward, and of a layer around its backward, while they are
        # taken from it.
        self._taken: dict[torch.nn.Module, tuple[dict[int, Any], ...]] = {}
        for group in groups:
            region = Region(type(next(iter(group.values()))).__name__, list(map(weakref.ref, group.values())))
            self.all.append(region)
            forward = compiled(dynamo.own_forward())
            forward = forward if only_layers else trace_fixes.without_collecting(forward)
            for (path, module), held in zip(group.items(), region.layers, strict=True):
                inner = () if only_layers else (each for each in module.modules() if each is not module)
                hooks = [hooks for each in inner for hooks in hooks_around_forward(each)]
                layer = _Layer(path, held, region, forward, hooks)
                self._forwards.append((layer, dynamo.as_operator(self._forward_of(layer))))

    @property
    def are_closed(self) -> bool:
        """True where layers are compiled by themselves: no hook in one may write to what is outside of them, which is
        traced before they run, and none of all modules would be called around a layer and in it."""
        if not self.all or any(None in layer.collected_kinds for layer, _ in self._forwards):
            return False
        return self._only_layers or not dynamo.global_hooks()

    @property
    def are_replaced(self) -> bool:
        """True where a layer has a forward of its own by now, which is none of the group's."""
        modules = (held() for region in self.all for held in region.layers)
        return any(module is not None and "forward" in vars(module) for module in modules)

    @property
    def layer(self) -> str:
        """Path of the layer whose forward runs; empty: none does."""
        return "" if self._running is None else self._running.path

    def note_graph(self, watch: dynamo.Watch) -> str:
        """Note that a graph was traced in the first call, which `watch` is of; a line where the current group has too
        many."""
        if self._running is None:
            return ""
        region = self._running.region
        region.graphs += 1
        if region.graphs <= _MOST_GRAPHS:
            return ""
        cause = watch.last_cause()
        return f"more than {_MOST_GRAPHS} graphs for {region.name}{f'; {cause}' if cause else ''}"

    @property
    def layers_at_once(self) -> int:
        """Number of the layers in the current group; of all, outside of layers; 1 in a forward that is one graph."""
        if not self.are_closed:
            return 1
        regions = self.all if self._running is None else [self._running.region]
        return sum(len(region.layers) for region in regions)

    @contextlib.contextmanager
    def in_place(self, trace: Hashable) -> Iterator[None]:
        """The layers' forwards are those of the regions, hooks are taken, and open modules are gathered.

        Args:
            trace: what is around the layers runs as it was traced within the same one.
        """
        self._trace, self._checkpoint = trace, autograd.checkpoint()
        for region in self.all:
            region.graphs = 0
        layers = [(module, forward) for layer, forward in self._forwards if (module := layer.held()) is not None]
        opened = [(module, forward) for held, forward in self._opened if (module := held()) is not None]
        for module, _ in opened:
            fully_shard.gather(module)
        forwards = (*layers, *((module, types.MethodType(forward, module)) for module, forward in opened))
        try:
            for module, _ in () if self._only_layers else layers:
                self._taken[module] = _take(module, _ALL)
            for module, _ in opened:
                self._taken[module] = _take(module, _AROUND_FORWARD)
            with with_attributes((module, "forward", forward) for module, forward in forwards):
                yield
        finally:
            for module, hooks in self._taken.items():
                _give_back(module, hooks)
            self._checkpoint = None
            for held in (self._taken, self._results, self._attributes):
                held.clear()

    def _run(self, layer: _Layer, *args: Any, **kwargs: Any) -> Any:
        before, self._running = self._running, layer
        values = dynamo.tree_leaves((args, kwargs))
        numbers = []
        for value, constants in zip(values, layer.region.constants, strict=False):
            if isinstance(value, torch.Tensor):
                traced_sizes.mark_static(value, [dim for dim, size in enumerate(constants) if size is not None])
            elif type(value) is int:
                numbers.append(next(iter(constants), None))
        try:
            with traced_sizes.constant_numbers() if numbers and None not in numbers else contextlib.nullcontext():
                module = layer.module
                forward = functools.partial(layer.forward, module)
                if (checkpoint := autograd.checkpoint()) is not None and checkpoint is not self._checkpoint:
                    # It runs the layer's own forward again.
                    self.has_checkpointed = self.has_run_others = True
                    forward = functools.partial(type(module).forward, module)
                if self._has_hooks(module):
                    self.has_run_others = True
                    results = self._hooked(module, (True,) * _ALL, forward, args, kwargs)
                else:
                    results = forward(*args, **kwargs)
        finally:
            self._running = before
        traced = self._traced_results.get(self._call_key(layer, values))
        if traced is not None:
            returned = dynamo.tree_leaves(results)
            if not any(each.match(returned, values) for each in traced):
                raise ResultsChangedError(
                    f"{layer.path} returns something else than the layers that are equal to it, or than it did before"
                )
        return results

    def forget_results(self) -> None:
        """Compare what layers return with later traces alone."""
        self._traced_results.clear()

    def _call_key(self, layer: _Layer, given: Sequence[Any]) -> Hashable:
        return self._trace, layer, tuple(map(_kind, given))

    def check_graph(self, graph: fx.Graph) -> None:
        """Raise RuntimeError where what is traced around the layers registers a hook on a tensor: a piece of the graph
        that returns what it was given, with a hook on it, is passed by in the backward."""
        if any(map(dynamo.registers_hook, graph.nodes)):
            raise self._refused("a hook is registered on a tensor between layers")

    def check_around(self, trace: dynamo.Trace) -> None:
        """Raise RuntimeError where what is traced around the layers writes to something that a hook of a layer has, as
        to a list that all hooks append to: what the hook writes there while the graph runs would be lost."""
        hooks = (hook for taken in self._taken.values() for hooks in taken for hook in hooks.values())
        if trace.changes(held for hook in hooks for held in _held(hook)):
            raise self._refused("hooks of layers, and what runs around these, write to the same object")

    def finish(self, outputs: Any) -> Any:
        """The model's outputs behind the hooks of its open modules; within `in_place`."""
        for held, _ in self._opened:
            if (module := held()) is not None and module in self._taken:
                outputs = self._hooked(module, (False, True), lambda outputs=outputs: outputs, (), {})
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

    def _has_hooks(self, module: torch.nn.Module) -> bool:
        """True where a call of the module is more than its forward. While layers are closed no hook is of all."""
        return module in self._taken and any(itertools.chain(self._taken[module], hooks_around_call(module)))

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

    def _forward_of(self, layer: _Layer) -> types.FunctionType:
        """The forward of a layer: its region, or its results on fake tensors where dynamo traces what is around it."""
        run = dynamo.untraced(functools.partial(self._run, layer))

        def layer_region(*args: Any, **kwargs: Any) -> Any:
            if (kinds := layer.collected_kinds) and (collected := kinds & trace_fixes.collected_kinds()):
                raise self._refused(f"{', '.join(sorted(map(str, collected)))} are collected in {layer.region.name}")
            trace = dynamo.Trace.current()
            if trace is None:
                return run(*args, **kwargs)
            results = self._traced(layer.module, layer.region, trace, args, kwargs)
            given = dynamo.tree_leaves((args, kwargs))
            traced = self._traced_results.setdefault(self._call_key(layer, given), set())
            traced.add(_TracedResults.of(dynamo.tree_leaves(results), given))
            return results

        # torch guards on functions by their code: with one for all, layers that change places run in their old ones.
        return cast(types.FunctionType, dynamo.with_own_code(layer_region))

    def _refused(self, why: str) -> RuntimeError:
        self.refusal = why
        return RuntimeError(why)

    def _traced(
        self, layer: torch.nn.Module, region: Region, trace: dynamo.Trace, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """The results of a layer on fake tensors: of equal layers that are given the same, copies of the first's.

        Raises:
            RuntimeError: what runs around the layer would not see what the layer sets, or the other way round.
        """
        if trace.changes(_state(layer)):
            raise self._refused(f"attributes of {region.name} are set around it")
        given, structure = dynamo.tree_flatten((args, kwargs))
        constants = list(map(_constants, given))
        region.constants = list(map(_common, constants, region.constants or constants))
        known = all(isinstance(value, DESCRIBED) for value in given)
        if region not in self._attributes:
            alive = [each for held in region.layers if (each := held()) is not None]
            self._attributes[region] = _relevant_attributes(alive)
        way = region, self._attributes[region].get(layer), str(structure), id(trace.context), torch.is_grad_enabled()
        if known and (equal := self._results.get((*way, tuple(map(described, given))))) is not None:
            return dynamo.tree_map_only(torch.Tensor, torch.clone, equal)
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        before = list(map(writes_to, tensors))
        cast_args, cast_kwargs = fully_shard.with_cast_inputs(layer, args, kwargs)
        # Its code runs here, and draws Python's and NumPy's random numbers.
        fakes = functools.partial(trace.fakes, dtype=fully_shard.gathered_dtype(layer))
        with preserved_generators(), replaced([layer], fakes), trace.with_fake_states(layer), without_launches():
            forward = functools.partial(type(layer).forward, layer, *cast_args, **cast_kwargs)
            results, name = attribute_set_by(forward, layer)
        if name:
            raise self._refused(f"the forward of {region.name} sets {name}")
        if list(map(writes_to, tensors)) != before:
            # What the layer before it has saved of that is no longer there.
            raise self._refused(f"the forward of {region.name} writes to what it is given")
        results = fully_shard.with_cast_outputs(layer, results)
        inputs = set(map(dynamo.storage_id, tensors))
        values = dynamo.tree_leaves(results)
        is_new = all(dynamo.storage_id(value) not in inputs for value in values if isinstance(value, torch.Tensor))
        if known and is_new and all(isinstance(value, DESCRIBED) for value in values):
            # Sizes that the layer has found to be the same are one symbol for the layers behind it.
            self._results[(*way, tuple(map(described, given)))] = results
        return results


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
    collectors = itertools.takewhile(lambda number: trace_fixes.kind_of(hooks[number]) is not None, reversed(hooks))
    return dict(itertools.islice(hooks.items(), len(hooks) - len(list(collectors))))


def _give_back(module: torch.nn.Module, taken: Sequence[Mapping[int, Any]]) -> None:
    """Put hooks before those that have been registered since they were taken."""
    for place, hooks in zip(hooks_around_call(module), taken, strict=False):
        since = dict(place)
        place.clear()
        place.update({**hooks, **since})


def _state(layer: torch.nn.Module) -> Iterator[object]:
    """A layer's modules, and all that these hold."""
    for module in layer.modules():
        yield from (module, *vars(module).values())


def _held(function: Any) -> Iterator[object]:
    """The objects that a function may write to: of its closure, its arguments, its object, and the names that it
    has in common with its module."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *_held(function.func))
        return
    if not isinstance(function, types.FunctionType):
        owner = getattr(function, "__self__", function)
        yield from (owner, *getattr(owner, "__dict__", {}).values())
        function = getattr(function, "__func__", None)
    if isinstance(function, types.FunctionType):
        yield from variables_around(function).values()
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _constants(value: Any) -> list[int | None]:
    """The sizes of a tensor, or a number; None for each that is a symbol where dynamo traces what is around layers."""
    return list(map(traced_sizes.constant, [value] if isinstance(value, int | torch.SymInt) else _sizes(value)))


def _common(one: list[int | None], other: list[int | None]) -> list[int | None]:
    """The constants that two layers are both given."""
    if len(one) != len(other):
        return []
    return [constant if constant == of_other else None for constant, of_other in zip(one, other, strict=True)]


def _kind(value: Any) -> Hashable:
    """The properties of a value that autograd and the operators of a trace depend on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.requires_grad
    kind: type = int if isinstance(value, torch.SymInt) else type(value)
    return kind


@dataclass(frozen=True)
class _TracedResults:
    """The results of a layer in a trace of what is around it.

    Attributes:
        kinds: of each value, see `_kind`.
        sizes: of each tensor: a constant, or the argument and its dimension of the same size (None: neither).
    """

    kinds: tuple[Hashable, ...]
    sizes: tuple[tuple[int | tuple[int, int] | None, ...], ...]

    @classmethod
    def of(cls, results: Sequence[Any], given: Sequence[Any]) -> "_TracedResults":
        arguments: dict[str, tuple[int, int]] = {}
        for at, value in enumerate(given):
            for dim, size in enumerate(_sizes(value)):
                arguments.setdefault(str(size), (at, dim))

        def traced(size: "int | torch.SymInt") -> int | tuple[int, int] | None:
            return arguments.get(str(size)) if (constant := traced_sizes.constant(size)) is None else constant

        return cls(tuple(map(_kind, results)), tuple(tuple(map(traced, _sizes(value))) for value in results))

    def match(self, results: Sequence[Any], given: Sequence[Any]) -> bool:
        """True where the results of a run with these arguments are as they were traced."""

        def is_same(traced: int | tuple[int, int] | None, size: int) -> bool:
            if isinstance(traced, tuple):
                argument, dim = traced
                return bool(size == given[argument].shape[dim])
            return traced is None or size == traced

        return self.kinds == tuple(map(_kind, results)) and all(
            all(map(is_same, traced, _sizes(result))) for traced, result in zip(self.sizes, results, strict=True)
        )


def _sizes(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else ()


def _relevant_attributes(layers: Sequence[torch.nn.Module]) -> dict[torch.nn.Module, Hashable]:
    """Those attributes of each layer that its results on fake tensors depend on: tensors without data, numbers and
    names.

    Left out are whole numbers that no two layers share, the places of layers in the model: nearly no forward asks for
    them, and each layer would be run on fake tensors by itself.
    """
    known = {layer: dict(_attributes(layer)) for layer in layers}
    counts = Counter(item for values in known.values() for item in values.items())
    shared = {name for (name, (kind, *_)), count in counts.items() if count > 1 or kind is not int}
    return {
        layer: frozenset((name, value) for name, value in values.items() if name in shared)
        for layer, values in known.items()
    }


def _attributes(layer: torch.nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Attributes of the modules in a layer, by path and name."""
    for path, module in layer.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, value in (*tensors, *vars(module).items()):
            if isinstance(value, DESCRIBED):
                yield (path, name), described(value)


def around_regions(module: fx.GraphModule) -> fx.GraphModule:
    """A traced graph as a graph of modules: what is before, between and behind the layers, and each layer's call."""
    numbers: dict[fx.Node, int] = {}
    number = 0
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if dynamo.is_operator_of_python(node):
            number += 1
            numbers[node] = number
            number += 1
        elif (of := _picked_of(node)) is not None:
            numbers[node] = numbers[of]
        else:
            numbers[node] = number
    return dynamo.split(module, numbers.__getitem__)


def _picked_of(node: fx.Node) -> fx.Node | None:
    """The layer of several results of which the node is one. A part of a single result is computed behind it."""
    of = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
    if not isinstance(of, fx.Node) or not dynamo.is_operator_of_python(of):
        return None
    return None if isinstance(dynamo.traced_value(of), torch.Tensor) else of
