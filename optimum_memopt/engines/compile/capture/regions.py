"""Regions: groups of equal layers, each group compiled once. A layer's forward is one operator of the graph around the
layers, the outer graph.

Parameters are inputs of a graph, so that one trace serves all layers of a group. Hooks of a layer, and activation
checkpointing around it, stay outside. Regional compilation by hand: https://docs.pytorch.org/tutorials/recipes/
regional_compilation.html, `compile_regions` in accelerate's `utils/other.py` (1.15).

torch cannot trace the hooks in which FSDP2 gathers parameters, and breaks the graph at each. So hooks are removed from
the modules while torch traces the outer graph, and a layer's hooks run in Python, around its forward. The head is
*open*: its forward, which computes the logits, is part of the outer graph, so that the loss may need no logits. The
parameters of an open module are gathered before the model's forward, and count as used until it returns.
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

from optimum_memopt.compat.torch import hooks_around_call, hooks_around_forward, writes_to
from optimum_memopt.engines.compile.capture.layer_groups import LayerGroup, contents_of
from optimum_memopt.engines.shared.forward_patch import weak_method
from optimum_memopt.engines.shared.function_state import variables_around
from optimum_memopt.engines.torch_compat import autograd, dynamo, fully_shard, trace_fixes, traced_sizes
from optimum_memopt.engines.torch_compat.fake_tensors import (
    DESCRIBED,
    attribute_set_by,
    described,
    recorded_reads,
    replaced,
    said_to_compile,
    with_attributes,
    without_launches,
)
from optimum_memopt.engines.torch_compat.function_caches import clean_caches
from optimum_memopt.generators import preserved_generators

# The most graphs of one group. With more, the group is no region, as when a number differs in each layer.
_MOST_GRAPHS = 3
_CHANGES_CONTAINER = "changes a list or dict that it is given"


class ResultsChangedError(RuntimeError):
    """A layer's outputs no longer match what its caller was traced with."""


@dataclass(eq=False)
class Region:
    """A group of equal layers that is compiled once.

    Attributes:
        name: the class of its layers.
        layers: weak references to the layers.
        constants: numbers and sizes that all layers traced so far get as arguments; see `_constants`.
        constant_dims: for each of these arguments, its dimensions of constant size.
        graphs: number of graphs traced in this call.
    """

    name: str
    layers: list["weakref.ref[torch.nn.Module]"]
    constants: Sequence[list[int | None]] = ()
    constant_dims: Sequence[tuple[int, ...]] = ()
    graphs: int = 0

    def note_arguments(self, given: Sequence[Any]) -> None:
        """Keep the constants that these arguments of a layer have, too."""
        constants = list(map(_constants, given))
        self.constants = list(map(_common, constants, self.constants or constants))
        self.constant_dims = [
            tuple(dim for dim, size in enumerate(sizes) if size is not None) for sizes in self.constants
        ]


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer of a region.

    Attributes:
        path: path in the model.
        held: weak reference to the layer.
        forward: the compiled forward; its first argument is the layer.
        hooks: forward hooks of the modules inside the layer. They run when the outer graph is already traced, so it
            does not see what they write.
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
        """Returns the kinds of output that hooks inside the layer collect; None stands for any other hook."""
        if not any(self.hooks):
            return set()
        return {trace_fixes.kind_of(hook) for hooks in self.hooks for hook in hooks.values()}


