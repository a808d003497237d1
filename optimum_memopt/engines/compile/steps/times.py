"""Seconds of the operators of a joint graph with any micro-batch, and what bounds each."""

import contextlib
import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.analysis.joint import is_view
from optimum_memopt.engines.compile.budget.costs import FUSED, Work, rates, works
from optimum_memopt.engines.compile.budget.devices import Device
from optimum_memopt.engines.compile.budget.in_step import costs_of
from optimum_memopt.engines.compile.memory.symbolic_sizes import SymbolValues
from optimum_memopt.engines.predicted_steps import BANDWIDTH, COMPUTE, LAUNCHES
from optimum_memopt.memory import malloc

# Of a kernel on a GPU, from Python and without CUDA graphs, in seconds: 4 to 8 microseconds on the hosts of this
# decade (pytorch.org/blog/accelerating-pytorch-with-cuda-graphs).
_LAUNCH = 5e-6
# Times each byte of the parameters is read or written by gradient clipping, and by adding up gradients.
_CLIPPING, _ADDING = 3, 3
# Elements of the optimizer's step that is measured.
_MEASURED = 2**22


@dataclass(frozen=True)
class OperatorTimes:
    """Of a joint graph's nodes, in its order.

    Attributes:
        seconds: 0 of what does not run.
        bounds: what bounds each, one of `predicted_steps`.
        source: of the seconds, as `roofline H100`.
    """

    seconds: tuple[float, ...]
    bounds: tuple[str, ...]
    source: str

    def by_bound(self, nodes: Iterable[int]) -> dict[str, float]:
        """Seconds of these nodes, by what bounds them."""
        found: defaultdict[str, float] = defaultdict(float)
        for node in nodes:
            found[self.bounds[node]] += self.seconds[node]
        return {bound: seconds for bound, seconds in found.items() if seconds}


def estimated(graph: AnalyzedGraph, device: Device) -> Callable[[SymbolValues], OperatorTimes]:
    """By a device's rates, as inductor runs the graph. Bytes and operations of any batch follow from those of two.

    Args:
        graph: read, not changed.
        device: whose rates count.
    """
    first = graph.size_hints
    known: dict[tuple[int, ...], tuple[Work | None, ...]] = {}

    def at(values: SymbolValues) -> tuple[Work | None, ...]:
        key = tuple(values[symbol] for symbol in first)
        if key not in known:
            known[key] = works(graph.joint, values)
        return known[key]

    def times(values: SymbolValues) -> OperatorTimes:
        grown = [symbol for symbol in first if values[symbol] != first[symbol]]
        share = values[grown[0]] / first[grown[0]] if grown else 1.0
        double = {symbol: size * (2 if symbol in grown else 1) for symbol, size in first.items()}
        found = [
            work if work is None or more is None else _between(work, more, share - 1)
            for work, more in zip(at(first), at(double) if grown else at(first), strict=True)
        ]
        return _bounded([_on(device, work) for work in found], f"roofline {device.name}")

    return times


def _between(work: Work, more: Work, share: float) -> Work:
    """`work` where `share` is 0, `more` where it is 1: both grow by the row."""
    return replace(
        work,
        bytes=work.bytes + (more.bytes - work.bytes) * share,
        flops=work.flops + (more.flops - work.flops) * share,
    )


def _on(device: Device, work: Work | None) -> tuple[float, str]:
    if work is None:
        return 0.0, ""
    computing, moving = rates(work, device, fused=True)
    launch = _LAUNCH if work.flops else _LAUNCH * FUSED
    if computing + moving < launch:
        return launch, LAUNCHES
    return computing + moving, COMPUTE if computing >= moving else BANDWIDTH


def measured(graph: AnalyzedGraph, device: torch.device, fused: bool) -> Callable[[SymbolValues], OperatorTimes]:
    """Measured where the graph's tensors are, each operator with the batch's own shapes.

    Args:
        graph: read, not changed.
        device: where the graph's tensors are.
        fused: a compiler fuses what is bound by memory, and runs no views.
    """
    launch = launch_seconds(device)

    def one(seconds: float, work: Work | None, is_called: bool) -> tuple[float, str]:
        if work is None:
            return (launch, LAUNCHES) if is_called and not fused else (0.0, "")
        if seconds < 2 * launch:
            return seconds, LAUNCHES
        return seconds, COMPUTE if work.flops else BANDWIDTH

    does_work = works(graph.joint, graph.size_hints)
    is_call = [is_view(node) and node.target is not operator.getitem for node in graph.joint.nodes]

    def times(values: SymbolValues) -> OperatorTimes:
        with _as_in_training(device):
            costs = costs_of(replace(graph, size_hints=values), device, fused)
        return _bounded([*map(one, costs.seconds, does_work, is_call)], costs.source)

    return times


@contextlib.contextmanager
def _as_in_training(device: torch.device) -> Iterator[None]:
    """On a CPU operators write to new pages, which the engine has malloc return to the system."""
    if device.type != "cpu":
        yield
        return
    malloc.return_freed_memory()
    try:
        yield
    finally:
        malloc.restore()


def _bounded(found: Sequence[tuple[float, str]], source: str) -> OperatorTimes:
    return OperatorTimes(tuple(seconds for seconds, _ in found), tuple(bound for _, bound in found), source)


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of what is done to all parameters.

    Attributes:
        accumulating: of adding the gradients of one micro-batch to those before.
        optimizer: of clipping gradients and of the optimizer's step.
    """

    accumulating: float
    optimizer: float


def update_times(parameters: int, states: int, bandwidth: float) -> UpdateTimes:
    """All of it is bound by memory.

    Args:
        parameters: bytes of those that are trained.
        states: bytes of the optimizer's states, each read and written.
        bandwidth: bytes a second.
    """
    # Parameters are read and written, gradients read.
    step = 2 * states + 3 * parameters
    return UpdateTimes(_ADDING * parameters / bandwidth, (step + _CLIPPING * parameters) / bandwidth)


@lru_cache
def launch_seconds(device: torch.device) -> float:
    """Of an operator that does nothing, measured."""
    with torch.no_grad():
        one = torch.ones(1, device=device)
        return _median(lambda: one.add(1), device, repeats=100)


@lru_cache
def update_bandwidth(device: torch.device, elements: int) -> float:
    """Bytes a second of a fused AdamW, measured.

    Args:
        device: where it steps.
        elements: of the parameters; of more than a few million no more are measured.
    """
    parameter = torch.nn.Parameter(torch.ones(min(max(elements, 1), _MEASURED), device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    # Parameter, gradient and two states; all but the gradient are written too.
    return 7 * parameter.nbytes / _median(optimizer.step, device, repeats=5)


def _median(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)
