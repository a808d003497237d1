"""Costs of a joint graph's operators: measured on the device that trains, or estimated for a named one.

A plan costs the time of what it recomputes, and operators differ by device: on a CPU the mask of a dropout is the most
expensive byte to recompute, on a GPU it is nearly free.
"""

import contextlib
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from optimum_memopt.compat import tensors_in
from optimum_memopt.engines.api.predictions import BANDWIDTH, COMPUTE, LAUNCHES
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.costs.fusion import Moved, moved_by
from optimum_memopt.engines.compile.graph.joint import (
    JointGraph,
    first_input,
    is_chunked_loss_operator,
    is_number,
    is_view,
    root,
    storage_bytes,
    symbolic,
    tensor_value,
    value,
)
from optimum_memopt.engines.compile.loss.operator import loss_shape
from optimum_memopt.engines.compile.torch_compat import dynamo, fx_graph, kernels
from optimum_memopt.engines.compile.torch_compat.attention import equal_parts
from optimum_memopt.engines.compile.torch_compat.kernels import generator_state

# Seconds that a kernel takes at least, from Python and without CUDA graphs: 4 to 8 microseconds on the hosts of this
# decade (pytorch.org/blog/accelerating-pytorch-with-cuda-graphs); 4 fits PEFT's method comparison (docs/gpu.md).
_LAUNCH = 4e-6
# Repetitions of an operator, and seconds after which one is not repeated.
_REPEATS, _LONG = 5, 0.02
# Bytes that are written on a CPU before each repetition, as `triton.testing.do_bench` clears a GPU's cache: in a step
# much is computed between two uses of a tensor. Operators that move less find what was just computed in the cache,
# those that move more clear it themselves.
_CLEARED, _SMALL, _LARGE = 2**24, 2**20, 2**26
# What a measured operator takes at most, of what it reads and writes: oneDNN copies operands, and so do some kernels.
_TAKEN = 2
# Parts of a batch that are measured in its place, where it takes too much itself.
_PARTS = (4, 16, 64, 256)
_ATTENTION = "_scaled_dot_product_"
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# Of what an operator that is bound by memory takes alone, where inductor fuses it with neighbours.
FUSED = 0.5
_Number = Callable[[Any], Any]


@dataclass(frozen=True)
class Costs:
    """Costs of a joint graph's operators.

    Attributes:
        seconds: of each node of the joint graph, in its order; 0 of views, of picks of outputs and of numbers.
        source: `measured`, `roofline H100`.
        workspaces: bytes that a library's kernel holds beside its results, of each node; empty: not measured.
    """

    seconds: tuple[float, ...]
    source: str
    workspaces: tuple[int, ...] = ()


class Measured(NamedTuple):
    """The seconds of an operator's run, and its workspace in bytes (`Costs.workspaces`)."""

    seconds: float
    workspace: int


@dataclass(frozen=True)
class Work:
    """The work of one operator.

    Attributes:
        key: equal for operators that do the same work on the same shapes.
        flops: of a matrix product, a convolution or attention, else 0.
        is_several: kernels that run one after the other.
        is_launched: it has a kernel of its own, or is what one is launched for.
    """

    key: str
    bytes: float
    flops: float
    dtype: str
    is_several: bool = False
    is_launched: bool = True

    @property
    def operator(self) -> str:
        """`aten.mm.default`."""
        return self.key.partition("(")[0]


def works(
    joint: JointGraph, sizes: Mapping[sympy.Symbol, int], moved: Mapping[fx.Node, Moved] | None = None
) -> tuple[Work | None, ...]:
    """The work of each node of a joint graph, in its order; None for views, for picks of outputs and for numbers.

    Args:
        moved: by the operators that a compiler computes in one kernel with others, see `moved_by`; None: none is.
    """
    number = _numbers(sizes)

    def size(tensor: torch.Tensor) -> int:
        return int(math.prod(map(number, tensor.shape))) * tensor.dtype.itemsize

    def work(node: fx.Node) -> Work:
        alone = _work(node, number)
        if (own := (moved or {}).get(node)) is None:
            return alone
        result = sum(map(size, _tensors(value(node))))
        # Of what is expanded no more is read than there is.
        reads = {read: min(size(tensor_value(read)), number(storage_bytes(root(read)))) for read in own.reads}
        if own.looks_up:
            reads[first_input(node)] = result
        moves = sum(reads.values()) + (result if own.writes else 0)
        return replace(alone, bytes=moves, is_launched=own.writes)

    def runs(node: fx.Node) -> bool:
        has_schema = getattr(node.target, "_schema", None) is not None
        return node.op == "call_function" and has_schema and not is_view(node) and not is_number(node)

    return tuple(work(node) if runs(node) else None for node in joint.nodes)


