"""`simulate`: the memory of any step of the user's, run on tensors without data."""

import html
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from tabulate import tabulate

from optimum_memopt.engines.api.predictions import SimulatedStep
from optimum_memopt.engines.simulator import simulated
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.option_values import check_drawing, checked
from optimum_memopt.report.page import Page, ReportData, render
from optimum_memopt.sizes import gib_text


def simulate(
    step: Callable[..., Any], *args: Any, device: str | PathLike[str] | None = "h100", **kwargs: Any
) -> "Simulation":
    """Run a training step as plain PyTorch on tensors without data, and track the memory that it would take.

    The step is called with copies of its arguments, whose tensors have no data and are on the CPU; it changes only the
    copies. The values of small integer or boolean tensors, and of up to 64 other numbers, are known. The step is
    called three times: the first call creates the optimizer states, the second is counted, the third finds the
    variables that hold memory.

    Args:
        step: any callable; a method's object is also copied.
        args: arguments of the step: models, optimizers and batches, also inside containers and objects, on any device.
        device: device whose operators and allocator are simulated, such as `h100` or a JSON file; None: this machine.

    Raises:
        MemOptError: one line: the device is unknown, an argument cannot be copied, the step uses a tensor that is not
            from its arguments, reads a tensor's value, or raises an error.
    """
    if not callable(step):
        raise MemOptError(f"simulate: the first argument is a step to call, not {excerpt(type(step).__name__)}")
    device = checked("device", device, str | PathLike | None)
    with simulated(None if device is None else fspath(device)) as simulator:
        copied = simulator.copy((step, args, kwargs))
        call, positional, named = copied
        found = simulator.run(lambda: call(*positional, **named), copied)
    name = getattr(step, "__name__", type(step).__name__)
    return Simulation(**vars(found), name=name, device="" if device is None else fspath(device))


@dataclass(frozen=True, repr=False)
class Simulation(SimulatedStep):
    """The predicted memory of a step that was run on tensors without data; returned by `simulate`.

    Attributes:
        given: bytes held at the step's first operator.
        peak: the peak of the step: on CUDA bytes of the allocator's blocks, elsewhere bytes that tensors request.
        reserved: bytes that torch's allocator reserves on a CUDA device; None elsewhere.
        phases: peak of the bytes that tensors request in `forward`, `backward` and `optimizer`, if the step has them.
        timeline: the step, operator by operator.
        name: name of the step.
        device: the simulated device; empty: this machine's.
    """

    name: str
    device: str

    def page(self, path: PathLike[str] | str | None = None) -> Page:
        """Returns a page about the step, with a snapshot for PyTorch's memory viewer.

        Args:
            path: file to write, such as `step.html`, with the snapshot beside it; None: no file.

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
