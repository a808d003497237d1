"""Costs of a joint graph's operators: measured on the device that trains, or estimated for a named one.

A plan costs the time of what it recomputes, and operators differ by device: on a CPU the mask of a dropout is the most
expensive byte to recompute, on a GPU it is nearly free.
"""

import contextlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from optimum_memopt.compat.torch import tensors_in
from optimum_memopt.engines.api.predictions import BANDWIDTH, COMPUTE, LAUNCHES
from optimum_memopt.engines.compile.costs.fusion import moved_by
from optimum_memopt.engines.compile.costs.graph_work import Evaluate, arguments, concrete, numbers, work_of_node, works
from optimum_memopt.engines.compile.graph.joint import JointGraph, value
from optimum_memopt.engines.simulator.devices import Device
from optimum_memopt.engines.simulator.work import Work
from optimum_memopt.engines.torch_compat import dynamo, fx_graph, kernels
from optimum_memopt.engines.torch_compat.attention import equal_parts
from optimum_memopt.engines.torch_compat.kernels import generator_state

# Minimum seconds of a kernel, called from Python and without CUDA graphs: 4 to 8 microseconds on the hosts of this
# decade (pytorch.org/blog/accelerating-pytorch-with-cuda-graphs); 4 fits PEFT's method comparison (docs/gpu.md).
_LAUNCH = 4e-6
# Seconds of the shortest kernel, if Python runs ahead of the device.
_KERNEL = 2e-6
# Host seconds before a step's first operator and after its last one (the optimizer), and the cost of a call from
# autograd's engine relative to one from a module: plain PyTorch on an H100 (docs/gpu.md).
_BEFORE, _BEHIND, _IN_BACKWARD = 1e-3, 2e-3, 0.5
# Repetitions of an operator, and seconds after which it is not repeated.
_REPEATS, _LONG = 5, 0.02
# Bytes that are written on a CPU before each repetition, as `triton.testing.do_bench` clears a GPU's cache: in a step
# much is computed between two uses of a tensor. Smaller operators find recent results in the cache, and larger ones
# clear it themselves.
_CLEARED, _SMALL, _LARGE = 2**24, 2**20, 2**26
# The most bytes that a measured operator takes, relative to its operands and results: oneDNN and some kernels copy
# operands.
_TAKEN = 2
# Divisors of a batch that is measured in smaller size if it takes too much memory itself.
_PARTS = (4, 16, 64, 256)
# Seconds of a memory-bound operator that inductor fuses with its neighbours, relative to the operator alone.
FUSED = 0.5


@dataclass(frozen=True)
class Costs:
    """Costs of a joint graph's operators.

    Attributes:
        seconds: seconds of each node of the joint graph, in order; 0 for views, picks of outputs and numbers.
        source: the source of the seconds: `measured`, `roofline H100`.
        workspaces: each node's bytes that a library's kernel holds in addition to its results; empty: not measured.
    """

    seconds: tuple[float, ...]
    source: str
    workspaces: tuple[int, ...] = ()


class Measured(NamedTuple):
    """The seconds of an operator's run, and its workspace in bytes (`Costs.workspaces`)."""

    seconds: float
    workspace: int


def roofline(joint: JointGraph, sizes: Mapping[sympy.Symbol, int], device: Device, fused: bool) -> Costs:
    """Estimates costs by a device's rates, see `bounded`."""
    of_nodes = works(joint, sizes, moved_by(joint) if fused else None, device.kind)
    seconds = (0.0 if work is None else bounded(work, device)[0] for work in of_nodes)
    return Costs(tuple(seconds), f"roofline {device.name}")


def bounded(work: Work, device: Device, launch: float = _LAUNCH) -> tuple[float, str]:
    """Returns the seconds of an operator on a device, and what bounds it (see `predictions`).

    The seconds are the longest of a launch, of computing, and of moving all operands once.

    Args:
        launch: minimum seconds of a kernel.
    """
    share = device.attained.share(work.kernel)
    computing = work.flops / (share * device.product_rate(work.dtype)) if work.flops else 0.0
    moving = work.bytes / ((1.0 if work.flops else share) * device.memory_rate)
    least = launch if work.is_launched else 0.0
    seconds = computing + moving if work.is_several else max(computing, moving)
    if seconds < least:
        return least, LAUNCHES
    return seconds, COMPUTE if computing >= moving and computing else BANDWIDTH