def roofline(joint: JointGraph, sizes: Mapping[sympy.Symbol, int], device: Device, fused: bool) -> Costs:
    """Estimated by a device's rates, see `bounded`."""
    of_nodes = works(joint, sizes, moved_by(joint) if fused else None)
    seconds = (0.0 if work is None else bounded(work, device)[0] for work in of_nodes)
    return Costs(tuple(seconds), f"roofline {device.name}")


def bounded(work: Work, device: Device) -> tuple[float, str]:
    """Seconds of an operator on a device, and what bounds it, of `predictions`: the longest of a launch, of computing
    and of moving all operands once."""
    computing, moving = work.flops / device.product_rate(work.dtype), work.bytes / device.memory_rate
    launch = _LAUNCH if work.is_launched else 0.0
    seconds = computing + moving if work.is_several else max(computing, moving)
    if seconds < launch:
        return launch, LAUNCHES
    return seconds, COMPUTE if computing >= moving and computing else BANDWIDTH


def seconds_by_bound(calls: Iterable[Work], device: Device) -> dict[str, float]:
    """Seconds of operators that run one after the other on a device, by what bounds them."""
    totals: defaultdict[str, float] = defaultdict(float)
    for work in calls:
        seconds, bound = bounded(work, device)
        totals[bound] += seconds
    return dict(totals)


def work_between(low: Sequence[Work], high: Sequence[Work], share: float) -> tuple[Work, ...] | None:
    """The work of operators whose sizes are by a share of the difference larger than those of `low`; the share may be
    negative or over 1. None where the two are not the same operators."""
    if [work.operator for work in low] != [work.operator for work in high]:
        return None
    return tuple(
        replace(
            one,
            bytes=max(0.0, one.bytes + share * (other.bytes - one.bytes)),
            flops=max(0.0, one.flops + share * (other.flops - one.flops)),
        )
        for one, other in zip(low, high, strict=True)
    )


def measured(
    joint: JointGraph,
    sizes: Mapping[sympy.Symbol, int],
    of_joint: Sequence[Work | None],
    fused: bool,
    cached: dict[str, Measured],
    limit: float = 2.0,
    room: int | None = None,
) -> Costs:
    """Measured where the graph's tensors are: each distinct operator on its shapes, the largest first.

    On a CPU the workspaces of matrix products, convolutions and attention are measured too: oneDNN packs operands in
    half precision into buffers whose sizes depend on the processor.

    The state of random generators is restored. What needs a seed, is left when the time is up, or cannot be run on
    tensors of ones, is estimated by the bytes that it moves, at the median rate of what was measured.

    Args:
        cached: by operator; gets what is measured.
        limit: seconds in all.
        room: bytes that may be allocated; what takes more is measured with smaller sizes, and grows with its work.
            None: as many as there are.
    """
    of_nodes = {node: work for node, work in zip(joint.nodes, of_joint, strict=True) if work is not None}
    distinct = {work.key: node for node, work in of_nodes.items() if not fx_graph.reads_seed(node)}
    end = time.perf_counter() + limit
    # What followed from smaller sizes is not measured, and not for others to read.
    costs = dict(cached)
    with eager(joint):
        for key, node in sorted(distinct.items(), key=lambda item: -of_nodes[item[1]].bytes):
            if key not in cached and time.perf_counter() < end:
                work = of_nodes[node]
                if room is not None and _taken(work) > room:
                    cost = _measure_part(node, sizes, work, room)
                elif (cost := _measure(node, _numbers(sizes), work)) is not None:
                    cached[key] = cost
                if cost is not None:
                    costs[key] = cost
    moving = [work for work in of_nodes.values() if work.key in costs and work.bytes]
    rate = statistics.median(costs[work.key].seconds / work.bytes for work in moving) if moving else 0.0

    def cost_of(work: Work | None) -> Measured:
        if work is None:
            return Measured(0.0, 0)
        seconds, workspace = costs.get(work.key, Measured(work.bytes * rate, 0))
        return Measured(seconds * (FUSED if fused and not work.flops else 1.0), workspace)

    seconds, workspaces = zip(*map(cost_of, of_joint), strict=True)
    return Costs(seconds, "measured", workspaces)


