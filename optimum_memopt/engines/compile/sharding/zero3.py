"""The memory of ZeRO 3 around the graphs of layers, and of operators outside of them, from runs on fake tensors.

Each layer is one operator of such a run, whose own memory is that of its graph. An estimate without a run, from the
gathers of layers and the tensors that autograd saves outside of them, was between 4% too high and 43% too low, the
latter if the peak is in the loss (Llama of 4 layers of 128, a vocabulary of 512 and of 8192).
"""

import bisect
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from optimum_memopt.compat.deepspeed import full_shape
from optimum_memopt.compat.torch import hooks_around_forward
from optimum_memopt.compat.transformers import is_mask
from optimum_memopt.engines.compile.graph.symbols import input_sizes
from optimum_memopt.engines.compile.memory.around_runs import AroundRun, Collectives, GraphRun, Reduced
from optimum_memopt.engines.compile.sharding.gathering import Gathering, ParameterState, Reduction
from optimum_memopt.engines.simulator.events import Event
from optimum_memopt.engines.simulator.live_run import BACKWARD, LiveRun
from optimum_memopt.engines.simulator.recorder import LiveRecorder, loss_of
from optimum_memopt.engines.torch_compat import dynamo, fake_tensors
from optimum_memopt.engines.torch_compat.attention import without_padding
from optimum_memopt.engines.torch_compat.zero3 import Partitioning
from optimum_memopt.errors import MemOptError, line_of
from optimum_memopt.generators import preserved_generators

# Maximum number of cached steps, one per batch size.
_MOST_STEPS = 64

_FORWARD, _FORWARD_END, _LOSS, _BACKWARD = "forward", "forward end", "loss", "backward"
_AGAIN, _AGAIN_END, _END = "forward again", "forward again end", "end"

# For each layer run, the graph calls that its backward reruns, each with the number of the layer run it belongs to.
Repeats = tuple[tuple[tuple[int, int], ...], ...]


class _Mark(NamedTuple):
    """A moment of a step.

    Attributes:
        run: number of the layer's run; of the graph call for a rerun forward; -1 for the backward's start and end.
    """

    kind: str
    run: int = -1


@dataclass(frozen=True)
class AroundLayers:
    """The events of a step outside of the graphs of its layers.

    Attributes:
        layers: path of each layer that has run, in order.
        before: for each moment, the events since the previous moment.
    """

    layers: tuple[str, ...]
    before: Mapping[Hashable, tuple[Event, ...]]


Steps = tuple[AroundLayers, AroundLayers]


@dataclass(frozen=True)
class Zero3Sharding:
    """A model whose layers are leaf modules of ZeRO 3; implements `Sharding`.

    Attributes:
        steps: returns the first step of a training run and any later one, for batch sizes by name, the number of
            elements gathered ahead, and the calls that backwards rerun.
        prefetched: elements that each module gathers ahead.
        sizes: sizes of the batch.
        is_first: whether the step is the first of the training run.
    """

    steps: Callable[[Mapping[str, int], int, Repeats], Steps]
    ranks: int
    prefetched: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    is_first: bool = False

    name: ClassVar = "ZeRO 3"
    is_sharded: ClassVar = True
    stays_gathered: ClassVar = False
    tells_outside: ClassVar = True
    unknown: ClassVar = ""

    def at(self, sizes: Mapping[str, int]) -> "Zero3Sharding":
        return replace(self, sizes=sizes)

    def gathering_ahead(self, elements: int) -> "Zero3Sharding":
        return replace(self, prefetched=elements)

    @property
    def first(self) -> "Zero3Sharding":
        return replace(self, is_first=True)

    def collectives(self, runs: Sequence[GraphRun]) -> Collectives:
        """Returns the events around the runs of a forward's graphs.

        Raises:
            MemOptError: the layers ran in another order than in plain PyTorch.
        """
        layers, count = [run.layer for run in runs], len(runs)
        # A layer with graph breaks has several runs.
        begins = [index for index, layer in enumerate(layers) if not index or layers[index - 1] != layer]
        ends = [*(index - 1 for index in begins[1:]), count - 1]
        repeats = tuple(
            tuple((at, bisect.bisect(begins, at) - 1) for run in reversed(runs[begin : end + 1]) for at in run.again)
            for begin, end in zip(begins, ends, strict=True)
        )
        first, later = self.steps(self.sizes, self.prefetched, repeats)
        step = first if self.is_first else later
        if tuple(layers[index] for index in begins) != step.layers:
            raise MemOptError(f"{self.name}: the layers run in a different order than in plain PyTorch")
        around = [AroundRun() for _ in runs]
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            # Gradients of a layer are held until its backward ends.
            group = object()
            around[begin].before = step.before[_Mark(_FORWARD, number)]
            around[begin].reduced = (Reduced(group),)
            around[end].outside = step.before[_Mark(_BACKWARD, number)]
            of_layer = runs[begin : end + 1]
            for run, own in zip(of_layer, around[begin : end + 1], strict=True):
                own.owners = dict.fromkeys(run.parameters, group)
            if any(set(run.gradients) & run.parameters.keys() for run in of_layer):
                # DeepSpeed reduces a layer's gradients in a hook after its backward, which holds those of its outputs.
                around[end].given = group
        for at, _ in itertools.chain(*repeats):
            around[at].before_again = step.before[_Mark(_AGAIN, at)]
            around[at].after_again = step.before[_Mark(_AGAIN_END, at)]
        return Collectives(tuple(around), step.before[_Mark(_LOSS)], (), (), step.before[_Mark(_END)])


