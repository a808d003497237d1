"""Measurements: a few training steps of one case in a process of its own, with peak and time as JSON; and
`memopt plan --measure`, which runs no plan, both levels and each row alone, then searches for the set of rows with the
lowest peak.

    python -m optimum_memopt.measure < case.json

A step is forward and backward; an optimizer's states come on top, the same for every case. The first step compiles
the model and is not measured.

Savings do not add up: one row's recompute may read what another row drops, or keep it alive. So the search measures
sets. It starts from sets that are known to be good (which hold rows that only help together), removes rows, then adds
rows, until changing any single row makes it no better.
"""

import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tabulate import tabulate

from optimum_memopt.errors import MemOptError, run
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.predict.workload import Workload

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


_REMARK = "[memopt] "
_MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A case that one process trains.

    Attributes:
        options: fields of `MemOptOptions`; None trains with plain PyTorch.
        steps: measured steps after the first.
        bf16: forwards run under autocast to bfloat16, as with Trainer's `--bf16`.
        optimizer: each step ends with one of a fused AdamW, Trainer's default.
    """

    workload: Workload
    options: Mapping[str, Any] | None = field(default_factory=dict)
    steps: int = 2
    bf16: bool = False
    optimizer: bool = False

    def prepare(self, model: Any) -> None:
        """Change the model, on its device, before an engine is attached; a hook for baselines."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Self":
        data = json.loads(text)
        workload = data["workload"]
        workload["trainable"] = tuple(workload["trainable"])
        return cls(**{**data, "workload": Workload(**workload)})


@dataclass(frozen=True)
class Measurement:
    """Memory and time of a case.

    Attributes:
        peak_mib: peak memory of the measured steps: resident on the CPU; on CUDA allocated by torch, plus what an
            engine with an allocator of its own took.
        held_mib: of that, what is held between steps: weights, the optimizer's states, libraries.
        step_seconds: wall time of a step, median.
        cpu_seconds: CPU time of a step, median; on a busy machine it varies less than wall time.
        method: `exact`, or `sampled` where the system cannot reset the high-water mark of resident memory.
        table: the engine's plan table, None for plain PyTorch.
        remarks: what the package logged.
    """

    peak_mib: float
    step_seconds: float
    cpu_seconds: float
    method: str = "exact"
    table: PlanTable | None = None
    remarks: tuple[str, ...] = ()
    held_mib: float = 0.0

    @property
    def activations_mib(self) -> float:
        """The peak over what is held between steps: activations, gradients and workspaces."""
        return self.peak_mib - self.held_mib

    @property
    def engine_table(self) -> PlanTable:
        """The table; raises MemOptError where plain PyTorch trained the case."""
        if self.table is None:
            raise MemOptError("a case without an engine has no plan table")
        return self.table

    @property
    def claimed_bytes(self) -> int:
        return self.table.claimed_saving_bytes if self.table else 0

    @property
    def applied(self) -> frozenset[str]:
        """The `cluster_id:strategy:-1` that the engine reports as applied."""
        enabled = self.table.enabled if self.table else ()
        return frozenset(part for plan in enabled for part in plan.config.split(","))

    def to_json(self) -> str:
        return json.dumps({**vars(self), "table": self.table and self.table.to_json()})

    @classmethod
    def from_json(cls, text: str) -> "Measurement":
        data = json.loads(text)
        table = data["table"] and PlanTable.from_json(data["table"])
        return cls(**{**data, "table": table, "remarks": tuple(data["remarks"])})


def measure(case: Case) -> Measurement:
    """Run the case in this process, which should be fresh. Raises MemOptError where the engine cannot train it."""
    import torch

    from optimum_memopt.engines.api.run import AUTO
    from optimum_memopt.engines.shared.registry import factory
    from optimum_memopt.loop import optimize
    from optimum_memopt.memory import process
    from optimum_memopt.memory.peak_monitor import PeakMonitor

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = case.workload.build()
    model.to(device)
    # The context and the libraries that are loaded by now are no engine's.
    occupied = _outside_torch_mib(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    case.prepare(model)
    engine = None
    if case.options is not None:
        name = case.options.get("memory_opt_engine", AUTO)
        own = {} if name == AUTO else factory(name).options_to_measure
        engine = optimize(model, **{"memory_opt_log_level": "warning", **own, **case.options})
    if engine is None:
        # As engines set it up.
        process.return_freed_memory()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if case.optimizer else None
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.bf16)
    _step(model, batch, autocast, optimizer)
    monitor = PeakMonitor(device)
    monitor.start_run()
    # Nothing has run since, so the peak so far is what is held.
    held = monitor.run_peak
    times = [_step(model, batch, autocast, optimizer) for _ in range(case.steps)]
    allocates = engine is not None and factory(engine.name).allocates_outside_torch
    own_memory = max(0.0, _outside_torch_mib(device) - occupied) if allocates else 0.0
    return Measurement(
        peak_mib=monitor.run_peak + own_memory,
        step_seconds=statistics.median(wall for wall, _ in times),
        cpu_seconds=statistics.median(cpu for _, cpu in times),
        method=monitor.method,
        table=engine.plans() if engine else None,
        held_mib=held,
    )