class Regions:
    """Replaces the forwards of a model's layers by compiled ones while its training forward runs.

    It keeps no module alive, since torch keeps compiled code until the process ends.

    Args:
        compiled: compiles a forward whose first argument is the layer.
        opened: open modules.
        only_layers: nothing is traced around the layers, so that hooks stay in place.

    Attributes:
        all: one region for each group.
        has_checkpointed: a layer has run in plain PyTorch, under the user's own checkpoint.
        has_run_others: a layer has run under the user's checkpoint, or with hooks around it.
        refusal: why layers cannot be compiled separately; empty if no reason is known.
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
        # The checkpoint that the whole forward runs in, if any.
        self._checkpoint: object = None
        self._only_layers = only_layers
        # The layer whose forward is running.
        self._running: _Layer | None = None
        # While dynamo traces the outer graph: results of layers on fake tensors, by their arguments, and the
        # attributes of layers that these results depend on.
        self._results: dict[Hashable, Any] = {}
        self._attributes: dict[Region, dict[torch.nn.Module, Hashable]] = {}
        # The layer results that the outer graph was traced with: by trace, then by layer and kinds of its arguments.
        self._all_traced_results: dict[Hashable, dict[Hashable, set[_TracedResults]]] = {}
        self._traced_results: dict[Hashable, set[_TracedResults]] = {}
        self._forwards: list[tuple[_Layer, Callable[..., Any]]] = []
        self._opened = [(weakref.ref(module), self._opened_forward(module)) for module in opened]
        # Hooks removed from each module: those before and after the forward, and of layers also backward hooks.
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
        """True if layers can be compiled as regions: hooks inside them only collect outputs, since others may write to
        outer objects after the outer graph was traced, and no global module hook is registered."""
        if not self.all or any(None in layer.collected_kinds for layer, _ in self._forwards):
            return False
        return self._only_layers or not dynamo.global_hooks()

    @property
    def are_replaced(self) -> bool:
        """True if the forward of a layer has been replaced, so that it no longer equals the others of its group."""
        modules = (held() for region in self.all for held in region.layers)
        return any(module is not None and "forward" in vars(module) for module in modules)

    @property
    def layer(self) -> str:
        """Returns the path of the layer whose forward is running; empty outside of layers."""
        return "" if self._running is None else self._running.path

    def note_graph(self, watch: dynamo.Watch) -> str:
        """Count a graph traced in a first call. Returns an error line if the current group has too many.

        Args:
            watch: recompiles and graph breaks of that call.
        """
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
        """Returns the number of layers in the current group, outside of layers in all groups; 1 without regions."""
        if not self.are_closed:
            return 1
        regions = self.all if self._running is None else [self._running.region]
        return sum(len(region.layers) for region in regions)

    @contextlib.contextmanager
    def in_place(self, trace: Hashable) -> Iterator[None]:
        """Run layers as regions within the context, without their hooks and with open modules gathered.

        Args:
            trace: key of the outer trace; calls with the same key run the outer graph that was traced under it.
        """
        self._traced_results = self._all_traced_results.setdefault(trace, {})
        self._checkpoint = autograd.checkpoint()
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
        region, numbers, sizes = layer.region, [], []
        for value, constants, dims in zip(values, region.constants, region.constant_dims, strict=False):
            if isinstance(value, torch.Tensor):
                sizes.append((value, dims))
            elif type(value) is int:
                numbers.append(next(iter(constants), None))
        try:
            with (
                traced_sizes.StaticSizes(sizes),
                traced_sizes.constant_numbers() if numbers and None not in numbers else contextlib.nullcontext(),
            ):
                module = layer.module
                forward = functools.partial(layer.forward, module)
                if (checkpoint := autograd.checkpoint()) is not None and checkpoint is not self._checkpoint:
                    # The user's checkpoint reruns the layer's own forward.
                    self.has_checkpointed = self.has_run_others = True
                    forward = functools.partial(type(module).forward, module)
                if self._has_hooks(module):
                    self.has_run_others = True
                    results = self._hooked(module, (True,) * _ALL, forward, args, kwargs)
                else:
                    results = forward(*args, **kwargs)
        finally:
            self._running = before
        if _has_containers((*args, *kwargs.values())) and not _are_leaves(values, args, kwargs):
            raise ResultsChangedError(f"{layer.path} {_CHANGES_CONTAINER}")
        traced = self._traced_results.get(_call_key(layer, values))
        if traced is not None:
            returned = dynamo.tree_leaves(results)
            if not any(each.match(returned, values) for each in traced):
                raise ResultsChangedError(
                    f"the outputs of {layer.path} no longer match those of equal layers, or its earlier ones"
                )
        return results

    def forget_results(self) -> None:
        """Forget the layer results of all traces so far."""
        self._all_traced_results.clear()

    def check_graph(self, graph: fx.Graph) -> None:
        """Raise RuntimeError if the outer graph cannot be split at layers: it registers a hook on a tensor, and the
        backward would bypass a piece that returns its own input with the hook; it enters inference mode, which would
        stay enabled after the piece; or it writes to an argument of an earlier layer, whose backward may save it."""
        if any(map(dynamo.registers_hook, graph.nodes)):
            raise self._refused("a hook is registered on a tensor between layers")
        if any(map(dynamo.enters_inference_mode, graph.nodes)):
            raise self._refused("torch.inference_mode is entered around layers")
        given: set[int] = set()
        for node in graph.nodes:
            if dynamo.is_operator_of_python(node):
                given.update(*map(dynamo.traced_storages, node.all_input_nodes))
            elif dynamo.writes_to_any(node, given):
                raise self._refused("code between layers writes to an argument of an earlier layer")

    def check_around(self, trace: dynamo.Trace) -> None:
        """Raise RuntimeError if the outer code writes to an object that a layer's hook holds, such as a list that all
        hooks append to: the hook's own writes while the graph runs would be lost."""
        hooks = (hook for taken in self._taken.values() for hooks in taken for hook in hooks.values())
        if trace.changes(held for hook in hooks for held in _held(hook)):
            raise self._refused("hooks of layers and code outside of layers write to the same object")

    def finish(self, outputs: Any) -> Any:
        """Returns the model's outputs after the forward hooks of its open modules; call it within `in_place`."""
        for held, _ in self._opened:
            if (module := held()) is not None and module in self._taken:
                outputs = self._hooked(module, (False, True), lambda outputs=outputs: outputs, (), {})
        return outputs

    def _opened_forward(self, module: torch.nn.Module) -> types.FunctionType:
        """Returns a traceable forward of an open module: its forward pre-hooks are one operator."""
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
        """True if a call of the module runs hooks that its caller does not. Regions exclude global module hooks."""
        since = map(_before_collectors, hooks_around_call(module))
        return module in self._taken and any(itertools.chain(self._taken[module], since))

    def _hooked(
        self,
        module: torch.nn.Module,
        kinds: Sequence[bool],
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a module with this forward and some kinds of its removed hooks.

        Args:
            kinds: for each kind of hook, in the order of `hooks_around_call`, whether it runs.
        """
        inner, taken = module.__dict__.get("forward"), self._taken[module]
        # The caller runs the hooks that collect outputs; if they ran here too, each output would be collected twice.
        places = hooks_around_call(module)[: len(kinds)]
        collectors = [_trailing_collectors(hooks) for hooks in places]
        for place, hooks in zip(places, collectors, strict=True):
            for number in hooks:
                del place[number]
        _give_back(module, [hooks if wanted else {} for hooks, wanted in zip(taken, kinds, strict=True)])
        module.__dict__["forward"] = forward
        try:
            return module(*args, **kwargs)
        finally:
            # Hooks may remove themselves and register others.
            left = zip(_take(module, len(kinds)), taken, kinds, strict=True)
            self._taken[module] = tuple(now if wanted else {**hooks, **now} for now, hooks, wanted in left)
            for place, hooks in zip(places, collectors, strict=True):
                place.update(hooks)
            if inner is not None:
                module.__dict__["forward"] = inner

    def _forward_of(self, layer: _Layer) -> types.FunctionType:
        """Returns a forward that runs the layer's region, or its results on fake tensors while the outer graph is
        traced."""
        run = dynamo.untraced(functools.partial(self._run, layer))

        def layer_region(*args: Any, **kwargs: Any) -> Any:
            if (kinds := layer.collected_kinds) and (collected := kinds & trace_fixes.collected_kinds()):
                raise self._refused(f"{', '.join(sorted(map(str, collected)))} are collected in {layer.region.name}")
            trace = dynamo.Trace.current()
            if trace is None:
                return run(*args, **kwargs)
            results = self._traced(layer.module, layer.region, trace, args, kwargs)
            given = dynamo.tree_leaves((args, kwargs))
            traced = self._traced_results.setdefault(_call_key(layer, given), set())
            traced.add(_TracedResults.of(dynamo.tree_leaves(results), given))
            return results

        # torch guards on functions by their code object: if layers shared one, reordered layers would run in their old
        # places.
        return cast(types.FunctionType, dynamo.with_own_code(layer_region))

    def _refused(self, why: str) -> RuntimeError:
        self.refusal = why
        return RuntimeError(why)

    def _traced(
        self, layer: torch.nn.Module, region: Region, trace: dynamo.Trace, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Returns the results of a layer on fake tensors; for an equal layer with equal arguments, copies of the first
        layer's.

        Raises:
            RuntimeError: the outer code would not see what the layer sets, or the other way round.
        """
        changes = self._pending(trace, layer, region)
        given, structure = dynamo.tree_flatten((args, kwargs))
        region.note_arguments(given)
        # A layer may write to a list or dict that it is given, so it needs its own run.
        has_containers = _has_containers((*args, *kwargs.values()))
        known = not has_containers and all(isinstance(value, DESCRIBED) for value in given)
        if region not in self._attributes:
            alive = [each for held in region.layers if (each := held()) is not None]
            self._attributes[region] = _relevant_attributes(alive)
        way = region, self._attributes[region].get(layer), str(structure), id(trace.context), torch.is_grad_enabled()
        # Only one of several equal layers may read a change.
        known = known and not changes
        if known and (equal := self._results.get((*way, tuple(map(described, given))))) is not None:
            return dynamo.tree_map_only(torch.Tensor, torch.clone, equal)
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        before = list(map(writes_to, tensors))
        try:
            results = self._run_on_fakes(layer, region, trace, args, kwargs, changes)
        except TypeError as error:
            # In a graph, lists and dicts are immutable ones (`torch/fx/immutable_collections.py`).
            if not (has_containers and "object does not support mutation" in str(error)):
                raise
            raise self._refused(f"the forward of {region.name} {_CHANGES_CONTAINER}") from error
        if list(map(writes_to, tensors)) != before:
            # The values that the previous layer has saved would be overwritten.
            raise self._refused(f"the forward of {region.name} writes to its arguments")
        if has_containers and not _are_leaves(given, args, kwargs):
            raise self._refused(f"the forward of {region.name} {_CHANGES_CONTAINER}")
        inputs = set(map(dynamo.storage_id, tensors))
        values = dynamo.tree_leaves(results)
        is_new = all(dynamo.storage_id(value) not in inputs for value in values if isinstance(value, torch.Tensor))
        if known and is_new and all(isinstance(value, DESCRIBED) for value in values):
            # The forward may have unified symbols of equal sizes, so the key is computed again for later layers.
            self._results[(*way, tuple(map(described, given)))] = results
        return results

    def _run_on_fakes(
        self,
        layer: torch.nn.Module,
        region: Region,
        trace: dynamo.Trace,
        args: tuple[Any, ...],
        kwargs: Any,
        changes: Sequence[dynamo.PendingChange],
    ) -> Any:
        """Returns the results of a layer's forward on fake tensors; raises as `_traced`."""
        cast_args, cast_kwargs = fully_shard.with_cast_inputs(layer, args, kwargs)
        # The layer's Python code runs here, and may draw random numbers of Python and NumPy.
        fakes = functools.partial(trace.fakes, dtype=fully_shard.gathered_dtype(layer))
        forward = functools.partial(type(layer).forward, layer, *cast_args, **cast_kwargs)
        with (
            said_to_compile(),
            preserved_generators(),
            replaced([layer], fakes),
            trace.with_fake_states(layer),
            without_launches(),
            clean_caches(layer),
            recorded_reads((change.module, change.names) for change in changes if change.module is not None) as read,
        ):
            results, name = attribute_set_by(forward, layer)
        for change in changes:
            if read & set(change.names):
                raise self._refused(f"code before {region.name} sets {change}, which the layer reads")
        if name:
            raise self._refused(f"the forward of {region.name} sets {name}")
        return fully_shard.with_cast_outputs(layer, results)

    def _pending(self, trace: dynamo.Trace, layer: torch.nn.Module, region: Region) -> list[dynamo.PendingChange]:
        """Returns the pending changes of modules around a layer when it is called. If its forward read a changed
        attribute, it would get the value of the previous step.

        Raises:
            RuntimeError: another object or a module in the layer changes, or the layer has hooks, so that its code may
                read the change.
        """
        changes = list(trace.pending_changes(trace_fixes.collecting()))
        inside = set(layer.modules())
        for change in changes:
            if change.module is None or change.module in inside or self._has_hooks(layer):
                raise self._refused(f"code before {region.name} sets {change}, which the layer may read")
        return changes


# How many kinds of `hooks_around_call` are removed.
_AROUND_FORWARD, _ALL = 2, 4


def _take(module: torch.nn.Module, kinds: int) -> tuple[dict[int, Any], ...]:
    """Remove a module's hooks of the first kinds, and return them. Trailing hooks that collect its outputs stay, since
    torch can trace them."""
    places = hooks_around_call(module)[:kinds]
    taken = tuple(map(_before_collectors, places))
    for place, hooks in zip(places, taken, strict=True):
        for number in hooks:
            del place[number]
    return taken


def _before_collectors(hooks: Mapping[int, Any]) -> dict[int, Any]:
    return dict(itertools.islice(hooks.items(), len(hooks) - len(_trailing_collectors(hooks))))


def _trailing_collectors(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """Returns the last hooks if they collect outputs, in their order."""
    if not hooks:
        return {}
    numbers = itertools.takewhile(lambda number: trace_fixes.kind_of(hooks[number]) is not None, reversed(hooks))
    return {number: hooks[number] for number in [*numbers][::-1]}


def _give_back(module: torch.nn.Module, taken: Sequence[Mapping[int, Any]]) -> None:
    """Put removed hooks back, before those that were registered since."""
    for place, hooks in zip(hooks_around_call(module), taken, strict=False):
        if not hooks:
            continue
        since = dict(place)
        place.clear()
        place.update({**hooks, **since})


def _held(function: Any) -> Iterator[object]:
    """Yields the objects that a function may write to: from its closure, bound and default arguments, instance, and
    the globals that it names."""
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
    """Returns the sizes of a tensor, or a number; None for each that is a symbol in the outer trace."""
    return list(map(traced_sizes.constant, [value] if isinstance(value, int | torch.SymInt) else _sizes(value)))


def _common(one: list[int | None], other: list[int | None]) -> list[int | None]:
    """Returns the constants that two layers have in common, None in the other places."""
    if len(one) != len(other):
        return []
    return [constant if constant == of_other else None for constant, of_other in zip(one, other, strict=True)]


def _has_containers(arguments: Sequence[Any]) -> bool:
    """True if a list or dict is among the arguments of a layer, or in a tuple among them."""
    return any(
        isinstance(each, list | dict) or (isinstance(each, tuple) and _has_containers(each)) for each in arguments
    )


def _are_leaves(values: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if these are still the leaves of a layer's arguments."""
    now = dynamo.tree_leaves((args, kwargs))
    return len(values) == len(now) and all(one is other for one, other in zip(values, now, strict=True))


def _kind(value: Any) -> Hashable:
    """Returns the properties of a value that autograd and traced operators depend on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.requires_grad
    kind: type = int if isinstance(value, torch.SymInt) else type(value)
    return kind


def _call_key(layer: _Layer, given: Sequence[Any]) -> Hashable:
    return layer, tuple(map(_kind, given))


@dataclass(frozen=True)
class _TracedResults:
    """The results of a layer in the outer trace.

    Attributes:
        kinds: the kind of each value, see `_kind`.
        sizes: the sizes of each tensor: a constant, or the argument and its dimension of that size (None: neither).
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
        """True if the results of a run with these arguments are as they were traced."""

        if self.kinds != tuple(map(_kind, results)):
            return False
        # Loops: nested generators would take twice the time, for each layer in each step.
        for of_result, result in zip(self.sizes, results, strict=True):
            for traced, size in zip(of_result, _sizes(result), strict=True):
                expected = given[traced[0]].shape[traced[1]] if isinstance(traced, tuple) else traced
                if expected is not None and expected != size:
                    return False
        return True


def _sizes(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else ()


def _relevant_attributes(layers: Sequence[torch.nn.Module]) -> dict[torch.nn.Module, Hashable]:
    """Returns the attributes of each layer that its results on fake tensors, and its effects, depend on.

    Whole numbers that no two layers share are left out: they are layer indices, which almost no forward reads, and
    with them each layer would need its own run on fake tensors. If a forward does read them, each layer has a graph of
    its own, which is more than `_MOST_GRAPHS` if there are more layers than that.
    """
    known = dict(zip(layers, contents_of(layers), strict=True))
    counts = Counter(item for values in known.values() for item in values.items())
    are_few = len(layers) <= _MOST_GRAPHS
    shared = {name for (name, (kind, *_)), count in counts.items() if are_few or count > 1 or kind is not int}
    return {
        layer: frozenset((name, value) for name, value in values.items() if name in shared)
        for layer, values in known.items()
    }


def around_regions(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a traced graph split into modules: the pieces before, between and after the layers, and each layer's
    call."""
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
    """Returns the layer call that a `getitem` node unpacks; None for other nodes. Indexing into a layer's only tensor
    is part of the next piece."""
    of = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
    if not isinstance(of, fx.Node) or not dynamo.is_operator_of_python(of):
        return None
    return None if isinstance(dynamo.traced_value(of), torch.Tensor) else of
