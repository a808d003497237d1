"""`memopt plan --measure`: no plan, each row alone, the levels, and then the set of rows with the lowest peak."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tabulate import tabulate

from optimum_memopt.errors import MemOptError
from optimum_memopt.measure.measure_case import Case, Measurement, spawn
from optimum_memopt.measure.search import FAILED, NOTHING, PEAK_TOLERANCE, Outcome, Rows, Search
from optimum_memopt.plans.table import PlanTable

# A row that claims less of the peak cannot be told from noise, so no process is started for it.
SMALLEST_CLAIM = 0.001
_MIB = 2**20


@dataclass(frozen=True)
class Trial:
    """One measured case; `measurement` is None and `error` says why where its process failed."""

    name: str
    options: Mapping[str, Any]
    measurement: Measurement | None
    error: str = ""


@dataclass(frozen=True)
class Study:
    """What was measured.

    Attributes:
        trials: in the order they ran; the first is the one without a plan.
        table: the rows of the graph, with a measured column.
        winner: one of the trials, with the lowest peak.
        complete: False when the search was ended by the number of process starts allowed.
    """

    trials: tuple[Trial, ...]
    table: PlanTable
    winner: Trial
    complete: bool

    @property
    def none(self) -> Measurement:
        return self.trials[0].measurement

    def saving_bytes(self, trial: Trial) -> int | None:
        """What a trial took off the peak without a plan; None where it failed."""
        return _saving_bytes(self.trials[0], trial)

    def to_text(self) -> str:
        """Both tables, what failed, and the winner as an option to paste."""
        shown = [trial for trial in self.trials if trial.name != _SET or trial is self.winner]
        cells = [self._cells(trial) for trial in shown]
        errors = [f"failed: {trial.name}: {trial.error}" for trial in self.trials if trial.error]
        how = "every row was tried" if self.complete else "not finished: give it more with --max_runs"
        return "\n".join(
            [
                self.table.to_text(),
                "",
                tabulate(cells, headers="keys", tablefmt="simple", disable_numparse=True),
                *errors,
                "",
                f"Lowest of {len(self.trials)} measured cases ({how}): {self.winner.measurement.peak_mib:.1f} MiB, "
                f"{self.winner.measurement.peak_mib / self.none.peak_mib:.2f} of no plan, with",
                _flag(self.winner.options),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "table": asdict(self.table),
            "cases": [
                {
                    "name": trial.name,
                    **trial.options,
                    **_numbers(trial.measurement),
                    "measured_saving_bytes": self.saving_bytes(trial),
                    "error": trial.error,
                }
                for trial in self.trials
            ],
            "complete": self.complete,
            "winner": {**self.winner.options, **_numbers(self.winner.measurement)},
        }

    def _cells(self, trial: Trial) -> dict[str, str]:
        name = "lowest found" if trial.name == _SET else trial.name
        found, none = trial.measurement, self.none
        if found is None:
            return {"Case": name, "Peak(MiB)": "failed"}
        return {
            "Case": name,
            "Peak(MiB)": f"{found.peak_mib:.1f}",
            "of none": f"{found.peak_mib / none.peak_mib:.2f}",
            "Claimed(Bytes)": f"{found.claimed_bytes:,}",
            "Measured(Bytes)": f"{self.saving_bytes(trial):,}",
            "s/step": f"{found.step_seconds:.3f}",
            "of none ": f"{found.step_seconds / none.step_seconds:.2f}",
        }


_SET = "set"


def _numbers(found: Measurement | None) -> dict[str, Any]:
    if found is None:
        return {"peak_mib": None}
    return {
        "peak_mib": found.peak_mib,
        "step_seconds": found.step_seconds,
        "cpu_seconds": found.cpu_seconds,
        "claimed_saving_bytes": found.claimed_bytes,
        "applied": sorted(found.applied),
    }


def _flag(options: Mapping[str, Any]) -> str:
    if config := options.get("memory_opt_config"):
        return f'--memory_opt_config "{config}"'
    if level := options.get("memory_opt_level"):
        return f"--memory_opt_level {level}"
    return "no plan: every one of them raises the peak or leaves it as it is"


@dataclass
class _Runner:
    """Starts processes and keeps what they say."""

    case: Case
    budget: int
    say: Callable[[str], None]
    probe: Callable[[Case], Measurement]
    trials: list[Trial] = field(default_factory=list)

    def __call__(self, name: str, options: Mapping[str, Any], label: str = "") -> Trial:
        self.say(label or name)
        case = replace(self.case, options={**self.case.options, **options})
        try:
            trial = Trial(name, options, self.probe(case))
        except MemOptError as error:
            trial = Trial(name, options, None, str(error))
        self.trials.append(trial)
        return trial

    @property
    def left(self) -> int:
        return self.budget - len(self.trials)


def study(
    case: Case,
    config: str | None = None,
    budget: int = 60,
    say: Callable[[str], None] = lambda name: None,
    probe: Callable[[Case], Measurement] = spawn,
) -> Study:
    """Measure and search.

    Args:
        case: with options that hold neither config nor level.
        config: a user's config, measured as well and one of the sets that the search starts from.
        budget: process starts at most.
        say: is told what is measured next.
        probe: measures one case.

    Raises:
        MemOptError: the model cannot be trained without a plan, or the user's config cannot be applied.
    """
    run = _Runner(case, budget, say, probe)
    none = run("no plan", {})
    if none.measurement is None:
        raise MemOptError(none.error)
    table, peak_bytes = none.measurement.table, none.measurement.peak_mib * _MIB
    tried: dict[Rows, Trial] = {NOTHING: none}
    if config is not None:
        own = run("config", {"memory_opt_config": config})
        if own.measurement is None:
            raise MemOptError(own.error)
        tried[own.measurement.applied] = own
    levels = [run(f"level {level}", {"memory_opt_level": level}) for level in (1, 2) if run.left > 0]
    rows = [
        frozenset(plan.config.split(","))
        for plan in table.plans
        if plan.saving_bytes is None or plan.saving_bytes >= SMALLEST_CLAIM * peak_bytes
    ]
    for row in rows:
        if run.left > 0 and row not in tried:
            tried[row] = run(_joined(row), _options(row))

    def measure(parts: Rows) -> Outcome:
        count = sum(row <= parts for row in rows)
        tried[parts] = run(_SET, _options(parts), f"{count} of {len(rows)} rows")
        return _outcome(tried[parts])

    search = Search(rows, measure, run.left, {parts: _outcome(trial) for parts, trial in tried.items()})
    helpful = [row for row in rows if row in tried and _outcome(tried[row]).peak < none.measurement.peak_mib]
    of_levels = [level.measurement.applied for level in levels if level.measurement is not None]
    starts = [frozenset().union(*(row for row in rows if row <= applied)) for applied in of_levels]
    best = tried[search.run([*starts, frozenset().union(*helpful)])]
    # A level looks for rows inside each layer: where it finds others than a config can name, it may go lower.
    lower = [level for level in levels if _outcome(level).peak < _outcome(best).peak * (1 - PEAK_TOLERANCE)]
    winner = min(lower, key=lambda level: _outcome(level).peak, default=best)
    savings = {_joined(row): _saving_bytes(none, tried[row]) for row in rows if row in tried}
    return Study(tuple(run.trials), table.with_measured(savings), winner, search.complete)


def _saving_bytes(none: Trial, trial: Trial) -> int | None:
    if trial.measurement is None:
        return None
    return round((none.measurement.peak_mib - trial.measurement.peak_mib) * _MIB)


def _joined(parts: Rows) -> str:
    return ",".join(sorted(parts))


def _options(parts: Rows) -> dict[str, Any]:
    return {"memory_opt_config": _joined(parts)} if parts else {}


def _outcome(trial: Trial) -> Outcome:
    found = trial.measurement
    return FAILED if found is None else Outcome(found.peak_mib, found.step_seconds)