def _step(
    model: "torch.nn.Module",
    batch: Mapping[str, "torch.Tensor"],
    autocast: contextlib.AbstractContextManager,
    optimizer: "torch.optim.Optimizer | None",
) -> tuple[float, float]:
    """Wall and CPU seconds of forward, backward and the optimizer's step."""
    wall, cpu = time.perf_counter(), time.process_time()
    with autocast:
        loss = model(**batch).loss
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    loss.item()
    model.zero_grad()
    return time.perf_counter() - wall, time.process_time() - cpu


def _outside_torch_mib(device: "torch.device") -> float:
    """GPU memory in use that is not torch's allocator's: of this process and of others. ONNX Runtime has an arena that
    never shrinks: what it holds at the end is its peak."""
    import torch

    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / _MIB


def spawn(case: Case, program: Sequence[str] = ("-m", "optimum_memopt.measure")) -> Measurement:
    """Measure the case in a fresh process.

    Args:
        program: a Python script or module that calls `main` with the case's class.

    Raises:
        MemOptError: the process failed; the message is the last line of its error.
    """
    done = subprocess.run([sys.executable, *program], input=case.to_json(), capture_output=True, text=True)
    if done.returncode != 0:
        raise MemOptError(_reason(done.returncode, done.stderr))
    remarks = (line.removeprefix(_REMARK) for line in done.stderr.splitlines() if line.startswith(_REMARK))
    return replace(Measurement.from_json(done.stdout.splitlines()[-1]), remarks=tuple(dict.fromkeys(remarks)))


def _reason(returncode: int, stderr: str) -> str:
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = ", probably out of memory" if -returncode == signal.SIGKILL else ""
        return f"the measured process was killed by {name}{hint}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"the measured process failed with exit code {returncode}"


def main(kind: type[Case] = Case) -> None:
    """Measure the case on standard input, one of the class `kind`."""
    print(run(lambda: measure(kind.from_json(sys.stdin.read())).to_json()))


# `cluster_id:strategy:-1`, each; a row of the plan table has one, or several that only save together.
Rows = frozenset[str]
NOTHING: Rows = frozenset()

# Peaks of one case differ by about 0.1% between processes, times by a few percent.
PEAK_TOLERANCE = 0.005
TIME_TOLERANCE = 0.05
# A row that claims a smaller part of the peak is within the noise, so no process is started for it.
SMALLEST_CLAIM = 0.001
_SET = "set"


class Outcome(NamedTuple):
    """The measurement of a set of rows: peak (any unit, infinite when it failed) and seconds per step."""

    peak: float
    seconds: float


FAILED = Outcome(math.inf, math.inf)