@contextlib.contextmanager
def eager(joint: JointGraph) -> Iterator[None]:
    """Operators run as they are called: outside of the tracer's modes, and without autocast, whose casts the graph has
    already. The state of random generators is restored."""
    tensors = (tensor for node in joint.nodes for tensor in _tensors(value(node)))
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    with fx_graph.without_modes_and_autocast(), torch.no_grad(), torch.random.fork_rng(devices=devices):
        yield


def timed(run: Callable[[], object], is_on_cuda: bool) -> float:
    """Seconds of a call until the device is done; on a CPU without those in which other processes had it."""
    wait = torch.cuda.synchronize if is_on_cuda else lambda: None
    wait()
    begin, processor_begin = time.perf_counter(), time.process_time()
    run()
    wait()
    wall, processor = time.perf_counter() - begin, time.process_time() - processor_begin
    # Several threads take more of the processor than of the clock; in a virtual machine the processor's clock may
    # stand still for so short a time.
    return wall if is_on_cuda or not processor else min(wall, processor)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return list(tensors_in(tree))


def _numbers(sizes: Mapping[sympy.Symbol, int]) -> _Number:
    """Symbolic numbers with values for their symbols; each expression, of which a graph has few, is computed once."""

    @cache
    def computed(expression: sympy.Expr) -> int:
        return int(expression.subs(sizes))

    def number_of(number: Any) -> Any:
        if isinstance(number, int | float):
            return number
        return computed(number if isinstance(number, sympy.Expr) else symbolic(number))

    return number_of


def _concrete(given: Any, number: _Number, make: Callable[..., Any]) -> Any:
    """A node's argument or value with numbers for symbols and `make(shape, stride, dtype, device)` for tensors."""
    given = value(given) if isinstance(given, fx.Node) else given
    if isinstance(given, torch.Tensor):
        return make(list(map(number, given.shape)), list(map(number, given.stride())), given.dtype, given.device)
    if isinstance(given, dynamo.SymbolicNumber):
        return number(given)
    return [_concrete(item, number, make) for item in given] if isinstance(given, tuple | list) else given


