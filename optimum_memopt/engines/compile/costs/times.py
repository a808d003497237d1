"""Costs of single operators, from the machine's cache, from another rank, or measured now; and seconds of a whole
joint graph that runs on this machine, operator by operator.

An operator takes longer in a graph than by itself: it is called from Python, and its operands are not in a cache. How
much longer depends on its size, and so on the rows of the batch.
"""

import contextlib
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from filelock import FileLock, Timeout
from torch import fx

from optimum_memopt.cache_files import cache_folder, entry_bytes, written_whole
from optimum_memopt.compat.torch import store_of_ranks
from optimum_memopt.engines.api.predictions import BANDWIDTH, COMPUTE, LAUNCHES, PredictedStep
from optimum_memopt.engines.compile.costs import costs as costs_module
from optimum_memopt.engines.compile.costs.costs import (
    Costs,
    Measured,
    arguments_of_ones,
    bounded,
    eager,
    measured,
    roofline,
    timed,
)
from optimum_memopt.engines.compile.costs.fusion import moved_by
from optimum_memopt.engines.compile.costs.graph_work import works
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.joint import is_output, is_view
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.simulator.devices import Device
from optimum_memopt.engines.simulator.work import work_between
from optimum_memopt.memory import process
from optimum_memopt.memory.optimizers import PlannedOptimizer
from optimum_memopt.memory.peak_monitor import held_bytes

if TYPE_CHECKING:
    from torch.distributed import Store


# Minimum bytes for measuring operators, however little is left of a budget: without any measured rate all plans would
# seem to take no time.
_LEAST_MEASURED = 4 * 2**20
# Seconds that a rank waits for another rank's measurement, which takes two at most after waiting for the cache's lock.
_RANK_WAIT = 60.0
# Seconds between two polls of the store.
_LOOK = 0.05
# Seconds that a process waits for the lock: processes that start together measure in turn, the later ones only
# operators that are still missing, two seconds each at most (`measured`).
_LOCK_WAIT = 30.0
# Most bytes of a cost file, in which an operator takes some 200.
_LARGEST_CACHE = 64 * 2**20
# Limits of valid costs: no operator takes an hour, nor a buffer of 256 TiB.
_MOST_SECONDS, _MOST_BYTES = 3600, 2**48


def computed_once(store: "Store", name: str, compute: Callable[[], str], wait: float) -> str:
    """Returns a text that the first rank to request `name` computes and all others take from it.

    It is shared through the process group's key-value store, not by a collective operation, which every rank would
    have to reach, even if only one of them recompiles.

    Args:
        compute: called on the first rank; on another rank only if the first has failed or not answered in time.
        wait: seconds to wait for the first rank.
    """
    key = f"optimum_memopt/{hashlib.sha256(name.encode()).hexdigest()}"
    try:
        is_first = store.add(f"{key}/asked", 1) == 1
    # Not every store supports `add`: that of torch's backend `fake` does not.
    except RuntimeError:
        return compute()
    if is_first:
        text = ""
        try:
            text = compute()
        finally:
            store.set(key, text)
        return text
    end = time.monotonic() + wait
    while not store.check([key]):
        if time.monotonic() > end:
            return compute()
        time.sleep(_LOOK)
    return store.get(key).decode() or compute()


def data_folder() -> Path:
    """Returns the folder of cached costs and plans; for a user without a home, it is in a temporary folder."""
    return cache_folder() or Path(tempfile.gettempdir()) / f"optimum_memopt-{os.getuid()}"


def cache_path(device: torch.device) -> Path:
    """Returns the cost file for a device, this version of torch and this package's measuring code."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {psutil.cpu_count()} cores {torch.get_num_threads()} threads"
    name = f"operators {name} torch {torch.__version__} {_measuring()}"
    return data_folder() / f"{name}.json".replace(" ", "-").replace("/", "-")


@lru_cache(maxsize=1)
def _measuring() -> str:
    """Returns a digest of the measuring code: other versions may measure other operators or values."""
    return hashlib.sha256(Path(costs_module.__file__).read_bytes()).hexdigest()[:8]


@contextlib.contextmanager
def known_costs(path: Path) -> Iterator[dict[str, Measured]]:
    """Yields costs by operator, to read and to extend, and writes them back afterwards. Invalid entries of a file are
    ignored, and measured again. If the file system has locks, only one process uses a file at a time."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(path.with_suffix(".lock"), timeout=_LOCK_WAIT))
        cached = _read(path)
        before = len(cached)
        yield cached
        # Replaced as a whole, for readers that did not get the lock.
        if len(cached) > before:
            written_whole(path, json.dumps(cached))


