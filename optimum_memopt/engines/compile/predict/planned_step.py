"""A training step that is traced on fake tensors, for a device that may not be here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.initialization import no_init_weights

from optimum_memopt.engines.api.engine import Run
from optimum_memopt.engines.api.predictions import Workload
from optimum_memopt.engines.api.run import THIS_MACHINE, Selection, StepSpec
from optimum_memopt.engines.compile.capture.backend import default_compiler
from optimum_memopt.engines.compile.capture.device_standin import traced_for
from optimum_memopt.engines.compile.costs.devices import Device, device_of
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import MemOptError, line_of
from optimum_memopt.memory.capacity import Capacity, capacity, capacity_of
from optimum_memopt.memory.optimizers import PlannedOptimizer, check, embeddings_of

if TYPE_CHECKING:
    from optimum_memopt.engines.compile.partition.producers.producer import Producer


class Traced(NamedTuple):
    """A model after one training forward on fake tensors.

    Attributes:
        engine: attached to the model.
        model: must be kept as long as its steps are predicted.
        batch: keyword arguments of the forward.
    """

    engine: CompileEngine
    model: torch.nn.Module
    batch: Mapping[str, Any]


def build(workload: Workload, here: torch.device) -> tuple[torch.nn.Module, Mapping[str, Any]]:
    """The model and its batch, whose tensors are fake where the caller is in their mode."""
    # Some models draw initial values in a loop until they are in range, which fake tensors never are.
    with here, no_init_weights():
        return workload.build()


@dataclass(frozen=True)
class PlannedStep:
    """A step that is planned for.

    Raises:
        MemOptError: an unknown device or optimizer.
    """

    workload: Workload
    selection: Selection
    spec: StepSpec = THIS_MACHINE

    def __post_init__(self) -> None:
        check(self.spec.optim)
        _ = self.target

    @cached_property
    def target(self) -> Device | None:
        """The device that is planned for; None: this machine's."""
        return None if self.spec.device is None else device_of(self.spec.device)

    @property
    def here(self) -> torch.device:
        """Where fake tensors are."""
        return torch.device("cuda" if torch.cuda.is_available() and self.target is None else "cpu")

    @property
    def device_name(self) -> str:
        """The device's name, or the type of this machine's."""
        return self.here.type if self.target is None else self.target.name

    @property
    def compiled_by(self) -> str:
        """Whose graphs."""
        if self.spec.compiler is not None:
            return self.spec.compiler
        return default_compiler(self.here.type)[0] if self.target is None else "inductor"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """None: without."""
        return getattr(torch, self.spec.autocast) if self.spec.autocast else None

    @property
    def capacity(self) -> Capacity:
        """Of the device."""
        return capacity(self.here) if self.target is None else capacity_of(self.target.memory)

    def trace(self, dynamic: bool, producer: "Producer | None" = None) -> Traced:
        """Run one training forward.

        Args:
            dynamic: sizes stay symbols.
            producer: makes the choices instead of what is selected.

        Raises:
            MemOptError: nothing fits a budget, bad plans, or a model that cannot be traced.
        """
        engine = CompileEngine(
            self.selection, self.compiled_by, dynamic, target=self.target, producer=producer, is_dry=True
        )
        # As under a Trainer.
        engine.outputs_read_by = lambda: ""
        # What a workload draws is none of the caller's random numbers.
        forked = torch.random.fork_rng(devices=[])
        with forked, traced_for(self.target, self.autocast_dtype, self.here.type), dynamo.fake_tensors():
            model, batch = build(self.workload, self.here)
            engine.run = self._run_of(model)
            engine.attach(model)
            try:
                model(**batch)
            except MemOptError:
                engine.detach()
                raise
            except Exception as error:
                engine.detach()
                raise MemOptError(
                    f"{type(model).__name__} cannot be traced on fake tensors ({line_of(error)})"
                    f"{self.workload.suggestion}"
                ) from error
        return Traced(engine, model, batch)

    def _run_of(self, model: torch.nn.Module) -> Callable[[], Run]:
        is_on_cuda = self.here.type == "cuda" or (self.target is not None and self.target.cuda is not None)
        optimizer = PlannedOptimizer(self.spec.optim, is_on_cuda, embeddings_of(model))
        return lambda: Run(optimizer, self.spec.gradient_accumulation_steps > 1)
