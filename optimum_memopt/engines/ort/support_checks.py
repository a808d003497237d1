"""What ONNX Runtime can train: refusals before training, and what has to be set for it to train rightly."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from optimum_memopt.engines import in_place
from optimum_memopt.engines.ort import compat
from optimum_memopt.engines.ort.installed import DISTRIBUTIONS
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.installed import installed_version
from optimum_memopt.logs import get_logger

# Names of attention dropout in transformers' configs.
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "dropout_rate")
# T5's sdpa graph fails in ORT's gradient of Squeeze even without dropout.
_EAGER_ONLY = frozenset({"t5", "mt5", "umt5", "longt5"})
_DATA_PARALLEL_WAY_OUT = (
    "ONNX Runtime cannot train under DataParallel; start one process for each GPU, for example with accelerate "
    "launch, or make one GPU visible with CUDA_VISIBLE_DEVICES=0"
)
_COMPILE = "give --memory_opt_engine compile"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Unsuitable(Exception):
    """Why ONNX Runtime cannot train a model, found while its graph is built; the message goes on from "because"."""


def check(model: torch.nn.Module, checkpointing: bool = False) -> None:
    """Refuse what ONNX Runtime would train wrongly or not at all.

    Args:
        checkpointing: activation checkpointing stays, which has to be re-entrant.

    Raises:
        UnsupportedModelError: no parameters, DataParallel, several devices, half precision on the CPU, a device that
            ONNX Runtime does not run on, activation checkpointing that stays and is not re-entrant.
    """
    in_place.check_parameters(model)
    name = type(model).__name__
    if isinstance(model, torch.nn.DataParallel):
        raise UnsupportedModelError(f"the ort engine under torch.nn.DataParallel: {_DATA_PARALLEL_WAY_OUT}")
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if checkpointed and checkpointing:
        _check_reentrant(name, checkpointed)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        placed = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(f"{name} lies on several devices ({placed}); the ort engine trains on one")
    for device in devices:
        check_device(name, device.type)
    halves = {p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32}
    if halves and torch.device("cpu") in devices:
        dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in halves))
        raise UnsupportedModelError(
            f"{name} has {dtypes} parameters; ONNX Runtime's CPU provider trains float32 only",
            f"call model.float(), or {_COMPILE}",
        )


def check_device(name: str, device_type: str) -> None:
    """Refuse parameters where the installed ONNX Runtime does not run: it would read GPU memory as the host's.

    Args:
        name: of the model's class.
        device_type: of its parameters, as `cuda`.

    Raises:
        UnsupportedModelError: see there.
    """
    if device_type == "cpu" or (device_type == "cuda" and compat.runs_on_gpus()):
        return
    build = " ".join(installed_version(DISTRIBUTIONS) or ("onnxruntime-training",))
    raise UnsupportedModelError(
        f"{name} lies on {device_type}, where {build} does not run",
        f"{_COMPILE}, or install a build of onnxruntime-training for this device",
    )


def _check_reentrant(name: str, modules: Sequence[torch.nn.Module]) -> None:
    """The exporter looks through torch's other kind of checkpointing, so that nothing would be checkpointed."""
    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in modules)
    if not all(getattr(function, "keywords", {}).get("use_reentrant") for function in functions):
        raise UnsupportedModelError(
            f"{name} has activation checkpointing that is not re-entrant: the export would lose it; call "
            'model.gradient_checkpointing_enable({"use_reentrant": True})'
        )


def why_not(model: torch.nn.Module) -> str:
    """Why ONNX Runtime would train `model`, as it is now, wrongly; empty when it would not."""
    norms = [
        name
        for name, module in model.named_modules()
        if module.training and getattr(module, "track_running_stats", False) and module.running_mean is not None
    ]
    if norms:
        return f"it would not keep the running statistics of {some(norms)}"
    still = [name for name, module in model.named_modules() if not module.training and _depends_on_mode(module)]
    if still:
        return f"it trains all submodules or none, and {some(still)} are in evaluation mode"
    if dropped := _dropped_layers(model):
        return f"it would drop the same layers at each step; set {some(dropped)} to 0"
    return ""


def _dropped_layers(model: torch.nn.Module) -> list[str]:
    """Probabilities to leave out whole layers, which a forward does in Python, where the export looks once: BART and
    its kin have them on the modules, Wav2Vec2 in the config alone."""
    found = {
        f"model.{name}.{attribute}" if name else f"model.{attribute}": value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if "layerdrop" in attribute and isinstance(value, int | float)
    }
    if not found:
        config = vars(model).get("config")
        found = {
            f"model.config.{attribute}": value
            for attribute, value in getattr(config, "__dict__", {}).items()
            if "layerdrop" in attribute and isinstance(value, int | float)
        }
    return [f"{name} (now {value})" for name, value in found.items() if value > 0]


