"""`simulate`: the memory of any step of a user's own, run on tensors without data."""

import html
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from tabulate import tabulate

from optimum_memopt.engines.api.predictions import SimulatedStep
from optimum_memopt.engines.shared.registry import predicting_factory
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.option_values import check_drawing, checked
from optimum_memopt.report.page import Page, ReportData, render
from optimum_memopt.sizes import gib_text


def simulate(
    step: Callable[..., Any], *args: Any, device: str | PathLike[str] | None = "h100", **kwargs: Any
) -> "Simulation":
    """Run a training step as plain PyTorch on tensors without data, and follow the memory that it would take.

    The step is called with copies of its arguments, in which all tensors have no data, on the CPU; of small tensors of
    integers or booleans, and of up to 64 other numbers, the values are known, too. What it changes are the copies. It
    is called three times: the first call leaves the states of optimizers, the second is counted, the third finds the
    variables that hold memory.

    Args:
        step: any callable; a method's object is copied, too.
        args: of the step: models, optimizers, batches, in containers and objects too; on any device.
        device: whose operators and allocator count, as `h100` or a JSON file; None: this machine's.

    Raises:
        MemOptError: one line: an unknown device, an argument that cannot be copied, a tensor that is no argument's,
            a value of a tensor that is read, or what the step raises.
    """
    if not callable(step):
        raise MemOptError(f"simulate: the first argument is a step to call, not {excerpt(type(step).__name__)}")
    device = checked("device", device, str | PathLike | None)
    with predicting_factory().simulator(None if device is None else fspath(device)) as simulator:
        copied = simulator.copy((step, args, kwargs))
        call, positional, named = copied
        found = simulator.run(lambda: call(*positional, **named), copied)
    name = getattr(step, "__name__", type(step).__name__)
    return Simulation(**vars(found), name=name, device="" if device is None else fspath(device))


@dataclass(frozen=True, repr=False)
class Simulation(SimulatedStep):
    """The predicted memory of a step that was run on tensors without data; `simulate` makes it.

    Attributes:
        given: bytes that are there at the step's first operator.
        peak: the most that it holds: bytes of the blocks of torch's allocator on CUDA, elsewhere those that tensors
            ask for.
        reserved: bytes that torch's allocator takes of a CUDA device; None elsewhere.
        phases: the most bytes that tensors ask for in `forward`, `backward` and `optimizer`, of those that there are.
        timeline: the step, operator by operator.
        name: of the step.
        device: that it was for; empty: this machine's.
    """

    name: str
    device: str

    def page(self, path: PathLike[str] | str | None = None) -> Page:
        """A page about the step, and beside it a snapshot for PyTorch's memory viewer.

        Args:
            path: of the file to write, as `step.html`; None: none.

        Raises:
            MemOptError: matplotlib or jinja2 is missing, or the file cannot be written.
        """
        check_drawing("page")
        page = render(ReportData(f"Memory of {self.name}", self._facts, timeline=self.timeline))
        if path is not None:
            page.save(path)
        return page

    def __str__(self) -> str:
        rows = [*self._facts, *((f"peak in {phase}", gib_text(size)) for phase, size in self.phases.items())]
        return "\n".join(
            (tabulate(rows, tablefmt="plain", disable_numparse=True), "", self.timeline.held_text(self.name))
        )

    def __repr__(self) -> str:
        return f"Simulation({self.name}, peak={gib_text(self.peak)})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    @property
    def _facts(self) -> tuple[tuple[str, str], ...]:
        reserved = () if self.reserved is None else (("reserved", gib_text(self.reserved)),)
        return ("step", self.name), ("device", self.device or "this machine"), ("peak", gib_text(self.peak)), *reserved
