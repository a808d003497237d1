"""`memopt plan --measure`: runs no plan, both levels and each row alone, then searches for the set of rows with the
lowest peak.

Savings do not add up: one row's recompute may read what another row drops, or keep it alive. So the search measures
sets. It starts from sets that are known to be good (which hold rows that only help together), removes rows, then adds
rows, until changing any single row makes it no better.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

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


@dataclass(frozen=True)
class Outcome:
    """The measurement of a set of rows: peak (any unit, infinite when it failed) and seconds per step."""

    peak: float
    seconds: float


FAILED = Outcome(math.inf, math.inf)


@dataclass
class Search:
    """A search over sets of rows.

    Args:
        rows: what may be turned on, as rows of the plan table.
        measure: measures a set; called once for each.
        budget: most measurements that it may start.
        outcomes: sets that are measured already.

    Attributes:
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
            starts: sets to begin with, in addition to those in `outcomes`.

        Raises:
            ValueError: no start, and no outcome.
        """
        for start in starts:
            self._outcome(start)
        if not self.outcomes:
            raise ValueError("a search needs a set to start from")
        current = min(self.outcomes, key=lambda rows: (self.outcomes[rows].peak, self.outcomes[rows].seconds))
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


# A row that claims a smaller part of the peak is within the noise, so no process is started for it.
SMALLEST_CLAIM = 0.001
_MIB = 2**20


@dataclass(frozen=True)
class Run:
    """One measured case; `measurement` is None and `error` says why where its process failed."""

    name: str
    options: Mapping[str, Any]
    measurement: Measurement | None
    error: str = ""

    @property
    def measured(self) -> Measurement:
        """The measurement of a run that did not fail.

        Raises:
            MemOptError: it failed; the message is `error`.
        """
        if self.measurement is None:
            raise MemOptError(self.error)
        return self.measurement

    @property
    def outcome(self) -> Outcome:
        """Peak and time as the search compares them."""
        measurement = self.measurement
        return FAILED if measurement is None else Outcome(measurement.peak_mib, measurement.step_seconds)


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

    @property
    def no_plan(self) -> Measurement:
        return self.runs[0].measured

    def saving_bytes(self, run: Run) -> int | None:
        """How far a run's peak is below the one without a plan; None where it failed."""
        return _saving_bytes(self.runs[0], run)

    def to_text(self) -> str:
        """Both tables, what failed, and the winner as an option to paste."""
        shown = [run for run in self.runs if run.name != _SET or run is self.winner]
        cells = [self._cells(run) for run in shown]
        errors = [f"failed: {run.name}: {run.error}" for run in self.runs if run.error]
        how = "search complete" if self.complete else "search not finished: raise --max_runs"
        return "\n".join(
            [
                self.table.to_text(),
                "",
                tabulate(cells, headers="keys", tablefmt="simple", disable_numparse=True),
                *errors,
                "",
                f"Lowest peak of {len(self.runs)} runs ({how}): {self.winner.measured.peak_mib:.1f} MiB, "
                f"{self.winner.measured.peak_mib / self.no_plan.peak_mib:.2f} of no plan, with",
                _flag(self.winner.options),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "table": asdict(self.table),
            "cases": [
                {
                    "name": run.name,
                    **run.options,
                    **_numbers(run.measurement),
                    "measured_saving_bytes": self.saving_bytes(run),
                    "error": run.error,
                }
                for run in self.runs
            ],
            "complete": self.complete,
            "winner": {**self.winner.options, **_numbers(self.winner.measurement)},
        }

    def _cells(self, run: Run) -> dict[str, str]:
        name = "best set" if run.name == _SET else run.name
        found, no_plan = run.measurement, self.no_plan
        if found is None:
            return {"Case": name, "Peak(MiB)": "failed"}
        return {
            "Case": name,
            "Peak(MiB)": f"{found.peak_mib:.1f}",
            "vs no plan": f"{found.peak_mib / no_plan.peak_mib:.2f}",
            "Claimed(Bytes)": f"{found.claimed_bytes:,}",
            "Measured(Bytes)": f"{self.saving_bytes(run):,}",
            "s/step": f"{found.step_seconds:.3f}",
            "vs no plan ": f"{found.step_seconds / no_plan.step_seconds:.2f}",
        }


_SET = "set"


def _numbers(measurement: Measurement | None) -> dict[str, Any]:
    if measurement is None:
        return {"peak_mib": None}
    return {
        "peak_mib": measurement.peak_mib,
        "step_seconds": measurement.step_seconds,
        "cpu_seconds": measurement.cpu_seconds,
        "claimed_saving_bytes": measurement.claimed_bytes,
        "applied": sorted(measurement.applied),
    }


def _flag(options: Mapping[str, Any]) -> str:
    if config := options.get("memory_opt_config"):
        return f'--memory_opt_config "{config}"'
    if level := options.get("memory_opt_level"):
        return f"--memory_opt_level {level}"
    return "no plan: none of them lowers the peak"


@dataclass
class _Runner:
    case: Case
    budget: int
    on_start: Callable[[str], None]
    measure: Callable[[Case], Measurement]
    runs: list[Run] = field(default_factory=list)

    def __call__(self, name: str, options: Mapping[str, Any], label: str = "") -> Run:
        self.on_start(label or name)
        case = replace(self.case, options={**(self.case.options or {}), **options})
        try:
            run = Run(name, options, self.measure(case))
        except MemOptError as error:
            run = Run(name, options, None, str(error))
        self.runs.append(run)
        return run

    @property
    def left(self) -> int:
        return self.budget - len(self.runs)


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
    runner = _Runner(case, budget, on_start, measure)
    no_plan = runner("no plan", {})
    table, peak_bytes = no_plan.measured.engine_table, no_plan.measured.peak_mib * _MIB
    measured: dict[Rows, Run] = {NOTHING: no_plan}
    if config is not None:
        own = runner("config", {"memory_opt_config": config})
        measured[own.measured.applied] = own
    levels = [runner(f"level {level}", {"memory_opt_level": level}) for level in (1, 2) if runner.left > 0]
    rows = [
        frozenset(plan.config.split(","))
        for plan in table.plans
        if plan.saving_bytes is None or plan.saving_bytes >= SMALLEST_CLAIM * peak_bytes
    ]
    for row in rows:
        if runner.left > 0 and row not in measured:
            measured[row] = runner(_joined(row), _options(row))

    def measure_set(parts: Rows) -> Outcome:
        count = sum(row <= parts for row in rows)
        measured[parts] = runner(_SET, _options(parts), f"{count} of {len(rows)} rows")
        return measured[parts].outcome

    search = Search(rows, measure_set, runner.left, {parts: run.outcome for parts, run in measured.items()})
    helpful = [row for row in rows if row in measured and measured[row].outcome.peak < no_plan.measured.peak_mib]
    of_levels = [level.measurement.applied for level in levels if level.measurement is not None]
    starts = [frozenset().union(*(row for row in rows if row <= applied)) for applied in of_levels]
    best = measured[search.run([*starts, frozenset().union(*helpful)])]
    # A level looks for rows inside each layer: where it finds others than a config can name, it may go lower.
    lower = [level for level in levels if level.outcome.peak < best.outcome.peak * (1 - PEAK_TOLERANCE)]
    winner = min(lower, key=lambda level: level.outcome.peak, default=best)
    savings = {_joined(row): _saving_bytes(no_plan, measured[row]) for row in rows if row in measured}
    return Sweep(tuple(runner.runs), table.with_measured(savings), winner, search.complete)


def _saving_bytes(no_plan: Run, run: Run) -> int | None:
    if run.measurement is None:
        return None
    return round((no_plan.measured.peak_mib - run.measurement.peak_mib) * _MIB)


def _joined(parts: Rows) -> str:
    return ",".join(sorted(parts))


def _options(parts: Rows) -> dict[str, Any]:
    return {"memory_opt_config": _joined(parts)} if parts else {}