# Cache for equal layers with equal arguments: flat results on fake tensors, and their tree structure.
_Results = dict[Hashable, tuple[list[Any], Any]]


class _Run:
    """One forward and backward on fake tensors, without the memory of compiled layers."""

    def __init__(
        self,
        model: torch.nn.Module,
        gathering: Gathering,
        layers: Mapping[str, torch.nn.Module],
        compiled: Collection[str],
        repeats: Repeats,
        results: _Results,
    ) -> None:
        self._repeats, self._results = repeats, results
        self._model, self._gathering, self._layers, self._compiled = model, gathering, layers, compiled
        self._reduction = Reduction(gathering.spec)
        self.recorder = LiveRecorder(model)
        self._inside = {inner for layer in layers.values() for inner in layer.modules()}
        self._ran: list[str] = []
        # Bytes of the storages that the last layer returned, by number.
        self._returned: dict[int, int] = {}

    def around(self, forward: Callable[[], Any]) -> AroundLayers:
        """Run a step; returns its events around the layers."""
        recorder, gathering, model = self.recorder, self._gathering, self._model
        trained = [held for held in gathering.inside[model] if held.spec.reduced >= 0]
        in_layers = {held for layer in self._layers.values() for held in gathering.inside[layer]}
        with contextlib.ExitStack() as stack:
            for path, layer in self._layers.items():
                stack.enter_context(mock.patch.object(layer, "forward", self._forward_of(path, layer)))
            stack.enter_context(recorder)
            # These hooks run after the recorder's own.
            hooks = [register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after)]
            hooks += [
                held.tensor.register_post_accumulate_grad_hook(lambda _, held=held: self._reduction.add(held))
                for held in set(trained) - in_layers
            ]
            for hook in hooks:
                stack.callback(hook.remove)
            recorder.leave_out(gathering.whole.values())
            gathering.begin()
            gathering.fetch(model)
            loss = forward()
            gathering.release(model)
            loss = self._beginning(model, loss)
            recorder.begin(BACKWARD)
            recorder.mark(_Mark(_LOSS))
            # The caller has dropped the last layer's results; what is still alive counts from here on.
            recorder.take_in(self._returned)
            loss.backward()
            self._reduction.reduce(loss)
            gathering.end()
        return _around(recorder.run(), self._ran)

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        if not self._has_hooks(module):
            return None
        self._gathering.fetch(module)
        return self._ending(module, args)

    def _after(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._has_hooks(module):
            return None
        self._gathering.release(module)
        return self._beginning(module, output)

    def _has_hooks(self, module: torch.nn.Module) -> bool:
        """Returns True if the module is outside of the layers; a layer's hooks run in its replaced forward."""
        return module in self._gathering.own and module not in self._inside

    def _beginning(self, module: torch.nn.Module, output: Any) -> Any:
        """Returns a module's output; the first gradient that reaches it begins the module's backward."""

        def begin() -> None:
            self._gathering.fetch(module, in_backward=True)

        return dynamo.tree_map(lambda value: _calling(begin, value), output)

    def _ending(self, module: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns a module's positional arguments; the last of their gradients ends the module's backward."""
        waiting = [value.requires_grad for value in given if isinstance(value, torch.Tensor)].count(True)

        def end() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                self._gathering.release(module, in_backward=True)

        return tuple(_calling(end, value) for value in given)

    def _forward_of(self, path: str, layer: torch.nn.Module) -> Callable[..., Any]:
        """Returns a replacement of a layer's forward that runs it as one operator."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._gathering.fetch(layer)
            values, structure = dynamo.tree_flatten((args, kwargs))
            at = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
            hidden = next(place for place in at if values[place].is_floating_point())
            trained = [held for held in self._gathering.inside[layer] if held.spec.reduced >= 0]
            if trained and not values[hidden].requires_grad:
                values[hidden] = values[hidden].detach().requires_grad_()
            (values[hidden],) = self._ending(layer, (values[hidden],))
            # -1: the layer has no known graph, so its own memory is unknown.
            number = len(self._ran) if path in self._compiled else -1
            if number >= 0:
                self._ran.append(path)
                self.recorder.leave_out([values[place] for place in at])
                self.recorder.mark(_Mark(_FORWARD, number))
            shapes = tuple(held.spec.shape for held in self._gathering.inside[layer])
            key = type(layer), shapes, str(structure), tuple(map(fake_tensors.described, values))
            # Hooks may change state outside of the layer.
            has_hooks = any(any(hooks_around_forward(inner)) for inner in layer.modules() if inner is not layer)
            is_known = not has_hooks and all(isinstance(value, fake_tensors.DESCRIBED) for value in values)
            if not is_known or key not in self._results:
                with self.recorder.paused(), torch.no_grad():
                    args, kwargs = dynamo.tree_unflatten(values, structure)
                    results, made = dynamo.tree_flatten(type(layer).forward(layer, *args, **kwargs))
                if is_known:
                    self._results[key] = results, made
            else:
                results, made = self._results[key]
            results = list(results)
            tensors = [place for place, value in enumerate(results) if isinstance(value, torch.Tensor)]
            likes = [results[place] for place in tensors]
            returned = _Layer.apply(self, number, trained, likes, *(values[place] for place in at))
            for place, value in zip(tensors, returned, strict=True):
                results[place] = value
            if number >= 0:
                self._returned = self.recorder.leave_out(returned)
                self.recorder.mark(_Mark(_FORWARD_END, number))
            self._gathering.release(layer)
            return self._beginning(layer, dynamo.tree_unflatten(results, made))

        return run

    def made(self, number: int, likes: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns empty tensors like these; they are left out of the recorder if the layer's graph counts them."""
        with self.recorder.paused() if number >= 0 else contextlib.nullcontext():
            made = [None if like is None else torch.empty_like(like) for like in likes]
        if number >= 0:
            self.recorder.leave_out([each for each in made if each is not None])
        return made

    def begin_backward(self, number: int) -> None:
        """Begin a layer's backward; layers that it reruns gather their parameters as for a backward."""
        self.recorder.mark(_Mark(_BACKWARD, number))
        for at, of in self._repeats[number] if self._repeats else ():
            layer = self._layers[self._ran[of]]
            self._gathering.fetch(layer, in_backward=True)
            self.recorder.mark(_Mark(_AGAIN, at))
            self._gathering.release(layer, in_backward=True)
            self.recorder.mark(_Mark(_AGAIN_END, at))

    def reduce(self, trained: Sequence[ParameterState]) -> None:
        """Reduce the gradients of a layer's parameters after its backward."""
        for held in trained:
            held.tensor.grad = torch.empty_like(held.tensor)
        for held in sorted(trained, key=lambda held: held.spec.reduced):
            self._reduction.add(held)


class _Layer(torch.autograd.Function):
    """A layer as one autograd node, without the operators inside."""

    @staticmethod
    def forward(
        ctx: Any,
        run: _Run,
        number: int,
        trained: Sequence[ParameterState],
        results: Sequence[torch.Tensor],
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.run, ctx.number, ctx.trained = run, number, trained
        with run.recorder.paused():
            # Keep empty copies instead of the tensors, since the layer may not save them.
            ctx.likes = [torch.empty_like(each) if each.requires_grad else None for each in given]
        made = run.made(number, results)
        ctx.mark_non_differentiable(*(each for each in made if each is not None and not each.is_floating_point()))
        return tuple(made)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        if ctx.number >= 0:
            ctx.run.recorder.leave_out([each for each in gradients if each is not None])
            ctx.run.begin_backward(ctx.number)
        ctx.run.reduce(ctx.trained)
        return (None, None, None, None, *ctx.run.made(ctx.number, ctx.likes))


class _Calling(torch.autograd.Function):
    """Identity whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], value: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.call()
        return (None, *gradients)


def _calling(call: Callable[[], None], value: Any) -> Any:
    return _Calling.apply(call, value) if isinstance(value, torch.Tensor) and value.requires_grad else value


def _around(run: LiveRun, layers: Sequence[str]) -> AroundLayers:
    """Returns a run's events between its marks, without the memory of layers, which their graphs count."""
    before: dict[Hashable, tuple[Event, ...]] = {}
    last = 0
    for place, mark in (*run.marks, (len(run.events), _Mark(_END))):
        before[mark] = tuple(run.between(last, place))
        last = place
    for number in reversed(range(len(layers))):
        if _Mark(_BACKWARD, number) not in before:
            raise MemOptError(f"{layers[number]} receives no gradient")
    return AroundLayers(tuple(layers), before)


class LeafSteps:
    """The steps of a model whose layers are leaf modules; each batch size is run once and cached.

    Args:
        forward: the model's own forward; takes positional arguments and keyword arguments.
        args, inputs: positional and keyword arguments of the first batch.
        layers: paths of the leaf modules.
        compiled: paths of the leaf modules whose graphs are known.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        inputs: Mapping[str, Any],
        partitioning: Partitioning,
        layers: Collection[str],
        compiled: Collection[str],
    ) -> None:
        self._model, self._forward, self._partitioning = weakref.ref(model), forward, partitioning
        self._layers, self._compiled = layers, compiled
        self._mode = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
        self._first, self._without_padding = input_sizes(inputs), set(without_padding(inputs))
        self._args, self._inputs = dynamo.tree_map(self._fake, (args, dict(inputs)))
        self._of_sizes = functools.lru_cache(_MOST_STEPS)(self._run)

    def __call__(self, sizes: Mapping[str, int], prefetched: int, repeats: Repeats = ()) -> Steps:
        """Returns the first step and a later one; a size that is not in `sizes` stays as in the first batch, or grows
        with a size that it was equal to.

        Args:
            prefetched: elements that each module gathers ahead.
            repeats: calls that the backward of each layer reruns; empty: none.

        Raises:
            MemOptError: the model cannot be run on fake tensors.
        """
        named = frozenset((name, size) for name, size in sizes.items() if name in self._first)
        return self._of_sizes(named, prefetched, repeats if any(repeats) else ())

    def _run(self, named: frozenset[tuple[str, int]], prefetched: int, repeats: Repeats) -> Steps:
        model, sizes, partitioning = self._model(), dict(named), replace(self._partitioning, prefetched=prefetched)
        if model is None:
            raise ReferenceError("the model whose steps are predicted was deleted")
        grown = {(name.rpartition("_")[2], self._first[name]): size for name, size in sizes.items()}
        layers = {path: model.get_submodule(path) for path in self._layers}
        results: _Results = {}
        with preserved_generators(), torch.enable_grad(), fake_tensors.without_hooks(model), self._mode:
            inputs = {name: self._resized(name, value, sizes, grown) for name, value in self._inputs.items()}

            def step(order: Sequence[torch.nn.Module] | None) -> tuple[AroundLayers, Sequence[torch.nn.Module]]:
                gathering = Gathering(model, partitioning, layers.values(), order)
                run = _Run(model, gathering, layers, self._compiled, repeats, results)
                return run.around(lambda: loss_of(self._forward(self._args, inputs))), gathering.order

            try:
                with fake_tensors.replaced([model], self._fakes), fake_tensors.run_as_eager():
                    first, order = step(None)
                    later, _ = step(order)
                    return first, later
            except MemOptError:
                raise
            except Exception as error:
                raise MemOptError(
                    f"the code outside of the layers of {type(model).__name__} cannot be run on tensors without data "
                    f"({line_of(error)})"
                ) from error

    def _fakes(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        known = {id(tensor): tensor for tensor in tensors}
        fakes = {number: self._fake(tensor) for number, tensor in known.items()}
        return [fakes[id(tensor)] for tensor in tensors]

    def _fake(self, value: Any) -> Any:
        """Returns a tensor without data, or another value as it is; a parameter's is whole, and new each time."""
        if not isinstance(value, torch.Tensor):
            return value
        if not isinstance(value, torch.nn.Parameter):
            return self._mode.from_tensor(value, static_shapes=True)
        with self._mode:
            whole = torch.empty(full_shape(value), dtype=value.dtype, device=value.device)
        return torch.nn.Parameter(whole, value.requires_grad)

    def _resized(
        self, name: str, value: object, sizes: Mapping[str, int], grown: Mapping[tuple[str, int], int]
    ) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        named = [(f"dim{dim}", size) for dim, size in enumerate(value.shape)]
        shape = [sizes.get(f"{name}_{dim}", grown.get((dim, size), size)) for dim, size in named]
        resized = value if shape == list(value.shape) else value.new_empty(shape)
        if is_mask(name):
            fake_tensors.with_mask(resized, name not in self._without_padding)
        return resized
