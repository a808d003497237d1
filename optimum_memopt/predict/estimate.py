"""The memory of a training step that was not run, and what can be asked of it."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from tabulate import tabulate

from optimum_memopt.engines.api import predictions
from optimum_memopt.engines.api.predictions import OPTIMIZER, SAVED, CurvePoint
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.shared.registry import factory
from optimum_memopt.errors import MemOptError
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.option_values import Numbers, checked
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import AUTO, LARGEST, Budget, gib_text, parse_budget

# Short names of categories.
_NAMES = {OPTIMIZER: "optimizer", SAVED: "activations"}
_BYTES = Numbers(0, LARGEST, "sizes as 24GiB, shares as 90%, auto, and whole numbers of bytes")


@dataclass(frozen=True, repr=False)
class Estimate:
    """The predicted memory of a training step that was not run; `plan` makes it.

    Bytes are what tensors ask for; where the device's allocator is known (CUDA), those of the blocks that they get. On
    the CPU the process itself is among them.
    """

    _engine: str
    _workload: predictions.Workload
    _selection: Selection
    _how: Mapping[str, Any]
    _found: predictions.Estimate = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_found", self._ask(self._selection))

    @property
    def table(self) -> PlanTable:
        """The plan table, with the prediction in its header."""
        return self._found.table

    @property
    def peak(self) -> int:
        """The most that the step holds, in bytes: what a budget bounds."""
        return max(self._requested, self._found.allocated or 0)

    @property
    def reserved(self) -> int | None:
        """Bytes that torch's allocator takes of a CUDA device; None elsewhere."""
        return self._found.reserved

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak by what they are for; they add up to `peak`."""
        timeline = self._found.timeline
        assert timeline is not None
        held = {_NAMES.get(category, category): sizes[timeline.peak_at] for category, sizes in timeline.held.items()}
        return {**held, "allocator": self.peak - self._requested}

    @cached_property
    def curve(self) -> tuple[CurvePoint, ...]:
        """What budgets cost, from the smallest possible to no plan; traces the model once more at the first call."""
        return tuple(self._ask(Selection(), with_curve=True).curve)

    @property
    def plan(self) -> PlanFile | None:
        """What is done to each activation."""
        return self._found.plan

    def fits(self, budget: str | int = AUTO) -> bool:
        """Whether the peak is within a budget.

        Args:
            budget: `24GiB`, `90%` of the device, bytes; `auto`: what is free on the device, less what the allocator
                wastes.

        Raises:
            MemOptError: it is none of these.
        """
        memory = self._found.capacity
        assert memory is not None
        return self.peak <= _budget(budget).on_device(memory.total, memory.available)

    def largest_batch(self, budget: str | int | None = None) -> int:
        """The most rows of a batch with which the peak is within a budget, predicted and not tried.

        Under the plan of this estimate's kind: none, its config, level or plan file; for an estimate with a budget
        any that fits. Traces the model once or twice more.

        Args:
            budget: as in `fits`; None: this estimate's own, else `auto`.

        Returns:
            0 where one row is too many.

        Raises:
            MemOptError: the budget is none, or the rows are no size of the graph that can be changed.
        """
        wanted = _budget(budget) if budget is not None else self._selection.budget or Budget(AUTO)
        return factory(self._engine).largest_batch(self._workload, self._selection, wanted, **self._how)

    def save(self, path: Path | str) -> None:
        """Write the plan for `--memory_opt_plan`.

        Raises:
            MemOptError: the file cannot be written.
        """
        assert self._found.plan is not None
        self._found.plan.save(path)

    def __str__(self) -> str:
        return self._found.to_text()

    def __repr__(self) -> str:
        return f"Estimate(peak={gib_text(self.peak)}, {self.table.header[0]})"

    def _repr_html_(self) -> str:
        """Peak, what holds it, and the table, in a notebook."""
        rows = [(name, gib_text(size)) for name, size in self.breakdown.items() if size]
        grid = tabulate([*rows, ("peak", gib_text(self.peak))], tablefmt="html", disable_numparse=True)
        title = html.escape(f"Predicted peak of a step: {gib_text(self.peak)}")
        return f"<div><p><b>{title}</b></p>{grid}{self.table._repr_html_()}</div>"

    @property
    def _requested(self) -> int:
        return round(self._found.peak_mib * MIB)

    def _ask(self, selection: Selection, **more: Any) -> predictions.Estimate:
        return factory(self._engine).estimate(self._workload, selection, **self._how, **more)


def _budget(budget: str | int) -> Budget:
    budget = checked("budget", budget, Annotated[str | int, _BYTES])
    if isinstance(budget, int):
        return Budget(f"{budget} bytes", budget)
    try:
        return parse_budget(budget)
    except MemOptError as error:
        raise MemOptError(str(error).replace("--memory_opt_budget", "budget")) from error