def _depends_on_mode(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0
    dropouts = (value for name, value in vars(module).items() if "drop" in name and isinstance(value, float))
    return getattr(module, "track_running_stats", False) or any(value > 0 for value in dropouts)


def some(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_autocast(model: torch.nn.Module) -> None:
    """Refuse a training forward under autocast on the CPU.

    Raises:
        UnsupportedModelError: see there.
    """
    parameter = next(model.parameters(), None)
    if (parameter is None or parameter.device.type == "cpu") and torch.is_autocast_enabled("cpu"):
        raise UnsupportedModelError(
            "a training forward under torch.autocast on the CPU: ONNX Runtime's CPU provider trains float32 only",
            f"leave autocast out, train on a GPU, or {_COMPILE}",
        )


def check_arguments(args: Any, checkpointing: bool = False, zero_stage3: bool = False) -> None:
    """Refuse `transformers.TrainingArguments` that ONNX Runtime cannot train with.

    Args:
        checkpointing: activation checkpointing stays, which has to be re-entrant.
        zero_stage3: ZeRO stage 3 is allowed.

    Raises:
        MemOptError: half precision on the CPU, activation checkpointing, torch.compile, FSDP, ZeRO 3, DataParallel.
    """
    for precision in ("fp16", "bf16"):
        if getattr(args, precision) and args.device.type == "cpu":
            raise MemOptError(
                f"--{precision} with the ort engine on the CPU: ONNX Runtime's CPU provider trains float32 only; "
                f"leave --{precision} out, train on a GPU, or {_COMPILE}"
            )
    asked = [name for name in ("activation_checkpointing", "gradient_checkpointing") if getattr(args, name, False)]
    reentrant = any((getattr(args, f"{name}_kwargs", None) or {}).get("use_reentrant") for name in asked)
    if asked and checkpointing and not reentrant:
        raise MemOptError(
            f"--{asked[0]} that is not re-entrant with the ort engine: the export would lose it; add "
            f"--{asked[0]}_kwargs '{{\"use_reentrant\": true}}'"
        )
    if args.torch_compile:
        raise MemOptError("--torch_compile with the ort engine: both compile the model; leave one of them out")
    # accelerate's launcher and config file ask for FSDP in the environment, without the Trainer's argument.
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise MemOptError("FSDP with the ort engine: ONNX Runtime needs whole parameters; use DDP or ZeRO 0, 1, 2")
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3 and not zero_stage3:
        # Fails at the export with "no attribute 'ds_id'"; ORT's own support of stage 3 ends with DeepSpeed 0.13.1.
        raise MemOptError(
            "DeepSpeed ZeRO stage 3 with the ort engine: ONNX Runtime needs whole parameters; use ZeRO stage 0, 1 or "
            "2 (`zero_optimization.stage`), with --memory_opt_level 1 if the step needs less memory"
        )
    if args.n_gpu > 1:
        raise MemOptError(f"the ort engine with {args.n_gpu} GPUs in one process: {_DATA_PARALLEL_WAY_OUT}")


def attention_dropout(config: Any) -> float | None:
    """The largest attention dropout that a transformers config names, None when it names none."""
    values = [
        getattr(config, name) for name in _ATTENTION_DROPOUTS if isinstance(getattr(config, name, None), int | float)
    ]
    return max(values, default=None)


def needs_eager_attention(config: Any) -> str:
    """Why a model with this config trains on ONNX Runtime with eager attention only; empty when sdpa trains too."""
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in (None, "eager", "sdpa"):
        return f"{implementation} attention cannot be exported"
    if getattr(config, "model_type", None) in _EAGER_ONLY:
        return "ONNX Runtime has no gradient for this model's sdpa graph"
    # gradient_builder_base.h:123, OutputDefs: the exported sdpa drops the dropout's mask, which its gradient needs.
    if attention_dropout(config) != 0:
        return "ONNX Runtime has no gradient for sdpa with dropout"
    return ""


def attention(model: torch.nn.Module) -> str | None:
    """The attention implementation that a model of transformers has now."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def choose_attention(model: torch.nn.Module) -> str | None:
    """Set eager attention where the current one cannot train, and say so.

    Returns:
        The implementation that it replaced, None when nothing was changed.
    """
    config = getattr(model, "config", None)
    before = attention(model)
    if before in (None, "eager") or not hasattr(model, "set_attn_implementation"):
        return None
    reason = needs_eager_attention(config)
    if not reason:
        return None
    get_logger().info(f"attention {before} -> eager while training on ONNX Runtime: {reason}")
    model.set_attn_implementation("eager")
    return before


def remarks(model: torch.nn.Module) -> tuple[str, ...]:
    """What will not happen as in plain PyTorch."""
    lines = []
    hooked = [
        name
        for name, module in model.named_modules()
        if module is not model and any(getattr(module, hooks, None) for hooks in _HOOKS)
    ]
    if hooked:
        shown = ", ".join(hooked[:3]) + (", …" if len(hooked) > 3 else "")
        lines.append(
            f"hooks on {len(hooked)} submodules ({shown}) run once, at export: ONNX Runtime trains without modules"
        )
    if any(parameter.is_cuda for parameter in model.parameters()):
        lines.append(
            "ONNX Runtime allocates CUDA memory beside torch's allocator: the memory phases do not see its part"
        )
    return tuple(lines)
