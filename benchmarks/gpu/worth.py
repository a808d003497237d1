"""The part `worth` of gpu/acceptance.py: the time and peak of a step, for this engine and other ways to train."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from gpu.checks import ALONE, Check, Figure, Setting, Turn, clean_up
from gpu.steps import MIB, RELATIVE, TINY, Batch, Shape, adamw, batch_of, made, on_host, planned, roberta, room, train
from gpu.trainer import distributed, observers

# Number of timed steps, and rows and tokens of the small batch to compile with for any batch.
_STEPS, _FEW = 8, (3, 64)
# torch.compile's activation_memory_budget.
_TORCHS_BUDGET = 0.5


@dataclass(frozen=True)
class Job:
    """A model with the layers of a published one, and its batch.

    Attributes:
        dtype: the dtype of autocast, see `steps.forward`; fp32 for none.
        weights: the dtype of the weights.
    """

    make: Callable[[Shape], Any]
    shape: Shape
    batch: Callable[[Shape], Batch]
    dtype: str = "bf16"
    weights: torch.dtype = torch.float32

    def model(self) -> Any:
        return made(lambda: self.make(self.shape), self.weights)


def _llama(shape: Shape) -> Any:
    import peft

    config = transformers.LlamaConfig(
        **shape.config(), num_key_value_heads=max(1, shape.heads // 4), tie_word_embeddings=True, use_cache=False
    )
    adapter = peft.LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter)


def _deberta(shape: Shape) -> Any:
    others = {"position_biased_input": False, "type_vocab_size": 0, "problem_type": "single_label_classification"}
    config = transformers.DebertaV2Config(**shape.config(), **RELATIVE, **others)
    return transformers.DebertaV2ForSequenceClassification(config)


def _causal(shape: Shape) -> Batch:
    batch = batch_of(shape)
    del batch["attention_mask"]
    return batch


def _masked(shape: Shape) -> Batch:
    """Returns a batch with labels for 15% of the tokens."""
    batch = batch_of(shape, padding=8)
    generator = torch.Generator().manual_seed(0)
    chosen = (torch.rand(batch["labels"].shape, generator=generator) < 0.15).cuda()
    return {**batch, "labels": batch["labels"].masked_fill(~chosen, -100)}


def _classified(shape: Shape) -> Batch:
    return {**batch_of(shape, padding=8), "labels": torch.arange(shape.batch).cuda() % 2}


JOBS = {
    "llama": Job(_llama, Shape(16, 2048, 32, 8192, 128256, 2, 2048), _causal, "fp32", torch.bfloat16),
    "roberta": Job(functools.partial(roberta, dropout=0.1), Shape(12, 1024, 16, 4096, 50265, 16, 512), _masked),
    "deberta": Job(_deberta, Shape(6, 1536, 24, 6144, 32000, 16, 256), _classified),
}


def _checkpointing(model: Any, is_on: bool = True) -> None:
    if not is_on:
        model.gradient_checkpointing_disable()
        return
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _as_it_is(model: Any, compiler: str) -> None:
    """Leave the model as it is, for plain PyTorch."""


def _checkpointed(model: Any, compiler: str) -> None:
    _checkpointing(model)


def _liger(model: Any, compiler: str) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model.get_base_model())


def _compiled(model: Any, compiler: str, dynamic: bool = False) -> None:
    model.compile(backend=compiler, dynamic=dynamic)


def _torchs_budget(model: Any, compiler: str) -> None:
    torch._functorch.config.activation_memory_budget = _TORCHS_BUDGET
    _compiled(model, compiler)


def _ours(model: Any, compiler: str, **options: Any) -> None:
    planned(model, dynamic=True, compiler=compiler, **options)


# Each sets up a model on the GPU for one way to train, with the given compiler.
WAYS: dict[str, Callable[[Any, str], None]] = {
    "eager": _as_it_is,
    "ckpt": _checkpointed,
    "liger": _liger,
    "tc": _compiled,
    "tcdyn": functools.partial(_compiled, dynamic=True),
    "tc_b50": _torchs_budget,
    "none": functools.partial(_ours, level=0),
    "noneplain": functools.partial(_ours, level=0, loss="plain"),
    "none_model": functools.partial(_ours, level=0, unit="model"),
    "L1": functools.partial(_ours, level=1),
    "L1plain": functools.partial(_ours, level=1, loss="plain"),
}
# Ways that compile for one batch size; the others compile with a small batch, for any size.
_WHOLE = ("tc", "tc_b50")


def step(setting: Setting, model: str, way: str) -> Iterator[Figure | Turn]:
    """Measure a step's time and peak."""
    job = JOBS[model]
    if setting.quick:
        job = replace(job, shape=TINY)
    trained, batch, compiler = job.model(), job.batch(job.shape), setting.compiler(model)
    optimizer = adamw(trained)
    few = job.batch(replace(job.shape, batch=_FEW[0], length=min(_FEW[1], job.shape.length)))
    if way == "B_ckpt":
        with room():
            _checkpointing(trained)
            limit = train(trained, batch, job.dtype, optimizer, steps=2, warm=1).allocated
            # States of this optimizer would be counted twice by an engine that is attached later.
            trained = optimizer = None
            clean_up()
            trained = job.model()
            optimizer = adamw(trained)
            # A tiny model's savings are smaller than the rounding to MiB.
            _ours(trained, compiler, budget=f"{limit // MIB + 2 * setting.quick}MiB")
            train(trained, batch, job.dtype, optimizer, steps=1, warm=1)
    else:
        WAYS[way](trained, compiler)
        with room() if way in _WHOLE else contextlib.nullcontext():
            train(trained, batch if way in _WHOLE else few, job.dtype, optimizer, steps=1, warm=1)
    with on_host(trained, optimizer):
        yield ALONE
    held = train(trained, batch, job.dtype, optimizer, 2 if setting.quick else _STEPS)
    data = {
        "wall": held.seconds,
        **{kind: getattr(held, kind) / MIB for kind in ("requested", "allocated", "reserved")},
    }
    yield Figure("step", True, f"{held.seconds * 1000:.1f} ms, {held.allocated / MIB:.0f} MiB", "", data)


def _checks() -> Iterator[Check]:
    for model in JOBS:
        needs = ("peft",) if model == "llama" else ()
        for way in (*WAYS, "B_ckpt"):
            more = {"liger": ("liger_kernel",), "B_ckpt": ("scipy",)}.get(way, ())
            if (way == "liger" and model != "llama") or (way.endswith("plain") and model == "deberta"):
                continue
            run = functools.partial(step, model=model, way=way)
            yield Check(f"{model} {way}", run, seconds=200, needs=(*needs, *more))
    yield Check("Trainer, observers", observers, seconds=180)
    yield Check("DDP of one process", distributed, seconds=240)


CHECKS = tuple(_checks())