def seconds_by_bound(calls: Iterable[Work], device: Device) -> dict[str, float]:
    """Returns the seconds of an eager step, by what bounds them; the optimizer's kernels are left out.

    Python and the device form a queue: the host calls operators without waiting, the device runs one kernel at a time,
    and a kernel starts once the previous one has ended and its operator was called. A call from a module takes longer
    than one from autograd's engine. Time in which the device is idle counts as launches.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    called = ended = _BEFORE
    totals[LAUNCHES] += _BEFORE
    for work in calls:
        called += device.attained.call * (1.0 if work.by_python else _IN_BACKWARD)
        totals[LAUNCHES] += max(0.0, called - ended)
        seconds, bound = bounded(work, device, _KERNEL)
        totals[bound] += seconds
        ended = max(ended, called) + seconds
    totals[LAUNCHES] += max(0.0, called + _BEHIND - ended)
    return dict(totals)


def measured(
    joint: JointGraph,
    sizes: Mapping[sympy.Symbol, int],
    of_joint: Sequence[Work | None],
    fused: bool,
    cached: dict[str, Measured],
    limit: float = 2.0,
    room: int | None = None,
) -> Costs:
    """Measures each distinct operator on its shapes, the largest first, on the device of the graph's tensors.

    On a CPU the workspaces of matrix products, convolutions and attention are measured too: oneDNN packs operands in
    half precision into buffers whose sizes depend on the processor.

    The state of random generators is restored. Operators that need a seed, are left when the time is up, or cannot run
    on tensors of ones are estimated by the bytes that they move, at the median rate of the measured ones.

    Args:
        of_joint: the work of each node, see `works`.
        fused: a compiler fuses memory-bound operators.
        cached: known costs by operator; new measurements are added.
        limit: seconds for all measurements.
        room: bytes that may be allocated; larger operators are measured with smaller sizes, and scaled by their work.
            None: no limit.
    """
    of_nodes = {node: work for node, work in zip(joint.nodes, of_joint, strict=True) if work is not None}
    distinct = {work.key: node for node, work in of_nodes.items() if not fx_graph.reads_seed(node)}
    end = time.perf_counter() + limit
    # Costs scaled from smaller sizes are not measurements, and must not enter the cache.
    costs = dict(cached)
    with eager(joint):
        for key, node in sorted(distinct.items(), key=lambda item: -of_nodes[item[1]].bytes):
            if key not in cached and time.perf_counter() < end:
                work = of_nodes[node]
                if room is not None and _taken(work) > room:
                    cost = _measure_part(node, sizes, work, room)
                elif (cost := _measure(node, numbers(sizes), work)) is not None:
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
    """Run operators eagerly: outside of the tracer's modes, and without autocast, whose casts are already in the
    graph. The state of random generators is restored."""
    tensors = (tensor for node in joint.nodes for tensor in tensors_in(value(node)))
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    with fx_graph.without_modes_and_autocast(), torch.no_grad(), torch.random.fork_rng(devices=devices):
        yield


def timed(run: Callable[[], object], is_on_cuda: bool) -> float:
    """Returns the seconds of a call until the device is done; on a CPU without the time that other processes took."""
    wait = torch.cuda.synchronize if is_on_cuda else lambda: None
    wait()
    begin, processor_begin = time.perf_counter(), time.process_time()
    run()
    wait()
    wall, processor = time.perf_counter() - begin, time.process_time() - processor_begin
    # With several threads, processor time exceeds wall time; in a virtual machine the processor's clock may stand
    # still during so short a time.
    return wall if is_on_cuda or not processor else min(wall, processor)


def _ones(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of ones, or of zeros for integer dtypes, as indices that are always in range."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return tensor.fill_(1 if dtype.is_floating_point else 0)


def arguments_of_ones(joint: JointGraph, sizes: Mapping[sympy.Symbol, int]) -> list[Any]:
    """Returns arguments for running a joint graph: tensors of ones, of zeros if they may be indices, and numbers."""
    value_of = numbers(sizes)
    return [concrete(node, value_of, _ones) for node in joint.nodes if node.op == "placeholder"]


def _measure(node: fx.Node, number: Evaluate, work: Work) -> Measured | None:
    """Returns the shortest of a few runs, which other processes disturb least; None if the operator does not run."""
    run: Any = node.target
    seconds: list[float] = []
    workspace = 0
    try:
        positional, named = arguments(node, number, _ones)
        # A generator rejects arbitrary bytes as its state.
        if node.target is torch.ops.optimum_memopt.keep_mask.default:
            positional[2] = generator_state(positional[4])
        name = dynamo.operator_name(node.target)
        if name.startswith("packed_attention"):
            *_, value_states, bounds, _, _ = positional
            positional[-3] = equal_parts(bounds, value_states.shape[2])
        is_on_cuda = any(tensor.is_cuda for tensor in tensors_in(positional))
        is_cleared = not is_on_cuda and _SMALL < work.bytes < _LARGE
        cache = torch.ones(_CLEARED // 4 if is_cleared else 0)
        while len(seconds) < _REPEATS and sum(seconds) < _LONG:
            cache.add_(1)
            seconds.append(timed(lambda: run(*positional, **named), is_on_cuda))
        # The buffer of TRL's head has longer rows than a small vocabulary; the unused rest takes no pages.
        if work.flops and not is_on_cuda and not name.startswith("label_log_probs"):
            # The most bytes held at a time, less those held afterwards.
            held = list(itertools.accumulate(kernels.cpu_allocations(lambda: run(*positional, **named)), initial=0))
            workspace = max(held) - held[-1]
    # Any operator may reject tensors of ones; running out of memory is another reason not to measure it.
    except Exception:
        return None
    return Measured(min(seconds), workspace)


def _taken(work: Work) -> float:
    return _TAKEN * work.bytes + (_CLEARED if _SMALL < work.bytes < _LARGE else 0)


def _measure_part(node: fx.Node, sizes: Mapping[sympy.Symbol, int], work: Work, room: int) -> Measured | None:
    """Returns costs scaled from the largest part of the sizes with which an operator fits in `room`; None if none
    does, as with constant sizes."""
    for parts in _PARTS:
        number = numbers({symbol: max(1, size // parts) for symbol, size in sizes.items()})
        with contextlib.suppress(Exception):
            part = work_of_node(node, number)
            if part.bytes and _taken(part) <= room and (cost := _measure(node, number, part)) is not None:
                times = work.flops / part.flops if part.flops else work.bytes / part.bytes
                return Measured(cost.seconds * times, int(cost.workspace * work.bytes / part.bytes))
    return None
