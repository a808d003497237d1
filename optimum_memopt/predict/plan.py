"""`plan`: predicts the memory of a training step from Python, before anything is loaded, allocated or run."""

import html
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from tabulate import tabulate

from optimum_memopt.compat.installed import without_kernel_warning
from optimum_memopt.engines.api import predictions
from optimum_memopt.engines.api.predictions import OPTIMIZER, SAVED, TEMPORARY, CurvePoint, Group, Way
from optimum_memopt.engines.api.run import AUTO as AUTO_LOSS
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.shared.registry import factory, predicting_engine
from optimum_memopt.errors import MemOptError, excerpt, flags_named
from optimum_memopt.generators import preserved_generators
from optimum_memopt.memory import optimizers
from optimum_memopt.option_values import Numbers, checked
from optimum_memopt.options import MemOptOptions, resolve
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.predict.workload import ModuleWorkload, Workload, task_of, warn_of_precision
from optimum_memopt.sizes import AUTO, LARGEST, MIB, Budget, gib_text, parse_budget
from optimum_memopt.step_settings import (
    KEYWORDS,
    ModelSettings,
    StepSpec,
    described,
    engine_options,
    patterns,
    setting_of,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Settings for a model given by its config; a module already has them.
_OF_MODULE = ("dtype", "attention", "peft", "quantize")


def plan(
    model: "str | PathLike[str] | PretrainedConfig | torch.nn.Module",
    task: str | None = None,
    *,
    example_inputs: object = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    budget: str | None = None,
    level: int = 0,
    config: Any = None,
    plan_file: PathLike | str | None = None,
    device: str | PathLike[str] | None = None,
    bf16: bool = False,
    fp16: bool = False,
    optim: str = optimizers.DEFAULT,
    gradient_accumulation_steps: int = 1,
    trainable: str | Sequence[str] = (),
    compiler: str | None = None,
    loss: str = AUTO_LOSS,
    dtype: str | None = None,
    attention: str | None = None,
    peft: str | None = None,
    quantize: str | None = None,
    padding: bool = True,
    keep_outputs: bool = False,
    fsdp: int = 1,
    release_gradients: bool = False,
    compress: str | None = None,
) -> "Estimate":
    """Predict the memory of a training step. Nothing is run or allocated, and the model is not changed.

    Args:
        model: a folder with a config.json, a name on the hub, a transformers config, or a module on any device,
            including `meta`.
        task: a task such as `fill-mask`; None: taken from the class name of the config or the model.
        example_inputs: arguments of a module's forward, which should return a loss: a dict of keyword arguments, a
            tuple, or a tensor. None: a batch for `task`, for a model with a transformers config.

    All other arguments are settings of the step, as in `optimum-cli memopt plan`: `help(plan)` lists them.

    Raises:
        MemOptError: one line: an unknown value, conflicting settings, a budget that no plan fits, or a model that
            cannot be traced without data.
    """
    given = _given(locals()) | {"plan": plan_file}
    with flags_named(_parameter):
        given |= {"trainable": patterns(trainable), "device": checked("device", device, str | PathLike | None)}
        options = MemOptOptions(memory_opt_engine=predicting_engine(), **engine_options(given))
        options.check()
        spec = StepSpec(**_settings(StepSpec, given))
        spec.check()
        workload = _workload(model, example_inputs, _settings(ModelSettings, given))
    warn_of_precision(factory(options.memory_opt_engine).planned_device(spec.device), spec.autocast, workload)
    with without_kernel_warning():
        return Estimate(options.memory_opt_engine, workload, resolve(options).selection, spec)


_SETTINGS = "\n".join(f"        {keyword}: {text}" for _, keyword, text in described())
plan.__doc__ = f"{plan.__doc__}\n    Settings:\n{_SETTINGS}\n    "


def _parameter(flag: str) -> str:
    """Returns the parameter of `plan` for a flag without its dashes; the flag if there is none."""
    name = setting_of(flag)
    name = KEYWORDS.get(name, name)
    return name if name in inspect.signature(plan).parameters else f"--{flag}"


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings among the arguments of `plan` that are not at their defaults."""
    parameters = inspect.signature(plan).parameters
    return {name: each for name, each in arguments.items() if name != "model" and each is not parameters[name].default}


def _settings(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that are fields of a dataclass, checked. Raises MemOptError."""
    return {
        setting.name: checked(setting.name, given[setting.name], setting.type)
        for setting in fields(kind)
        if setting.name in given
    }


def _workload(model: object, inputs: object, settings: Mapping[str, Any]) -> Workload | ModuleWorkload:
    if isinstance(model, torch.nn.Module):
        if said := [name for name in _OF_MODULE if settings.get(name)]:
            raise MemOptError(f"{', '.join(said)}: the module already determines it; leave it out")
        return _of_module(model, inputs, settings)
    if inputs is not None:
        raise MemOptError("example_inputs: only for a torch.nn.Module; leave them out")
    from transformers import PretrainedConfig

    if not isinstance(model, PretrainedConfig):
        if not isinstance(model, str | PathLike):
            raise MemOptError(
                "plan takes a folder, a name on the hub, a transformers config or a torch.nn.Module, not "
                f"{excerpt(type(model).__name__)}"
            )
        model = fspath(model)
    return Workload(model, **settings).checked()


def _of_module(module: torch.nn.Module, inputs: object, settings: Mapping[str, Any]) -> ModuleWorkload:
    trainable = settings.get("trainable", ())
    if inputs is not None:
        for name in ("task", "seq_len"):
            if name in settings:
                raise MemOptError(f"{name} together with example_inputs, which determine it; leave out one of them")
        return ModuleWorkload.of(module, inputs, settings.get("batch_size"), trainable)
    from transformers import PretrainedConfig

    if not isinstance(model_config := getattr(module, "config", None), PretrainedConfig):
        raise MemOptError(f"{type(module).__name__}: a module without a transformers config needs example_inputs")
    # The class name of a PEFT model does not tell the task.
    base_of: Any = getattr(module, "get_base_model", None)
    inner = base_of() if base_of is not None else module
    named = settings if "task" in settings else {**settings, "task": task_of([type(inner).__name__])}
    batch = Workload(model_config, **named).checked()
    with preserved_generators(), torch.device("meta"):
        inputs = batch.batch_of(model_config)
    # The mask of a batch without padding has values, on which models branch.
    return ModuleWorkload.of(module, {**inputs, **batch.values}, None, trainable)


# Short names of categories.
_NAMES = {OPTIMIZER: "optimizer", SAVED: "activations", TEMPORARY: "temporaries"}
_BYTES = Numbers(0, LARGEST, "sizes such as 24GiB, shares such as 90%, auto, and whole numbers of bytes")


@dataclass(frozen=True, repr=False)
class Estimate:
    """The predicted memory of a training step that was not run; returned by `plan`.

    Bytes are those that tensors request or, if the device's allocator is known (CUDA), those of the allocated blocks.
    On the CPU they include the process itself.
    """

    _engine: str
    _workload: predictions.Workload
    _selection: Selection
    _spec: StepSpec
    _found: predictions.StepEstimate = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_found", self._ask(self._selection))

    @property
    def table(self) -> PlanTable:
        """Returns the plan table, with the prediction in its header."""
        return self._found.table

    @property
    def peak(self) -> int:
        """Returns the peak of the step in bytes, which a budget bounds."""
        return self._found.peak

    @property
    def reserved(self) -> int | None:
        """Returns the bytes that torch's allocator reserves on a CUDA device; None elsewhere."""
        return self._found.reserved

    @property
    def breakdown(self) -> dict[str, int]:
        """Returns the bytes at the peak by category; they add up to `peak`."""
        timeline = self._found.timeline
        assert timeline is not None
        held = {_NAMES.get(category, category): sizes[timeline.peak_at] for category, sizes in timeline.held.items()}
        return {**held, "allocator": self.peak - round(self._found.peak_mib * MIB)}

    @property
    def at_peak(self) -> tuple[Group, ...]:
        """Returns the tensors at the peak, grouped by category, row of the plan table or operator, and module, largest
        first; their bytes add up to `peak`."""
        timeline = self._found.timeline
        assert timeline is not None
        return timeline.at_peak(self.peak)

    @cached_property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Returns the plans of budgets, from the smallest possible to no plan; the first call traces the model once
        more."""
        frontier = self._ask(Selection(), with_curve=True).frontier
        return frontier.points if frontier is not None else ()

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Returns the ways to train for comparison: plain PyTorch, Trainer's checkpointing, the engine without a plan,
        level 1, and the selected plan; the first call takes some seconds."""
        if self._spec.fsdp > 1:
            raise MemOptError("ways together with fsdp: plain PyTorch is simulated on one device; leave fsdp out")
        plain = factory(self._engine).plain_ways(self._workload, self._spec)
        return (*plain, *self._ask(self._selection, with_ways=True).ways)

    @property
    def plan(self) -> PlanFile | None:
        """Returns the plan, activation by activation."""
        return self._found.plan

    def fits(self, budget: str | int = AUTO) -> bool:
        """True if the peak is within a budget.

        Args:
            budget: a size such as `24GiB`, a share of the device such as `90%`, or bytes; `auto`: the free memory of
                the device, less the allocator's waste.

        Raises:
            MemOptError: the budget is none of these.
        """
        memory = self._found.capacity
        assert memory is not None
        return self.peak <= _budget(budget).on_device(memory.total, memory.available)

    def largest_batch(self, budget: str | int | None = None) -> int:
        """Predict the largest batch size with which the peak is within a budget, without trying it.

        Uses the same kind of plan as this estimate: none, its config, level or plan file; any plan that fits, for an
        estimate with a budget. Traces the model once or twice more.

        Args:
            budget: as in `fits`; None: this estimate's own, else `auto`.

        Returns:
            The number of rows; 0 if one row is too many.

        Raises:
            MemOptError: the budget is invalid, or the graph is specialized to one batch size.
        """
        wanted = _budget(budget) if budget is not None else self._selection.budget or Budget(AUTO)
        with flags_named(_parameter):
            return factory(self._engine).largest_batch(self._workload, self._selection, self._spec, wanted)

    def save(self, path: Path | str) -> None:
        """Write the plan to a file for `--memory_opt_plan`.

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
        rows = [(name, gib_text(size)) for name, size in self.breakdown.items() if size]
        grid = tabulate([*rows, ("peak", gib_text(self.peak))], tablefmt="html", disable_numparse=True)
        title = html.escape(f"Predicted peak of a step: {gib_text(self.peak)}")
        return f"<div><p><b>{title}</b></p>{grid}{self.table._repr_html_()}</div>"

    def _ask(
        self, selection: Selection, with_curve: bool = False, with_ways: bool = False
    ) -> predictions.StepEstimate:
        with flags_named(_parameter):
            return factory(self._engine).estimate(
                self._workload, selection, self._spec, with_curve=with_curve, with_ways=with_ways
            )


def _budget(budget: str | int) -> Budget:
    budget = checked("budget", budget, Annotated[str | int, _BYTES])
    if isinstance(budget, int):
        return Budget(f"{budget} bytes", budget)
    with flags_named(_parameter):
        return parse_budget(budget)