def _read(path: Path) -> dict[str, Measured]:
    try:
        entries = json.loads((entry_bytes(path, _LARGEST_CACHE) or b"").decode())
    # RecursionError: the JSON is nested too deeply.
    except (ValueError, RecursionError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: Measured(float(entry[0]), entry[1]) for key, entry in entries.items() if _is_cost(entry)}


def _is_cost(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    seconds, workspace = entry
    # Exact types, since Python's True is an int; comparisons with NaN are false.
    is_time = type(seconds) in (int, float) and 0 < seconds <= _MOST_SECONDS
    return is_time and type(workspace) is int and 0 <= workspace <= _MOST_BYTES


def costs_of(
    graph: AnalyzedGraph, device: torch.device, fused: bool, target: Device | None = None, most: int | None = None
) -> Costs:
    """Returns the costs of all operators of a graph.

    Ranks with the same device plan with one rank's measurements, also on several machines: two measurements are never
    equal, and could lead to plans with different peaks.

    Args:
        fused: a compiler fuses memory-bound operators.
        target: the device to estimate for; None: operators are measured on `device`.
        most: bytes that the process may hold while it measures; None: all that is available.
    """
    if target is not None:
        return roofline(graph.joint, graph.size_hints, target, fused)
    path, of_joint = cache_path(device), works(graph.joint, graph.size_hints)
    room = None if most is None else max(_LEAST_MEASURED, most - held_bytes(device))
    costs = partial(measured, graph.joint, graph.size_hints, of_joint, fused, room=room)
    if (store := store_of_ranks()) is None:
        with known_costs(path) as cached:
            return costs(cached)
    operators = sorted({work.key for work in of_joint if work is not None})

    def measure() -> str:
        with known_costs(path) as cached:
            costs(cached)
            return json.dumps({operator: cached[operator] for operator in operators if operator in cached})

    of_ranks = json.loads(computed_once(store, "\n".join((path.name, *operators)), measure, _RANK_WAIT))
    return costs({operator: Measured(*cost) for operator, cost in of_ranks.items()}, limit=0)


# Measured runs of each batch.
_ROUNDS = 3
# Reads and writes of each parameter byte when gradients are accumulated.
_ADDING = 3
# Most parameter elements in the measured optimizer step.
_MEASURED = 2**22
# Batch sizes from which others are extrapolated: for work, linear above one tile, and for measured seconds.
_TWO = (64, 128)
_MEASURED_ROWS = ((1, 4, 16), (1, 2, 8), (1, 4), (1, 2))
# Batches that are expected to take this many seconds or more are not run.
_LONG = 1.0
# Lengths of the two chains of operators from which the overhead of a call is computed.
_CHAINS = (8, 72)
# Returns the values of a graph's symbols for a number of rows.
Sizes = Callable[[int], SymbolValues]


def replayed(graph: AnalyzedGraph, batches: Sequence[SymbolValues]) -> list[float] | None:
    """Returns each batch's seconds of forward and backward with everything saved; None if tensors of ones fail.

    Batches are run in turn, since a machine's speed varies.
    """
    # The tracer's module takes its placeholders as lists, this one takes them one by one.
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.joint.module.graph, {}))
    run = fx.GraphModule(graph.joint.module, copied)

    def seconds(sizes: SymbolValues) -> float:
        inputs = arguments_of_ones(graph.joint, sizes)
        return timed(lambda: run(*inputs), any(isinstance(given, torch.Tensor) and given.is_cuda for given in inputs))

    with eager(graph.joint):
        # As with single operators, any operator may reject tensors of ones, and memory may run out.
        try:
            # The first round warms up.
            rounds = [[seconds(sizes) for sizes in batches] for _ in range(1 + _ROUNDS)][1:]
        except Exception:
            return None
    return [statistics.median(of_batch) for of_batch in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class OperatorTimes:
    """Times of a joint graph's nodes, in order.

    Attributes:
        bounds: what bounds each node, see `predictions`.
        source: the source of the seconds, see `Costs`.
        call: overhead in seconds of a call of forward and backward, in addition to their operators.
    """

    seconds: tuple[float, ...]
    bounds: tuple[str, ...]
    source: str
    call: float = 0.0

    def by_bound(self, nodes: Iterable[int]) -> dict[str, float]:
        """Returns the seconds of these nodes, by what bounds them."""
        totals: defaultdict[str, float] = defaultdict(float)
        for node in nodes:
            totals[self.bounds[node]] += self.seconds[node]
        return {bound: seconds for bound, seconds in totals.items() if seconds}


def estimated(graph: AnalyzedGraph, sizes: Sizes, device: Device, fused: bool) -> Callable[[int], OperatorTimes]:
    """Estimates times by a device's rates, see `bounded`; work grows linearly with the rows.

    Returns:
        The times for a number of rows.
    """
    moved = moved_by(graph.joint) if fused else None
    low, high = (works(graph.joint, sizes(rows), moved, device.kind) for rows in _TWO)
    nodes = [node for node, work in enumerate(low) if work is not None]
    one, two = ([work for work in of_batch if work is not None] for of_batch in (low, high))

    def times(rows: int) -> OperatorTimes:
        found = [(0.0, "")] * len(low)
        share = (rows - _TWO[0]) / (_TWO[1] - _TWO[0])
        for node, work in zip(nodes, work_between(one, two, share) or (), strict=True):
            found[node] = bounded(work, device)
        return _bounded(found, f"roofline {device.name}")

    return times


def measured_times(
    graph: AnalyzedGraph, sizes: Sizes, device: torch.device, fused: bool, budget: int, peak: Callable[[int], int]
) -> Callable[[int], OperatorTimes]:
    """Measures times on the device of the graph's tensors, with a few batch sizes; other sizes are extrapolated.

    If each batch size were measured by itself, the best one would be where the measurement erred most. A graph that
    runs operator by operator is also run as a whole, and its operators' times are scaled to that.

    Args:
        fused: a compiler fuses memory-bound operators, and runs no views.
        budget: bytes; a measured operator takes at most a quarter of them, if possible.
        peak: returns the bytes that the graph holds for a number of rows; batches over the budget are not run.

    Returns:
        The times for a number of rows.
    """

    def largest(rows: int) -> float:
        return max((work.bytes for work in works(graph.joint, sizes(rows)) if work is not None), default=0)

    batches = next((rows for rows in _MEASURED_ROWS if largest(rows[-1]) <= budget // 4), _MEASURED_ROWS[-1])
    with _as_in_training(device):
        costs = [costs_of(replace(graph, size_hints=sizes(rows)), device, fused) for rows in batches]
        launch, (operator_overhead, call) = launch_seconds(device), (0.0, 0.0) if fused else overheads(device)
    does_work = works(graph.joint, sizes(1))
    # A larger batch cannot take less time: such measurements are noise.
    of_nodes = np.maximum.accumulate([cost.seconds for cost in costs]).T.tolist()
    is_called = [is_view(node) and not is_output(node) for node in graph.joint.nodes]

    def of_node(rows: int, number: int) -> tuple[float, str]:
        work = does_work[number]
        if work is None:
            return (operator_overhead, LAUNCHES) if is_called[number] else (0.0, "")
        measured_seconds = of_nodes[number]
        if rows <= batches[-1]:
            seconds = float(np.interp(rows, batches, measured_seconds))
        else:
            low, high = measured_seconds[-2:]
            seconds = low + (high - low) * (rows - batches[-2]) / (batches[-1] - batches[-2])
        seconds += max(0.0, operator_overhead - launch)
        if seconds < 2 * max(launch, operator_overhead):
            return seconds, LAUNCHES
        return seconds, COMPUTE if work.flops else BANDWIDTH

    def alone(rows: int) -> list[tuple[float, str]]:
        return [of_node(rows, number) for number in range(len(does_work))]

    factors = [(1, 1.0)]
    if not fused:
        expected = {rows: sum(seconds for seconds, _ in alone(rows)) for rows in batches if peak(rows) <= budget}
        run = [rows for rows, seconds in expected.items() if seconds < _LONG]
        with _as_in_training(device):
            whole = replayed(graph, [sizes(rows) for rows in run]) if run else None
        if whole is not None:
            factors = [(rows, seconds / expected[rows]) for rows, seconds in zip(run, whole, strict=True)]

    def times(rows: int) -> OperatorTimes:
        factor = float(np.interp(rows, *np.transpose(factors)))
        in_graph = [(factor * seconds, bound) for seconds, bound in alone(rows)]
        return replace(_bounded(in_graph, costs[-1].source), call=call)

    return times


@contextlib.contextmanager
def _as_in_training(device: torch.device) -> Iterator[None]:
    """Run operators as in training: on a CPU, malloc returns freed pages to the system, so that operators write to new
    pages."""
    if device.type != "cpu":
        yield
        return
    process.return_freed_memory()
    try:
        yield
    finally:
        process.restore_malloc()


def _bounded(times: Sequence[tuple[float, str]], source: str) -> OperatorTimes:
    return OperatorTimes(tuple(seconds for seconds, _ in times), tuple(bound for _, bound in times), source)


@dataclass(frozen=True)
class UpdateTimes:
    """Seconds of the work on all parameters.

    Attributes:
        accumulating: seconds to add the gradients of one micro-batch to earlier ones.
        optimizer: seconds to clip gradients and to run the optimizer's step.
    """

    accumulating: float
    optimizer: float

    def step(self, micro_batch: Mapping[str, float], count: int) -> float:
        """Returns the seconds of an optimizer step with `count` micro-batches.

        Args:
            micro_batch: seconds of one micro-batch, by what bounds them.
        """
        return PredictedStep(0, micro_batch, self.accumulating, self.optimizer).total(count)


def update_times(
    trained: Sequence[torch.Tensor], optimizer: PlannedOptimizer, device: torch.device, target: Device | None
) -> UpdateTimes:
    """Computes the seconds from a bandwidth, which bounds all of this work: the kernels' bandwidth on `target`, or
    measured on `device`.

    Args:
        trained: the parameters that get gradients.
        target: the device to estimate for; None: `device` is measured.
    """
    rate = update_bandwidth(device, sum(each.numel() for each in trained)) if target is None else target.memory_rate
    return UpdateTimes(_ADDING * sum(each.nbytes for each in trained) / rate, optimizer.moved(trained) / rate)


@lru_cache
def overheads(device: torch.device) -> tuple[float, float]:
    """Returns the overhead in seconds of each operator in a graph that runs operator by operator, and of a call of its
    forward and backward, including guards and the autograd function.

    Measured on two compiled chains of small operators. In a graph each operator is called from Python, on tensors that
    are not in a cache, so that it takes several times as long as in a loop.
    """

    def seconds(length: int) -> float:
        def chain(x: torch.Tensor) -> torch.Tensor:
            for _ in range(length):
                x = torch.sin(x)
            return x.sum()

        compiled = torch.compile(chain, backend="aot_eager", dynamic=False)
        x = torch.ones(64, device=device, requires_grad=True)
        compiled(x).backward()
        return _shortest(lambda: compiled(x).backward(), device, repeats=10)

    short, long = (seconds(length) for length in _CHAINS)
    # Three operators per link: sine in the forward, cosine and product in the backward.
    operator = max(0.0, (long - short) / (3 * (_CHAINS[1] - _CHAINS[0])))
    return operator, max(0.0, short - 3 * _CHAINS[0] * operator)


@lru_cache
def launch_seconds(device: torch.device) -> float:
    """Measures the seconds of an operator that does almost nothing."""
    with torch.no_grad():
        number = torch.ones(1, device=device)
        return _shortest(lambda: number.add(1), device, repeats=100)


@lru_cache
def update_bandwidth(device: torch.device, elements: int) -> float:
    """Measures the bytes per second of a fused AdamW with that many elements, or a few million if there are more."""
    parameter = torch.nn.Parameter(torch.ones(min(max(elements, 1), _MEASURED), device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    # It reads the parameter, the gradient and two states, and writes all but the gradient.
    return 7 * parameter.nbytes / _shortest(optimizer.step, device, repeats=5)


def _shortest(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    return min(timed(run, device.type == "cuda") for _ in range(repeats))