def _arguments(node: fx.Node, number: _Number, make: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
    positional = [_concrete(argument, number, make) for argument in node.args]
    return positional, {name: _concrete(argument, number, make) for name, argument in node.kwargs.items()}


def _without_data(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _ones(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros where the dtype is of integers: an index that is in range everywhere."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return tensor.fill_(1 if dtype.is_floating_point else 0)


def arguments_of_ones(joint: JointGraph, sizes: Mapping[sympy.Symbol, int]) -> list[Any]:
    """Arguments that a joint graph can be run on: tensors of ones, of zeros where they may be indices, and numbers."""
    number = _numbers(sizes)
    return [_concrete(node, number, _ones) for node in joint.nodes if node.op == "placeholder"]


def _work(node: fx.Node, number: _Number) -> Work:
    with fx_graph.without_modes_and_autocast():
        positional, named = _arguments(node, number, _without_data)
        result = _concrete(node, number, _without_data)
    device = next((tensor.device for tensor in _tensors(value(node))), None)
    return work_of(node.target, positional, named, result, device)


def work_of(
    operator: Any, positional: Sequence[Any], named: Mapping[str, Any], result: Any, device: torch.device | None
) -> Work:
    """The work of an operator's call, of a graph's node or while it runs; tensors need no data.

    Args:
        device: that the call is for, wherever its tensors are.
    """
    flops = _flops(operator, positional, named, result)
    operands = _tensors([*positional, *named.values()])
    texts = [
        f"{leaf.dtype}{list(leaf.shape)}{list(leaf.stride())}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in dynamo.tree_leaves((positional, list(named.items())))
    ]
    moved = sum(tensor.nbytes for tensor in (*operands, *_tensors(result)))
    if is_loss := is_chunked_loss_operator(operator):
        dtype = positional[-3]
        moved += int(loss_shape(positional, device is not None and device.type == "cuda").moved)
    else:
        # The widest operand's: a mask or an index is beside it.
        dtype = max(operands, key=lambda operand: operand.nbytes).dtype if operands else ""
    return Work(
        key=f"{operator}({', '.join(texts)}) on {device}",
        bytes=moved,
        flops=flops,
        dtype=str(dtype).removeprefix("torch."),
        is_several=is_loss,
    )


def _flops(operator: Any, positional: Sequence[Any], named: Mapping[str, Any], result: Any) -> float:
    if is_chunked_loss_operator(operator):
        hidden, weight, needs = positional[0], positional[1], positional[-1]
        return float(2 * hidden.numel() * len(weight) * (1 + needs[0] + needs[1]))
    name = dynamo.operator_name(operator)
    count = flop_registry.get(getattr(operator, "overloadpacket", None))
    if name.startswith(_ATTENTION):
        # Its backward has the gradient first.
        is_backward = name.endswith("backward")
        shapes = _with_all_heads([operand.shape for operand in positional[: 4 if is_backward else 3]])
        if count is None and name.startswith(_CPU_ATTENTION):
            # It is missing in the registry.
            return float((sdpa_backward_flop_count if is_backward else sdpa_flop_count)(*shapes))
        positional = (*shapes, *positional[len(shapes) :])
    if count is None:
        return 0.0
    with fx_graph.without_modes_and_autocast():
        return float(count(*positional, **named, out_val=result))


def _with_all_heads(shapes: Sequence[torch.Size]) -> list[torch.Size]:
    """The shapes of attention's operands with as many heads of keys and values as of queries, by which the formula
    counts; torch takes fewer in it since 2.12 alone (`torch/utils/flop_counter.py`)."""
    heads = shapes[-3][1]
    return [*shapes[:-2], *(torch.Size((shape[0], heads, *shape[2:])) for shape in shapes[-2:])]


def _measure(node: fx.Node, number: _Number, work: Work) -> Measured | None:
    """The shortest of a few runs, which other processes disturb least; None where it does not run."""
    run: Any = node.target
    seconds: list[float] = []
    workspace = 0
    try:
        positional, named = _arguments(node, number, _ones)
        # A generator takes no other bytes for a state.
        if node.target is torch.ops.optimum_memopt.keep_mask.default:
            positional[2] = generator_state(positional[4])
        if dynamo.operator_name(node.target).startswith("packed_attention"):
            *_, value_states, bounds, _, _ = positional
            positional[-3] = equal_parts(bounds, value_states.shape[2])
        is_on_cuda = any(tensor.is_cuda for tensor in _tensors(positional))
        is_cleared = not is_on_cuda and _SMALL < work.bytes < _LARGE
        cache = torch.ones(_CLEARED // 4 if is_cleared else 0)
        while len(seconds) < _REPEATS and sum(seconds) < _LONG:
            cache.add_(1)
            seconds.append(timed(lambda: run(*positional, **named), is_on_cuda))
        if work.flops and not is_on_cuda:
            # The most held at a time beside what is there afterwards.
            held = list(itertools.accumulate(kernels.cpu_allocations(lambda: run(*positional, **named)), initial=0))
            workspace = max(held) - held[-1]
    # Any operator may refuse ones; out of memory is one more reason not to measure it.
    except Exception:
        return None
    return Measured(min(seconds), workspace)


def _taken(work: Work) -> float:
    return _TAKEN * work.bytes + (_CLEARED if _SMALL < work.bytes < _LARGE else 0)


def _measure_part(node: fx.Node, sizes: Mapping[sympy.Symbol, int], work: Work, room: int) -> Measured | None:
    """Costs scaled from the largest part of the sizes with which an operator takes no more than there is room for;
    None where none does, as where sizes are constants."""
    for parts in _PARTS:
        number = _numbers({symbol: max(1, size // parts) for symbol, size in sizes.items()})
        with contextlib.suppress(Exception):
            part = _work(node, number)
            if part.bytes and _taken(part) <= room and (cost := _measure(node, number, part)) is not None:
                times = work.flops / part.flops if part.flops else work.bytes / part.bytes
                return Measured(cost.seconds * times, int(cost.workspace * work.bytes / part.bytes))
    return None