@dataclass
class RowSearch:
    """A search over sets of rows.

    Attributes:
        rows: those that may be turned on, as rows of the plan table.
        measure: called once for each set.
        budget: most measurements that it may start.
        outcomes: every set measured so far.
        complete: False when the search ran out of budget.
    """

    rows: Sequence[Rows]
    measure: Callable[[Rows], Outcome]
    budget: int
    outcomes: dict[Rows, Outcome] = field(default_factory=dict)
    complete: bool = True

    def run(self, starts: Iterable[Rows]) -> Rows:
        """The set with the lowest peak; of those that measure the same within `PEAK_TOLERANCE`, the fastest, and of
        those that are as fast within `TIME_TOLERANCE`, the smallest.

        Args:
            starts: sets to begin with, in addition to those in `outcomes`; one of the two has a set.
        """
        for start in starts:
            self._outcome(start)
        current = min(self.outcomes, key=lambda rows: self.outcomes[rows])
        while True:
            before = current
            current = self._up(self._down(current))
            if current == before or not self.complete:
                return self._choose()

    def _down(self, current: Rows) -> Rows:
        """Remove each row that does not lower the peak, since its recompute takes time."""
        for row in self._least_helpful_first():
            fewer = without_row(current, row, self.rows)
            if fewer != current and self._outcome(fewer).peak <= self._lowest() * (1 + PEAK_TOLERANCE):
                current = fewer
        return current

    def _up(self, current: Rows) -> Rows:
        """Add each row that lowers the peak further."""
        for row in reversed(self._least_helpful_first()):
            more = with_row(current, row)
            if more != current and self._outcome(more).peak < self.outcomes[current].peak * (1 - PEAK_TOLERANCE):
                current = more
        return current

    def _least_helpful_first(self) -> list[Rows]:
        alone = {row: self.outcomes.get(row, FAILED).peak for row in self.rows}
        return sorted(self.rows, key=lambda row: (-alone[row], sorted(row)))

    def _lowest(self) -> float:
        return min(outcome.peak for outcome in self.outcomes.values())

    def _outcome(self, rows: Rows) -> Outcome:
        if rows not in self.outcomes:
            if self.budget <= 0:
                self.complete = False
                return FAILED
            self.budget -= 1
            self.outcomes[rows] = self.measure(rows)
        return self.outcomes[rows]

    def _choose(self) -> Rows:
        lowest = self._lowest() * (1 + PEAK_TOLERANCE)
        low = {rows: outcome for rows, outcome in self.outcomes.items() if outcome.peak <= lowest}
        fastest = min(outcome.seconds for outcome in low.values()) * (1 + TIME_TOLERANCE)
        fast = {rows: outcome for rows, outcome in low.items() if outcome.seconds <= fastest}
        return min(fast, key=lambda rows: (len(rows), fast[rows].peak, sorted(rows)))


def with_row(current: Rows, row: Rows) -> Rows:
    """`current` with a row on; an id has one strategy, so the row's replaces another."""
    ids = {_cluster_id(part) for part in row}
    return frozenset(part for part in current if _cluster_id(part) not in ids) | row


def without_row(current: Rows, row: Rows, rows: Iterable[Rows]) -> Rows:
    """`current` with a row off, along with parts that only it needs; other rows that are on stay complete."""
    on = [other for other in rows if other <= current]
    return NOTHING.union(*(other for other in on if not row <= other)) if row in on else current


def _cluster_id(part: str) -> str:
    return part.split(":")[0]


@dataclass(frozen=True)
class MeasuredCase:
    """One measured case; `measurement` is None and `error` says why where its process failed."""

    name: str
    options: Mapping[str, Any]
    measurement: Measurement | None
    error: str = ""

    @property
    def measured(self) -> Measurement:
        """The measurement; raises MemOptError with `error` where there is none."""
        if self.measurement is None:
            raise MemOptError(self.error)
        return self.measurement

    @property
    def outcome(self) -> Outcome:
        measurement = self.measurement
        return FAILED if measurement is None else Outcome(measurement.peak_mib, measurement.step_seconds)

    def saving_bytes(self, no_plan: "MeasuredCase") -> int | None:
        """How far the peak is below that of `no_plan`; None where the run failed."""
        return None if self.measurement is None else round((no_plan.outcome.peak - self.outcome.peak) * _MIB)

    def to_dict(self) -> dict[str, Any]:
        if self.measurement is None:
            return {**self.options, "peak_mib": None}
        return {
            **self.options,
            "peak_mib": self.measurement.peak_mib,
            "step_seconds": self.measurement.step_seconds,
            "cpu_seconds": self.measurement.cpu_seconds,
            "claimed_saving_bytes": self.measurement.claimed_bytes,
            "applied": sorted(self.measurement.applied),
        }


