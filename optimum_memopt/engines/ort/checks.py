"""Checks whether ONNX Runtime can train a model, Trainer or traced forward; selects the attention implementation."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer

from optimum_memopt.compat.accelerate import fsdp_version
from optimum_memopt.compat.installed import installed_version
from optimum_memopt.compat.torch import dtype_name, writes_to
from optimum_memopt.compat.transformers import CHECKPOINTING_FIELDS, attention_implementation, checkpoint_function
from optimum_memopt.engines.ort.compat import installation, internals, ortmodule
from optimum_memopt.engines.ort.compat.extensions import BUILD_COMMAND
from optimum_memopt.engines.shared import in_place
from optimum_memopt.engines.shared.forward_patch import ForwardState
from optimum_memopt.errors import MemOptError, UnsupportedModelError, abbreviate
from optimum_memopt.generators import TORCH
from optimum_memopt.logs import get_logger

# Names of attention dropout in transformers' configs.
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "dropout_rate")
# ORT's gradient of Squeeze fails in T5's sdpa graph, also without dropout.
_EAGER_ONLY = frozenset({"t5", "mt5", "umt5", "longt5"})
_DATA_PARALLEL = (
    "ONNX Runtime cannot train under DataParallel; start one process for each GPU, for example with accelerate "
    "launch, or make one GPU visible with CUDA_VISIBLE_DEVICES=0"
)
_COMPILE = "give --memory_opt_engine compile"


class UnsupportedByOrt(Exception):
    """Raised while the graph is built if ONNX Runtime cannot train the model; the message is the reason."""


def check(model: torch.nn.Module, checkpointing: bool = False) -> None:
    """Refuse models that ONNX Runtime cannot train or would train wrongly.

    Args:
        checkpointing: activation checkpointing stays on, and must be re-entrant.

    Raises:
        UnsupportedModelError: no parameters, DataParallel, several devices, half precision on the CPU, a device that
            ONNX Runtime does not support, or activation checkpointing that is not re-entrant.
    """
    in_place.check_parameters(model)
    name = type(model).__name__
    if isinstance(model, torch.nn.DataParallel):
        raise UnsupportedModelError(f"the ort engine under torch.nn.DataParallel: {_DATA_PARALLEL}")
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    functions = (checkpoint_function(module) for module in checkpointed)
    if checkpointing and not all(getattr(function, "keywords", {}).get("use_reentrant") for function in functions):
        # The exporter traces through non-reentrant checkpointing, so nothing would be checkpointed.
        raise UnsupportedModelError(
            f"{name} has activation checkpointing that is not re-entrant: the export would lose it; call "
            'model.gradient_checkpointing_enable({"use_reentrant": True})'
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        placed = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(f"{name} is on several devices ({placed}); the ort engine trains on one")
    (device,) = devices
    check_device(name, device.type)
    halves = {p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32}
    if halves and device.type == "cpu":
        dtypes = ", ".join(sorted(map(dtype_name, halves)))
        raise UnsupportedModelError(
            f"{name} has {dtypes} parameters; ONNX Runtime's CPU provider trains float32 only",
            f"call model.float(), or {_COMPILE}",
        )


def check_device(name: str, device_type: str) -> None:
    """Refuse devices that the installed ONNX Runtime does not support: it would read GPU memory as host memory."""
    if device_type == "cpu":
        return
    build = " ".join(installed_version(installation.DISTRIBUTIONS) or ("onnxruntime-training",))
    if device_type == "cuda" and ortmodule.runs_on_gpus():
        if library := installation.missing_library():
            raise UnsupportedModelError(
                f"{name} is on cuda, and {build} does not find {library} of CUDA 11.8",
                f"{_COMPILE}, or {installation.library_command(library)}",
            )
        return
    raise UnsupportedModelError(
        f"{name} is on {device_type}, where {build} does not run",
        f"{_COMPILE}, or install a build of onnxruntime-training for this device",
    )


def check_operators(name: str, inlined_functions: Sequence[str], graph: Any, has_extensions: bool) -> None:
    """Refuse an exported graph that needs the torch extensions if they are missing or off.

    Args:
        name: name of the model's class.
        inlined_functions: names of `torch.autograd.Function`s that the export inlined.

    Raises:
        UnsupportedModelError: the extensions are needed.
    """
    if inlined_functions:
        suggestion = "leave out --ort_custom_autograd false" if has_extensions else f"build them with: {BUILD_COMMAND}"
        raise UnsupportedModelError(
            f"{name} uses torch.autograd.Function ({', '.join(inlined_functions)}), whose backward ONNX Runtime can "
            "only run with the torch extensions",
            f"{suggestion}, or {_COMPILE}",
        )
    in_torch = {
        next((attribute.s.decode() for attribute in node.attribute if attribute.name == "operator"), node.op_type)
        for node in graph.node
        if node.op_type == "ATen"
    }
    if in_torch and not has_extensions:
        raise UnsupportedModelError(
            f"{name} needs torch's own {', '.join(sorted(in_torch))}, which ONNX Runtime can only run with the torch "
            "extensions",
            f"build them with: {BUILD_COMMAND}, or {_COMPILE}",
        )


def unsupported_reason(model: torch.nn.Module) -> str:
    """Returns why ONNX Runtime would train `model` wrongly in its current state; empty if it would not."""
    norms = [
        name
        for name, module in model.named_modules()
        if module.training and getattr(module, "track_running_stats", False) and module.running_mean is not None
    ]
    if norms:
        return f"it would not update the running statistics of {abbreviate(norms)}"
    in_eval = [name for name, module in model.named_modules() if not module.training and _depends_on_mode(module)]
    if in_eval:
        return f"it trains all submodules or none, and {abbreviate(in_eval)} are in evaluation mode"
    # BART and similar models store the layerdrop probability on modules, Wav2Vec2 only in the config.
    owners = {f"model.{name}" if name else "model": module for name, module in model.named_modules()}
    probabilities = _layerdrops(owners) or _layerdrops({"model.config": vars(model).get("config")})
    if dropped := [f"{name} (now {value})" for name, value in probabilities.items() if value > 0]:
        return f"it would drop the same layers at each step; set {abbreviate(dropped)} to 0"
    return ""


def _layerdrops(owners: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{name}.{attribute}": value
        for name, owner in owners.items()
        for attribute, value in getattr(owner, "__dict__", {}).items()
        if "layerdrop" in attribute and isinstance(value, int | float)
    }


def _depends_on_mode(module: torch.nn.Module) -> bool:
    if isinstance(module, internals.DROPOUTS):
        return module.p > 0
    dropouts = (value for name, value in vars(module).items() if "drop" in name and isinstance(value, float))
    return getattr(module, "track_running_stats", False) or any(value > 0 for value in dropouts)


def check_autocast(model: torch.nn.Module) -> None:
    """Refuse a training forward under autocast on the CPU. Raises UnsupportedModelError."""
    if next(model.parameters()).device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        raise UnsupportedModelError(
            "a training forward under torch.autocast on the CPU: ONNX Runtime's CPU provider trains float32 only",
            f"turn autocast off, train on a GPU, or {_COMPILE}",
        )


def check_arguments(args: Any, checkpointing: bool = False, zero_stage3: bool = False) -> None:
    """Refuse `transformers.TrainingArguments` that ONNX Runtime cannot train with.

    Args:
        checkpointing: activation checkpointing stays on, and must be re-entrant.
        zero_stage3: allow DeepSpeed ZeRO stage 3.

    Raises:
        MemOptError: half precision on the CPU, non-reentrant activation checkpointing that stays on, torch.compile,
            FSDP, ZeRO 3, DataParallel.
    """
    for precision in ("fp16", "bf16"):
        if getattr(args, precision) and args.device.type == "cpu":
            raise MemOptError(
                f"--{precision} with the ort engine on the CPU: ONNX Runtime's CPU provider trains float32 only; "
                f"leave --{precision} out, train on a GPU, or {_COMPILE}"
            )
    enabled = [name for name in CHECKPOINTING_FIELDS if getattr(args, name, False)]
    reentrant = any((getattr(args, f"{name}_kwargs", None) or {}).get("use_reentrant") for name in enabled)
    if enabled and checkpointing and not reentrant:
        raise MemOptError(
            f"--{enabled[0]} that is not re-entrant with the ort engine: the export would lose it; add "
            f"--{enabled[0]}_kwargs '{{\"use_reentrant\": true}}'"
        )
    if args.torch_compile:
        raise MemOptError("--torch_compile with the ort engine: both compile the model; leave one of them out")
    if fsdp_version(args) is not None:
        raise MemOptError("FSDP with the ort engine: ONNX Runtime needs unsharded parameters; use DDP or ZeRO 0, 1, 2")
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3 and not zero_stage3:
        # The export fails with "no attribute 'ds_id'"; ORT's support for stage 3 ends with DeepSpeed 0.13.1.
        raise MemOptError(
            "DeepSpeed ZeRO stage 3 with the ort engine: ONNX Runtime needs unsharded parameters; use ZeRO stage 0, 1 "
            "or 2 (`zero_optimization.stage`), with --memory_opt_level 1 if the step needs less memory"
        )
    if args.n_gpu > 1:
        raise MemOptError(f"the ort engine with {args.n_gpu} GPUs in one process: {_DATA_PARALLEL}")


def needs_eager_attention(config: Any) -> str:
    """Returns why a model with this config needs eager attention on ONNX Runtime; empty if it does not."""
    implementation = attention_implementation(config)
    if implementation not in (None, "eager", "sdpa"):
        return f"{implementation} attention cannot be exported"
    if getattr(config, "model_type", None) in _EAGER_ONLY:
        return "ONNX Runtime has no gradient for this model's sdpa graph"
    # gradient_builder_base.h:123, OutputDefs: the exported sdpa lacks the dropout mask that its gradient reads.
    dropouts = [value for name in _ATTENTION_DROPOUTS if isinstance(value := getattr(config, name, None), int | float)]
    if not dropouts or any(dropouts):
        why = "" if dropouts else ", and the config names no dropout probability"
        return f"ONNX Runtime has no gradient for sdpa with dropout{why}"
    return ""


def attention(model: torch.nn.Module) -> str | None:
    return attention_implementation(getattr(model, "config", None))


def choose_attention(model: Any) -> str | None:
    """Switch a model to eager attention if ONNX Runtime cannot train its current implementation; returns the replaced
    one, None if unchanged."""
    before = attention(model)
    if before in (None, "eager") or not hasattr(model, "set_attn_implementation"):
        return None
    if not (reason := needs_eager_attention(model.config)):
        return None
    get_logger().info(f"attention {before} -> eager while training on ONNX Runtime: {reason}")
    model.set_attn_implementation("eager")
    return before


def remarks(model: torch.nn.Module) -> tuple[str, ...]:
    """Returns log lines about differences from training in plain PyTorch."""
    lines = []
    hooked = [
        name
        for name, module in model.named_modules()
        if name and any(getattr(module, hooks, None) for hooks in internals.MODULE_HOOKS)
    ]
    if hooked:
        lines.append(
            f"hooks on {len(hooked)} submodules ({abbreviate(hooked)}) run once, at export: ONNX Runtime does not run "
            "modules"
        )
    if any(parameter.is_cuda for parameter in model.parameters()):
        lines.append(
            "ONNX Runtime allocates CUDA memory outside torch's allocator: the memory phases do not include it"
        )
    return tuple(lines)


@contextlib.contextmanager
def refuse_side_effects(module: torch.nn.Module) -> Iterator[None]:
    """Returns a context for a traced forward that compares the tensors of `module`, and the random states of Python
    and numpy, before and after it.

    Raises:
        UnsupportedByOrt: the forward wrote to a buffer or a parameter, in place or by assignment, or drew random
            numbers outside of torch. ONNX Runtime would never update these tensors, and would reuse the same numbers
            at each step. Buffers and random states are restored, for the forward that runs instead.
    """
    before = ForwardState.of(module, with_buffers=True)
    tensors = (*module.named_buffers(), *module.named_parameters())
    versions = {name: (tensor, writes_to(tensor)) for name, tensor in tensors}
    yield
    after = dict((*module.named_buffers(), *module.named_parameters()))
    changed = [
        name
        for name, (tensor, version) in versions.items()
        if name in after and (after[name] is not tensor or writes_to(tensor) != version)
    ]
    draws_from = [name for name in before.generators.changed() if name != TORCH]
    if not changed and not draws_from:
        return
    before.restore()
    if changed:
        raise UnsupportedByOrt(
            f"its forward writes to {abbreviate(changed)}, which would be updated neither here nor in checkpoints"
        )
    raise UnsupportedByOrt(
        f"its forward draws from {' and '.join(draws_from)}, and the graph would use the same numbers at each step; "
        "use torch's random functions"
    )


def check_trainer_loss(trainer: Trainer) -> None:
    """Refuse a Trainer with `compute_loss_func` or a `compute_loss` of its own. Raises MemOptError."""
    if trainer.compute_loss_func is not None:
        raise MemOptError(
            "--ort_module_with_loss with compute_loss_func: that function reads the model's outputs outside of ONNX "
            "Runtime; leave out one of the two, or compute this loss in the model's forward"
        )
    if "compute_loss" in vars(trainer) or type(trainer).compute_loss is not Trainer.compute_loss:
        raise MemOptError(
            f"--ort_module_with_loss with {type(trainer).__name__}'s own compute_loss: it computes the loss outside "
            "of ONNX Runtime, from outputs that would not be there; leave out one of the two, or compute this loss in "
            "the model's forward"
        )
