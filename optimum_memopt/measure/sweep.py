"""`memopt plan --measure`: runs no plan, both levels and each row alone, then searches for the set of rows with the
lowest peak.

Savings do not add up: one row's recompute may read what another row drops, or keep it alive. So the search measures
sets. It starts from sets that are known to be good (which hold rows that only help together), removes rows, then adds
rows, until changing any single row makes it no better.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from tabulate import tabulate

from optimum_memopt.errors import MemOptError
from optimum_memopt.measure.measure_case import Case, Measurement, spawn
from optimum_memopt.plans.table import PlanTable

# `cluster_id:strategy:-1`, each; a row of the plan table has one, or several that only save together.
Rows = frozenset[str]
NOTHING: Rows = frozenset()

# Peaks of one case differ by about 0.1% between processes, times by a few percent.
PEAK_TOLERANCE = 0.005
TIME_TOLERANCE = 0.05
# A row that claims a smaller part of the peak is within the noise, so no process is started for it.
SMALLEST_CLAIM = 0.001
_MIB = 2**20
_SET = "set"


class Outcome(NamedTuple):
    """The measurement of a set of rows: peak (any unit, infinite when it failed) and seconds per step."""

    peak: float
    seconds: float


FAILED = Outcome(math.inf, math.inf)


@dataclass
class Search:
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
class Run:
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

    def saving_bytes(self, no_plan: "Run") -> int | None:
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

    runs: tuple[Run, ...]
    table: PlanTable
    winner: Run
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

    def _cells(self, run: Run) -> dict[str, str]:
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
    runs: list[Run] = []

    def run(name: str, options: Mapping[str, Any], label: str = "") -> Run:
        on_start(label or name)
        try:
            measurement = measure(replace(case, options={**(case.options or {}), **options}))
            runs.append(Run(name, options, measurement))
        except MemOptError as error:
            runs.append(Run(name, options, None, str(error)))
        return runs[-1]

    no_plan = run("no plan", {})
    table, peak_bytes = no_plan.measured.engine_table, no_plan.measured.peak_mib * _MIB
    measured: dict[Rows, Run] = {NOTHING: no_plan}
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

    search = Search(rows, measure_set, budget - len(runs), {parts: run.outcome for parts, run in measured.items()})
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
