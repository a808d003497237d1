"""Measures training steps: one case in a fresh process, with peak and time as JSON.

    python -m optimum_memopt.measure < case.json

Also implements `memopt plan --measure`, which measures no plan, both levels and each row alone, then searches for the
set of rows with the lowest peak.

A step is forward and backward; an optimizer's states come on top, the same for every case. The first step compiles
the model and is not measured.

Savings do not add up: one row's recompute may read an activation that another row drops, or keep it alive. So the
search measures sets. It starts from sets known to be good (which contain rows that only help together), removes rows,
then adds rows, until changing any single row no longer helps.
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
from optimum_memopt.sizes import MIB

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


_REMARK = "[memopt] "


@dataclass(frozen=True)
class Case:
    """A case that one process trains.

    Attributes:
        options: fields of `MemOptOptions`; None trains with plain PyTorch.
        steps: number of measured steps after the first.
        bf16: whether forwards run under autocast to bfloat16, as with Trainer's `--bf16`.
        optimizer: whether each step ends with a step of a fused AdamW, Trainer's default.
    """

    workload: Workload
    options: Mapping[str, Any] | None = field(default_factory=dict)
    steps: int = 2
    bf16: bool = False
    optimizer: bool = False

    def prepare(self, model: Any) -> None:
        """Modify the model, on its device, before an engine is attached; for baselines to override."""

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
        peak_mib: peak memory of the measured steps: resident on the CPU; on CUDA allocated by torch, plus the memory
            of an engine with its own allocator.
        held_mib: the part of the peak that is held between steps: weights, the optimizer's states, libraries.
        step_seconds: median wall time of a step.
        cpu_seconds: median CPU time of a step; on a busy machine it varies less than wall time.
        method: `exact`, or `sampled` if the system cannot reset the high-water mark of resident memory.
        table: the engine's plan table, None for plain PyTorch.
        remarks: lines that the package logged.
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
        """Returns the peak minus the memory held between steps: activations, gradients and workspaces."""
        return self.peak_mib - self.held_mib

    @property
    def engine_table(self) -> PlanTable:
        """Returns the table; raises MemOptError if plain PyTorch trained the case."""
        if self.table is None:
            raise MemOptError("a case without an engine has no plan table")
        return self.table

    @property
    def claimed_bytes(self) -> int:
        return self.table.claimed_saving_bytes if self.table else 0

    @property
    def applied(self) -> frozenset[str]:
        """Returns the `cluster_id:strategy:-1` entries that the engine reports as applied."""
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
    """Run the case in this process, which should be fresh. Raises MemOptError if the engine cannot train it."""
    import torch

    from optimum_memopt.engines.api.run import AUTO
    from optimum_memopt.engines.shared.registry import factory
    from optimum_memopt.loop import optimize
    from optimum_memopt.memory import process
    from optimum_memopt.memory.peak_monitor import PeakMonitor

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = case.workload.build()
    model.to(device)
    # The CUDA context and the libraries loaded so far do not count as the engine's memory.
    occupied = _outside_torch_mib(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    case.prepare(model)
    engine = None
    if case.options is not None:
        name = case.options.get("memory_opt_engine", AUTO)
        own = {} if name == AUTO else factory(name).options_to_measure
        engine = optimize(model, **{"memory_opt_log_level": "warning", **own, **case.options})
    if engine is None:
        # Engines set this up themselves.
        process.return_freed_memory()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if case.optimizer else None
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.bf16)
    _step(model, batch, autocast, optimizer)
    monitor = PeakMonitor(device)
    monitor.start_run()
    # Nothing has run since `start_run`, so the peak so far is the memory held between steps.
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
    """Run forward, backward and the optimizer's step; returns their wall and CPU seconds."""
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
    """Returns the GPU memory in use outside of torch's allocator, by this and other processes, in MiB. ONNX Runtime's
    arena never shrinks, so its size at the end is its peak."""
    import torch

    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / MIB


