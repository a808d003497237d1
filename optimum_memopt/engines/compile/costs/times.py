"""Costs of single operators, from the machine's cache, from another rank, or measured now; and seconds of a whole
joint graph that is run on this machine, operator by operator.

An operator takes longer in a graph than by itself: it is called from Python, and finds its operands in no cache. How
much longer depends on its size, so on the rows of the batch.
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

from optimum_memopt.cache_files import entry_bytes, written_whole
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
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.costs.fusion import moved_by
from optimum_memopt.engines.compile.costs.work import work_between, works
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.joint import is_output, is_view
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.memory import process
from optimum_memopt.memory.optimizers import PlannedOptimizer
from optimum_memopt.memory.peak_monitor import held_bytes

if TYPE_CHECKING:
    from torch.distributed import Store


# Bytes that operators are measured with however little is left of a budget: without any measured rate all plans would
# seem to take no time.
_LEAST_MEASURED = 4 * 2**20
# Seconds that a rank waits for what another one measures, which takes two at most, behind the lock of a cache.
_RANK_WAIT = 60.0
# Seconds between two looks into the store.
_LOOK = 0.05
# Seconds that a process waits for the lock: those that start together measure one after the other, the later ones what
# is new to them, two seconds each at most (`measured`).
_LOCK_WAIT = 30.0
# Bytes of a file of costs, of which an operator takes some 200.
_LARGEST_CACHE = 64 * 2**20
# No operator takes an hour, nor a buffer of 256 TiB.
_MOST_SECONDS, _MOST_BYTES = 3600, 2**48


def computed_once(store: "Store", name: str, compute: Callable[[], str], wait: float) -> str:
    """The text that the first rank that asks for `name` computes, and all others take from it.

    By the key-value store of the process group, not by a collective operation: that every rank would have to reach,
    also where only one of them compiles again.

    Args:
        compute: called on the first rank; on another one, if the first has failed or has not answered in time.
    """
    key = f"optimum_memopt/{hashlib.sha256(name.encode()).hexdigest()}"
    try:
        is_first = store.add(f"{key}/asked", 1) == 1
    # Not every store counts: torch's backend `fake` has none that does.
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


def cache_folder() -> Path:
    """The user's cache of this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "optimum_memopt"


def cache_path(device: torch.device) -> Path:
    """The file of a device under this version of torch, as this version of the package measures."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {psutil.cpu_count()} cores {torch.get_num_threads()} threads"
    name = f"operators {name} torch {torch.__version__} {_measuring()}"
    return cache_folder() / f"{name}.json".replace(" ", "-").replace("/", "-")


@lru_cache(maxsize=1)
def _measuring() -> str:
    """A digest of the code that measures: another version may leave out what this one has noted."""
    return hashlib.sha256(Path(costs_module.__file__).read_bytes()).hexdigest()[:8]


def _home() -> Path:
    try:
        return Path.home()
    # Neither HOME nor an entry for the user, as in a container that runs under any number.
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"optimum_memopt-{os.getuid()}"


@contextlib.contextmanager
def known_costs(path: Path) -> Iterator[dict[str, Measured]]:
    """Costs by operator, to read and to add to; written back afterwards. What is no cost in a file is left out, and
    measured again. Only one process has them at a time, where the file system has locks."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(path.with_suffix(".lock"), timeout=_LOCK_WAIT))
        cached = _read(path)
        before = len(cached)
        yield cached
        # For a reader that has not got the lock, too.
        if len(cached) > before:
            written_whole(path, json.dumps(cached))


def _read(path: Path) -> dict[str, Measured]:
    try:
        entries = json.loads((entry_bytes(path, _LARGEST_CACHE) or b"").decode())
    # RecursionError: nested too deeply.
    except (ValueError, RecursionError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: Measured(float(entry[0]), entry[1]) for key, entry in entries.items() if _is_cost(entry)}


