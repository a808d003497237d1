"""`plan`: the memory of a training step from Python, before anything is loaded, allocated or run."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from optimum_memopt.engines.api.run import Selection, StepSpec
from optimum_memopt.engines.shared.registry import factory, predicting_engine
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.generators import preserved_generators
from optimum_memopt.memory import optimizers
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.option_values import Numbers, checked
from optimum_memopt.options import MemOptOptions, resolve
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.predict.workload import ModuleWorkload, Workload, task_of, warn_of_precision
from optimum_memopt.sizes import AUTO, LARGEST, Budget, gib_text, parse_budget

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Beyond as many rows or tokens torch's operators index with more than 32 bits.
_MOST_RANKS = 2**20
_SIZE = Annotated[int | None, Numbers(1, 2**31)]


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
    plan_file: str | None = None,
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
    """Predict the memory of a training step. Nothing is run or allocated, and the model stays as it is.

    Args:
        model: a folder with a config.json, a name on the hub, a transformers config, or a module on any device, `meta`
            too.
        task: as `fill-mask`; None: by the name of the class that the config or the model has.
        example_inputs: of a module's forward, which should return a loss: a dict of keyword arguments, a tuple, or a
            tensor. None: a batch for `task`, for a model with a transformers config.
        batch_size: rows; default: those of `example_inputs`, else 8.
        seq_len: tokens of a row, without `example_inputs`; default: 128.
        budget: bytes that the step must not pass, as `24GiB`, `90%`; the cheapest recompute that fits is planned.
        device: that is planned for, as `h100`, or a JSON file; None: this machine's.
        bf16: under autocast, as Trainer's.
        fp16: under autocast, as Trainer's.
        trainable: patterns of the parameters that train, as PEFT's `target_modules`, globs or regular expressions;
            empty: all that the model trains.
        compiler: `inductor` or `aot_eager`; None: the one that would train.
        loss: `auto`, `plain` or `chunked`, as the engine computes it.
        dtype: of the weights, as `bfloat16`; None: that of the config, as transformers 5 loads it.
        attention: `sdpa` or `eager`; None: transformers' choice.
        peft: PEFT's adapter as `r=16,target=all-linear`, or the path of an adapter_config.json; None: none.
        quantize: weights of 4 bits, as bitsandbytes loads them for QLoRA: `nf4` or `fp4`, with fields as
            `nf4,double=false,compute=float32,prepare=false`, see `adapter.Quantization`; needs `peft`. None: none.
        padding: rows are of different lengths, so that models have masks.
        keep_outputs: for `ways`, plain PyTorch's loop holds the model's outputs during the backward.
        fsdp: ranks that share parameters, gradients and optimizer states, as a Trainer under FSDP2 shards them; the
            step is that of one of them. 1: not sharded.
        release_gradients: the optimizer steps in the backward, as `--memory_opt_release_gradients` has it.
        compress: `fp8`, for what the config, the level or no plan saves; None: nothing.

    Raises:
        MemOptError: one line: what is not known or does not go together, a budget that nothing fits, or a model that
            cannot be traced without data.
    """
    task, optim = checked("task", task, str | None), checked("optim", optim, str)
    batch_size, seq_len = checked("batch_size", batch_size, _SIZE), checked("seq_len", seq_len, _SIZE)
    device = checked("device", device, str | PathLike | None)
    bf16, fp16 = checked("bf16", bf16, bool), checked("fp16", fp16, bool)
    steps = checked("gradient_accumulation_steps", gradient_accumulation_steps, Annotated[int, Numbers(1)])
    if bf16 and fp16:
        raise MemOptError("bf16 together with fp16: give one of the two")
    given = {
        "dtype": checked("dtype", dtype, str | None) or "",
        "attention": checked("attention", attention, str | None) or "",
        "adapter": checked("peft", peft, str | None) or "",
        "quantization": checked("quantize", quantize, str | None) or "",
        "has_padding": checked("padding", padding, bool),
    }
    workload = _workload(model, task, example_inputs, batch_size, seq_len, _patterns(trainable), given)
    engine = predicting_engine()
    options = MemOptOptions(
        memory_opt_engine=engine,
        memory_opt_budget=budget,
        memory_opt_level=level,
        memory_opt_config=config,
        memory_opt_plan=plan_file,
        memory_opt_compress=compress,
        memory_opt_compiler=compiler,
        memory_opt_loss=loss,
    )
    options.check()
    device = None if device is None else fspath(device)
    ranks = checked("fsdp", fsdp, Annotated[int, Numbers(1, _MOST_RANKS)])
    if quantize and ranks > 1:
        raise MemOptError("quantize with fsdp: shares of quantized weights are not predicted; leave one out")
    autocast = "bfloat16" if bf16 else "float16" if fp16 else ""
    keeps_outputs = checked("keep_outputs", keep_outputs, bool)
    spec = StepSpec(
        device,
        compiler,
        autocast,
        optim,
        steps,
        loss,
        keeps_outputs=keeps_outputs,
        fsdp=ranks,
        releases_gradients=checked("release_gradients", release_gradients, bool),
    )
    warn_of_precision(factory(engine).planned_device(device), autocast, workload)
    with without_kernel_warning():
        return Estimate(engine, workload, resolve(options).selection, spec)


def _patterns(trainable: object) -> tuple[str, ...]:
    patterns = trainable.split(",") if isinstance(trainable, str) else trainable
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise MemOptError(f"trainable {excerpt(patterns)}: allowed are strings, and lists and tuples of them")
    return tuple(patterns)


def _workload(
    model: object,
    task: str | None,
    inputs: object,
    batch_size: int | None,
    seq_len: int | None,
    trainable: tuple[str, ...],
    given: Mapping[str, Any],
) -> Workload | ModuleWorkload:
    if isinstance(model, torch.nn.Module):
        if said := [name for name, value in given.items() if value and name != "has_padding"]:
            raise MemOptError(f"{', '.join(said)}: a module has it already; leave it out")
        return _of_module(model, task, inputs, batch_size, seq_len, trainable)
    if inputs is not None:
        raise MemOptError("example_inputs: are those of a torch.nn.Module; leave them out")
    from transformers import PretrainedConfig

    if not isinstance(model, PretrainedConfig):
        if not isinstance(model, str | PathLike):
            raise MemOptError(
                "plan takes a folder, a name on the hub, a transformers config or a torch.nn.Module, not "
                f"{excerpt(type(model).__name__)}"
            )
        model = fspath(model)
    workload = Workload(model, "" if task is None else task, batch_size or 8, seq_len or 128, trainable, **given)
    return workload.checked(finds_task=task is None)


def _of_module(
    module: torch.nn.Module,
    task: str | None,
    inputs: object,
    batch_size: int | None,
    seq_len: int | None,
    trainable: tuple[str, ...],
) -> ModuleWorkload:
    if inputs is not None:
        for name, value in (("task", task), ("seq_len", seq_len)):
            if value is not None:
                raise MemOptError(f"{name} together with example_inputs, which have it; leave one of them out")
        return ModuleWorkload.of(module, inputs, batch_size, trainable)
    from transformers import PretrainedConfig

    if not isinstance(model_config := getattr(module, "config", None), PretrainedConfig):
        raise MemOptError(f"{type(module).__name__}: a module without a transformers config needs example_inputs")
    # PEFT's class tells nothing of the task.
    base_of: Any = getattr(module, "get_base_model", None)
    inner = base_of() if base_of is not None else module
    task = task_of([type(inner).__name__]) if task is None else task
    batch = Workload(model_config, task, batch_size or 8, seq_len or 128)
    batch.check()
    with preserved_generators(), torch.device("meta"):
        inputs = batch.batch_of(model_config)
    return ModuleWorkload.of(module, inputs, None, trainable)


# Short names of categories.
_NAMES = {OPTIMIZER: "optimizer", SAVED: "activations", TEMPORARY: "temporaries"}
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
    _spec: StepSpec
    _found: predictions.StepEstimate = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_found", self._ask(self._selection))

    @property
    def table(self) -> PlanTable:
        """The plan table, with the prediction in its header."""
        return self._found.table

    @property
    def peak(self) -> int:
        """The most that the step holds, in bytes: what a budget bounds."""
        return self._found.peak

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
        return {**held, "allocator": self.peak - round(self._found.peak_mib * MIB)}

    @property
    def at_peak(self) -> tuple[Group, ...]:
        """The tensors at the peak by category, row of the plan table or operator, and module, largest first; their
        bytes add up to `peak`."""
        timeline = self._found.timeline
        assert timeline is not None
        return timeline.at_peak(self.peak)

    @cached_property
    def curve(self) -> tuple[CurvePoint, ...]:
        """Plans of budgets, from the smallest possible to no plan; traces the model once more at the first call."""
        frontier = self._ask(Selection(), with_curve=True).frontier
        return frontier.points if frontier is not None else ()

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """The ways to train side by side: plain PyTorch, Trainer's checkpointing, the engine without a plan, level 1,
        and what is selected; takes some seconds at the first call."""
        if self._spec.fsdp > 1:
            raise MemOptError("ways together with fsdp: plain PyTorch is simulated on one device; leave fsdp out")
        plain = factory(self._engine).plain_ways(self._workload, self._spec)
        return (*plain, *self._ask(self._selection, with_ways=True).ways)

    @property
    def plan(self) -> PlanFile | None:
        """The plan, activation by activation."""
        return self._found.plan

    def fits(self, budget: str | int = AUTO) -> bool:
        """True where the peak is within a budget.

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
        return factory(self._engine).largest_batch(self._workload, self._selection, self._spec, wanted)

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
        rows = [(name, gib_text(size)) for name, size in self.breakdown.items() if size]
        grid = tabulate([*rows, ("peak", gib_text(self.peak))], tablefmt="html", disable_numparse=True)
        title = html.escape(f"Predicted peak of a step: {gib_text(self.peak)}")
        return f"<div><p><b>{title}</b></p>{grid}{self.table._repr_html_()}</div>"

    def _ask(
        self, selection: Selection, with_curve: bool = False, with_ways: bool = False
    ) -> predictions.StepEstimate:
        return factory(self._engine).estimate(
            self._workload, selection, self._spec, with_curve=with_curve, with_ways=with_ways
        )


def _budget(budget: str | int) -> Budget:
    budget = checked("budget", budget, Annotated[str | int, _BYTES])
    if isinstance(budget, int):
        return Budget(f"{budget} bytes", budget)
    try:
        return parse_budget(budget)
    except MemOptError as error:
        raise MemOptError(str(error).replace("--memory_opt_budget", "budget")) from error
