"""`plan`: the memory of a training step from Python, before anything is loaded, allocated or run."""

from collections.abc import Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, Any

import torch

from optimum_memopt.engines.api import predictions
from optimum_memopt.engines.api.run import StepSpec
from optimum_memopt.engines.shared.registry import engine_names, factory
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.memory import optimizers
from optimum_memopt.option_values import Numbers, checked
from optimum_memopt.options import MemOptOptions, resolve
from optimum_memopt.predict.estimate import Estimate
from optimum_memopt.predict.workload import TASKS, ModuleWorkload, Workload

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Ends of the names of transformers' classes.
_HEADS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "ForImageClassification": "image-classification",
}
# Beyond as many rows or tokens torch's operators index with more than 32 bits.
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
) -> Estimate:
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
        level: as `--memory_opt_level`.
        config: as `--memory_opt_config`.
        plan_file: as `--memory_opt_plan`.
        device: that is planned for, as `h100`, or a JSON file; None: this machine's.
        bf16: under autocast, as Trainer's.
        fp16: under autocast, as Trainer's.
        optim: Trainer's name of the optimizer.
        gradient_accumulation_steps: micro-batches of a step.
        trainable: patterns of the parameters that train, as PEFT's `target_modules`, globs or regular expressions;
            empty: all that the model trains.
        compiler: `inductor` or `aot_eager`; None: the one that would train.

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
    workload = _workload(model, task, example_inputs, batch_size, seq_len, _patterns(trainable))
    engine = next(name for name in engine_names() if factory(name).predicts)
    options = MemOptOptions(
        memory_opt_engine=engine,
        memory_opt_budget=budget,
        memory_opt_level=level,
        memory_opt_config=config,
        memory_opt_plan=plan_file,
        memory_opt_compiler=compiler,
    )
    options.check()
    device = None if device is None else fspath(device)
    spec = StepSpec(device, compiler, "bfloat16" if bf16 else "float16" if fp16 else "", optim, steps)
    return Estimate(engine, workload, resolve(options).selection, spec)


def _patterns(trainable: object) -> tuple[str, ...]:
    found = trainable.split(",") if isinstance(trainable, str) else trainable
    if not isinstance(found, Sequence) or not all(isinstance(one, str) for one in found):
        raise MemOptError(f"trainable {excerpt(found)}: allowed are strings, and lists and tuples of them")
    return tuple(found)


def _workload(
    model: object,
    task: str | None,
    inputs: object,
    batch_size: int | None,
    seq_len: int | None,
    trainable: tuple[str, ...],
) -> predictions.Workload:
    if isinstance(model, torch.nn.Module):
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
    workload = Workload(model, "fill-mask" if task is None else task, batch_size or 8, seq_len or 128, trainable)
    workload.check()
    if task is None:
        names = getattr(workload.load_config(), "architectures", None) or ()
        workload = Workload(model, _task_of(names), workload.batch_size, workload.seq_len, trainable)
    return workload


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
    task = _task_of([type(module).__name__]) if task is None else task
    batch = Workload(model_config, task, batch_size or 8, seq_len or 128)
    batch.check()
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        inputs = batch.batch_of(model_config)
    return ModuleWorkload.of(module, inputs, None, trainable)


def _task_of(classes: Sequence[str]) -> str:
    for name in classes:
        for end, task in _HEADS.items():
            if name.endswith(end):
                return task
    named = f"{', '.join(classes)} does not tell it" if classes else "the config names no class that tells it"
    raise MemOptError(f"task: {named}; give one of {', '.join(TASKS)}")