@dataclass(frozen=True)
class Sweep:
    """The measured runs of a sweep.

    Attributes:
        runs: in order; the first is the one without a plan.
        table: the rows of the graph, with a measured column.
        winner: one of the runs, with the lowest peak.
        complete: False when the search reached the number of processes allowed.
    """

    runs: tuple[MeasuredCase, ...]
    table: PlanTable
    winner: MeasuredCase
    complete: bool

    def to_text(self) -> str:
        """Both tables, what failed, and the winner as an option to paste."""
        cells = [self._cells(run) for run in self.runs if run.name != _SET or run is self.winner]
        peak, no_plan_peak = self.winner.measured.peak_mib, self.runs[0].measured.peak_mib
        how = "search complete" if self.complete else "search not finished: raise --max_runs"
        lowest = f"{peak:.1f} MiB, {peak / no_plan_peak:.2f} of no plan"
        lines = [
            self.table.to_text(),
            "",
            tabulate(cells, headers="keys", tablefmt="simple", disable_numparse=True),
            *(f"failed: {run.name}: {run.error}" for run in self.runs if run.error),
            "",
            f"Lowest peak of {len(self.runs)} runs ({how}): {lowest}, with",
            _flag(self.winner.options),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        no_plan = self.runs[0]
        return {
            "table": asdict(self.table),
            "cases": [
                {"name": run.name}
                | run.to_dict()
                | {"measured_saving_bytes": run.saving_bytes(no_plan), "error": run.error}
                for run in self.runs
            ],
            "complete": self.complete,
            "winner": self.winner.to_dict(),
        }

    def _cells(self, run: MeasuredCase) -> dict[str, str]:
        name = "best set" if run.name == _SET else run.name
        found, no_plan = run.measurement, self.runs[0].measured
        if found is None:
            return {"Case": name, "Peak(MiB)": "failed"}
        return {
            "Case": name,
            "Peak(MiB)": f"{found.peak_mib:.1f}",
            "vs no plan": f"{found.peak_mib / no_plan.peak_mib:.2f}",
            "Claimed(Bytes)": f"{found.claimed_bytes:,}",
            "Measured(Bytes)": f"{run.saving_bytes(self.runs[0]):,}",
            "s/step": f"{found.step_seconds:.3f}",
            "vs no plan ": f"{found.step_seconds / no_plan.step_seconds:.2f}",
        }


def _flag(options: Mapping[str, Any]) -> str:
    if config := options.get("memory_opt_config"):
        return f'--memory_opt_config "{config}"'
    if level := options.get("memory_opt_level"):
        return f"--memory_opt_level {level}"
    return "no plan: none of them lowers the peak"


def sweep(
    case: Case,
    config: str | None = None,
    budget: int = 60,
    on_start: Callable[[str], None] = lambda name: None,
    measure: Callable[[Case], Measurement] = spawn,
) -> Sweep:
    """Measure and search.

    Args:
        case: with options that hold neither config nor level.
        config: a user's config, which is measured and is one of the sets that the search starts from.
        budget: most processes that may be started.
        on_start: called with the name of each run before it starts.

    Raises:
        MemOptError: the model cannot be trained without a plan, or the user's config cannot be applied.
    """
    runs: list[MeasuredCase] = []

    def run(name: str, options: Mapping[str, Any], label: str = "") -> MeasuredCase:
        on_start(label or name)
        try:
            measurement = measure(replace(case, options={**(case.options or {}), **options}))
            runs.append(MeasuredCase(name, options, measurement))
        except MemOptError as error:
            runs.append(MeasuredCase(name, options, None, str(error)))
        return runs[-1]

    no_plan = run("no plan", {})
    table, peak_bytes = no_plan.measured.engine_table, no_plan.measured.peak_mib * _MIB
    measured: dict[Rows, MeasuredCase] = {NOTHING: no_plan}
    if config is not None:
        own = run("config", {"memory_opt_config": config})
        measured[own.measured.applied] = own
    levels = [run(f"level {level}", {"memory_opt_level": level}) for level in (1, 2) if len(runs) < budget]
    rows = [
        frozenset(plan.config.split(","))
        for plan in table.plans
        if plan.saving_bytes is None or plan.saving_bytes >= SMALLEST_CLAIM * peak_bytes
    ]
    for row in rows:
        if len(runs) < budget and row not in measured:
            measured[row] = run(_joined(row), _options(row))

    def measure_set(parts: Rows) -> Outcome:
        count = sum(row <= parts for row in rows)
        measured[parts] = run(_SET, _options(parts), f"{count} of {len(rows)} rows")
        return measured[parts].outcome

    search = RowSearch(rows, measure_set, budget - len(runs), {parts: run.outcome for parts, run in measured.items()})
    helpful = [row for row in rows if row in measured and measured[row].outcome.peak < no_plan.measured.peak_mib]
    of_levels = [level.measurement.applied for level in levels if level.measurement is not None]
    starts = [NOTHING.union(*(row for row in rows if row <= applied)) for applied in of_levels]
    best = measured[search.run([*starts, NOTHING.union(*helpful)])]
    # A level looks for rows inside each layer: where it finds others than a config can name, it may go lower.
    lower = [level for level in levels if level.outcome.peak < best.outcome.peak * (1 - PEAK_TOLERANCE)]
    winner = min(lower, key=lambda level: level.outcome.peak, default=best)
    savings = {_joined(row): measured[row].saving_bytes(no_plan) for row in rows if row in measured}
    return Sweep(tuple(runs), table.with_measured(savings), winner, search.complete)


def _joined(parts: Rows) -> str:
    return ",".join(sorted(parts))


def _options(parts: Rows) -> dict[str, Any]:
    return {"memory_opt_config": _joined(parts)} if parts else {}


if __name__ == "__main__":
    main()