def _is_cost(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    seconds, workspace = entry
    # Exact types, since true is a number of Python's; NaN compares as false.
    is_time = type(seconds) in (int, float) and 0 < seconds <= _MOST_SECONDS
    return is_time and type(workspace) is int and 0 <= workspace <= _MOST_BYTES


def costs_of(
    graph: AnalyzedGraph, device: torch.device, fused: bool, target: Device | None = None, most: int | None = None
) -> Costs:
    """The costs of all operators of a graph.

    Ranks with the same device plan with what one of them has measured, also on several machines: two measurements are
    never equal, and two plans may have different peaks.

    Args:
        fused: a compiler fuses what is bound by memory.
        target: estimate for this device instead.
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


# Times that each batch is run.
_ROUNDS = 3
# Times each byte of the parameters is read or written by adding up gradients.
_ADDING = 3
# Elements of the optimizer's step that is measured.
_MEASURED = 2**22
# Batch sizes that other sizes are extrapolated from: for work, linear above one tile, and for measured seconds.
_TWO = (64, 128)
_MEASURED_ROWS = ((1, 4, 16), (1, 2, 8), (1, 4), (1, 2))
# A batch that takes n seconds is not run to measure it.
_LONG = 1.0
# Lengths of the chains that tell what calling an operator takes.
_CHAINS = (8, 72)
# The values of a graph's symbols for a batch of n rows.
Sizes = Callable[[int], SymbolValues]


def replayed(graph: AnalyzedGraph, batches: Sequence[SymbolValues]) -> list[float] | None:
    """Seconds of a forward and its backward with everything saved; None where it cannot be run on tensors of ones.

    Batches are run in turns: a machine is not always as fast.
    """
    # The tracer's module takes lists of its placeholders, this one takes them one by one.
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.joint.module.graph, {}))
    run = fx.GraphModule(graph.joint.module, copied)

    def seconds(sizes: SymbolValues) -> float:
        inputs = arguments_of_ones(graph.joint, sizes)
        return timed(lambda: run(*inputs), any(isinstance(given, torch.Tensor) and given.is_cuda for given in inputs))

    with eager(graph.joint):
        # As where single operators are measured: any may refuse ones, and memory may run out.
        try:
            # The first round warms up.
            rounds = [[seconds(sizes) for sizes in batches] for _ in range(1 + _ROUNDS)][1:]
        except Exception:
            return None
    return [statistics.median(of_batch) for of_batch in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class OperatorTimes:
    """Times of a joint graph's nodes, in its order.

    Attributes:
        bounds: what bounds each, one of `predictions`.
        call: seconds of a forward and its backward beside their operators.
    """

    seconds: tuple[float, ...]
    bounds: tuple[str, ...]
    source: str
    call: float = 0.0

    def by_bound(self, nodes: Iterable[int]) -> dict[str, float]:
        """Seconds of these nodes, by what bounds them."""
        totals: defaultdict[str, float] = defaultdict(float)
        for node in nodes:
            totals[self.bounds[node]] += self.seconds[node]
        return {bound: seconds for bound, seconds in totals.items() if seconds}


def estimated(graph: AnalyzedGraph, sizes: Sizes, device: Device, fused: bool) -> Callable[[int], OperatorTimes]:
    """Estimated by a device's rates, see `bounded`; work grows by the row."""
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
    """Measured where the graph's tensors are, with a few batches; those of any other follow.

    A measurement of each batch by itself would find the best one where it has erred most. Where the graph is run
    operator by operator, it is also run as a whole, and its operators take a part of that.

    Args:
        fused: a compiler fuses what is bound by memory, and runs no views.
        budget: bytes; of it no operator that is measured takes more than a quarter, where that is possible.
        peak: bytes that the graph holds, for a batch of n rows; it is not run where that is over the budget.
    """

    def largest(rows: int) -> float:
        return max((work.bytes for work in works(graph.joint, sizes(rows)) if work is not None), default=0)

    batches = next((rows for rows in _MEASURED_ROWS if largest(rows[-1]) <= budget // 4), _MEASURED_ROWS[-1])
    with _as_in_training(device):
        costs = [costs_of(replace(graph, size_hints=sizes(rows)), device, fused) for rows in batches]
        launch, (operator_overhead, call) = launch_seconds(device), (0.0, 0.0) if fused else overheads(device)
    does_work = works(graph.joint, sizes(1))
    # A larger batch takes no less: what says so is noise.
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
    """On a CPU operators write to new pages, which the engine has malloc return to the system."""
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
    """Seconds of what is done to all parameters.

    Attributes:
        accumulating: of adding the gradients of one micro-batch to those before.
        optimizer: of clipping gradients and of the optimizer's step.
    """

    accumulating: float
    optimizer: float

    def step(self, micro_batch: Mapping[str, float], count: int) -> float:
        """Seconds of an optimizer step of several micro-batches; those of one are by what bounds them."""
        return PredictedStep(0, micro_batch, self.accumulating, self.optimizer).total(count)


def update_times(
    trained: Sequence[torch.Tensor], optimizer: PlannedOptimizer, device: torch.device, target: Device | None
) -> UpdateTimes:
    """Seconds at a bandwidth, which bounds all of it: that of a device's kernels, or measured where tensors lie.

    Args:
        trained: the parameters that get gradients.
        target: None: `device`.
    """
    rate = update_bandwidth(device, sum(each.numel() for each in trained)) if target is None else target.memory_rate
    return UpdateTimes(_ADDING * sum(each.nbytes for each in trained) / rate, optimizer.moved(trained) / rate)


@lru_cache
def overheads(device: torch.device) -> tuple[float, float]:
    """Seconds of each operator of a graph that runs operator by operator, and of a call of its forward and backward,
    guards and autograd's function among it.

    Measured on two compiled chains of small operators. In a graph each is called from Python, on tensors that are
    not in a cache, so that it takes several times what it does in a loop.
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
    # Forward sine, backward cosine and product.
    operator = max(0.0, (long - short) / (3 * (_CHAINS[1] - _CHAINS[0])))
    return operator, max(0.0, short - 3 * _CHAINS[0] * operator)


@lru_cache
def launch_seconds(device: torch.device) -> float:
    """Seconds of an operator that does nothing, measured."""
    with torch.no_grad():
        number = torch.ones(1, device=device)
        return _shortest(lambda: number.add(1), device, repeats=100)


@lru_cache
def update_bandwidth(device: torch.device, elements: int) -> float:
    """Bytes a second of a fused AdamW with that many elements, of which a few million at most are measured."""
    parameter = torch.nn.Parameter(torch.ones(min(max(elements, 1), _MEASURED), device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    # Parameter, gradient and two states; all but the gradient are written too.
    return 7 * parameter.nbytes / _shortest(optimizer.step, device, repeats=5)


def _shortest(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    return min(timed(run, device.type == "cuda") for _ in range(repeats))