def spawn(case: Case, program: Sequence[str] = ("-m", "optimum_memopt.measure")) -> Measurement:
    """Measure the case in a fresh process.

    Args:
        program: Python arguments that run a script or module which calls `main` with the case's class.

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
    """Read a case of class `kind` from standard input, measure it, and print the result as JSON."""
    print(run(lambda: measure(kind.from_json(sys.stdin.read())).to_json()))


# A set of `cluster_id:strategy:-1` parts; a row of the plan table has one, or several that only save together.
Rows = frozenset[str]
NOTHING: Rows = frozenset()

# Peaks of one case differ by about 0.1% between processes, times by a few percent.
PEAK_TOLERANCE = 0.005
TIME_TOLERANCE = 0.05
# A row that claims a smaller share of the peak is within the noise, so it is not measured.
SMALLEST_CLAIM = 0.001
_SET = "set"


class Outcome(NamedTuple):
    """The measurement of a set of rows: peak (any unit, infinite if it failed) and seconds per step."""

    peak: float
    seconds: float


FAILED = Outcome(math.inf, math.inf)


@dataclass
class RowSearch:
    """A search over sets of rows.

    Attributes:
        rows: the rows of the plan table that may be turned on.
        measure: measures a set; called once for each.
        budget: number of measurements that the search may still start.
        outcomes: every set measured so far.
        complete: False if the search ran out of budget.
    """

    rows: Sequence[Rows]
    measure: Callable[[Rows], Outcome]
    budget: int
    outcomes: dict[Rows, Outcome] = field(default_factory=dict)
    complete: bool = True

    def run(self, starts: Iterable[Rows]) -> Rows:
        """Returns the set with the lowest peak; ties within `PEAK_TOLERANCE` go to the fastest set, ties within
        `TIME_TOLERANCE` to the smallest.

        Args:
            starts: sets to start from, in addition to those in `outcomes`; at least one of the two must not be empty.
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
    """Returns `current` with a row turned on; an id has one strategy, so the row's strategy replaces another one."""
    ids = {_cluster_id(part) for part in row}
    return frozenset(part for part in current if _cluster_id(part) not in ids) | row


def without_row(current: Rows, row: Rows, rows: Iterable[Rows]) -> Rows:
    """Returns `current` without a row and the parts that only this row needs; other rows stay complete."""
    on = [other for other in rows if other <= current]
    return NOTHING.union(*(other for other in on if not row <= other)) if row in on else current


def _cluster_id(part: str) -> str:
    return part.split(":")[0]


@dataclass(frozen=True)
class MeasuredCase:
    """One measured case; if its process failed, `measurement` is None and `error` says why."""

    name: str
    options: Mapping[str, Any]
    measurement: Measurement | None
    error: str = ""

    @property
    def measured(self) -> Measurement:
        """Returns the measurement; raises MemOptError with `error` if there is none."""
        if self.measurement is None:
            raise MemOptError(self.error)
        return self.measurement

    @property
    def outcome(self) -> Outcome:
        measurement = self.measurement
        return FAILED if measurement is None else Outcome(measurement.peak_mib, measurement.step_seconds)

    def saving_bytes(self, no_plan: "MeasuredCase") -> int | None:
        """Returns how far the peak is below that of `no_plan`; None if the run failed."""
        return None if self.measurement is None else round((no_plan.outcome.peak - self.outcome.peak) * MIB)

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
        runs: all runs in order; the first is the one without a plan.
        table: the plan table, with a measured column.
        winner: the run with the lowest peak.
        complete: False if the search reached the allowed number of processes.
    """

    runs: tuple[MeasuredCase, ...]
    table: PlanTable
    winner: MeasuredCase
    complete: bool

    def to_text(self) -> str:
        """Returns both tables, the failed runs, and the winner as an option to paste."""
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
    """Measure no plan, both levels and each row, then search for the set of rows with the lowest peak.

    Args:
        case: the case to measure; its options hold neither config nor level.
        config: a user's config, which is measured and is one of the sets that the search starts from.
        budget: maximum number of processes to start.
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
    table, peak_bytes = no_plan.measured.engine_table, no_plan.measured.peak_mib * MIB
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
    # A level looks for rows inside each layer; it may go lower if it finds rows that a config cannot name.
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
