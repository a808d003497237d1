"""AdamW of other libraries in a Trainer: availability, conflicts, and creation."""

import importlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from optimum_memopt.compat.installed import installed_version
from optimum_memopt.compat.torch import extension_lock
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger

if TYPE_CHECKING:
    from transformers import Trainer


@dataclass(frozen=True)
class Provider:
    """One value of `--memory_opt_optim`.

    Attributes:
        missing: returns why it cannot run on this device type and what to do; empty if it can.
        load: returns the class, and the arguments that make it equivalent to torch's AdamW (decoupled weight decay).
        needs: requirement for the flag's help, such as `CUDA`; empty: none.
    """

    missing: Callable[[str], str]
    load: Callable[[], tuple[type[torch.optim.Optimizer], dict[str, Any]]]
    needs: str = ""


def _deepspeed_missing(device: str, builder: str, needs_cpu: bool) -> str:
    if installed_version(("deepspeed",)) is None:
        return "deepspeed is not installed; pip install 'optimum-memopt[deepspeed]', or use torch_fused_adamw"
    if needs_cpu and device != "cpu":
        return (
            f"DeepSpeedCPUAdam steps on the CPU, but this run is on {device}; turn on DeepSpeed's offload_optimizer, "
            "or use deepspeed_fused_adam"
        )
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if not needs_cpu and accelerator.partition(":")[0] != device:
        return f"DeepSpeed builds for {accelerator}, but this run is on {device}; set DS_ACCELERATOR={device}"
    operator = getattr(importlib.import_module("deepspeed.ops.op_builder"), builder)()
    if not operator.is_compatible():
        return f"DeepSpeed cannot build {operator.name} here ({operator.error_log}); use torch_fused_adamw"
    if importlib.import_module("deepspeed.git_version_info").installed_ops.get(operator.name):
        return ""
    if lacking := _build_tools_missing():
        return f"DeepSpeed compiles its operator {operator.name}: {lacking}, or use torch_fused_adamw"
    name = operator.name
    get_logger().info(f"DeepSpeed compiles its operator {name} at its first use on a machine, which takes minutes")
    if (lock := extension_lock(name)).exists():
        get_logger().warning(
            f"{lock}: waiting for another process that compiles {name}; if there is none, delete this file, which a "
            "killed process leaves behind"
        )
    return ""


def _build_tools_missing() -> str:
    tools = importlib.import_module("torch.utils.cpp_extension")
    if shutil.which(tools.get_cxx_compiler()) is None:
        return f"no C++ compiler {tools.get_cxx_compiler()} here; install one, or name yours in CXX"
    if not tools.is_ninja_available():
        return "no ninja on the PATH; pip install ninja and activate its environment"
    return ""


def _of_deepspeed(name: str, mode: str, builder: str, needs: str = "") -> Provider:
    return Provider(
        lambda device: _deepspeed_missing(device, builder, needs_cpu=bool(needs)),
        lambda: (getattr(importlib.import_module("deepspeed.ops.adam"), name), {mode: True}),
        needs,
    )


def _torch_missing(device: str) -> str:
    try:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device=device))], fused=True)
    except RuntimeError as error:
        return f"torch {torch.__version__} has no fused AdamW on {device} ({error}); leave the flag out"
    return ""


OPTIMIZERS = {
    "deepspeed_fused_adam": _of_deepspeed("FusedAdam", "adam_w_mode", "FusedAdamBuilder"),
    "deepspeed_cpu_adam": _of_deepspeed(
        "DeepSpeedCPUAdam", "adamw_mode", "CPUAdamBuilder", needs="the CPU or DeepSpeed's offload"
    ),
    "torch_fused_adamw": Provider(_torch_missing, lambda: (torch.optim.AdamW, {"fused": True})),
}


def register_optimizer(name: str, provider: Provider) -> None:
    """Register a value of `--memory_opt_optim`, before `optimum_memopt.options` is imported. Raises ValueError if the
    name is taken."""
    if name in OPTIMIZERS:
        raise ValueError(f"optimizer {name} is already registered")
    OPTIMIZERS[name] = provider


FLAG = "--memory_opt_optim"


def check(name: str, trainer: "Trainer") -> None:
    """Refuse a Trainer that would create an optimizer other than the one named by the flag, or none.

    Raises:
        MemOptError: the library, a compiler or the device is missing, or another setting chooses the optimizer too.
    """
    config = deepspeed_config(trainer)
    device = "cpu" if _offloads(config) else trainer.args.device.type
    if conflict := _conflict(trainer) or _deepspeed_conflict(name, config) or OPTIMIZERS[name].missing(device):
        raise MemOptError(f"{FLAG} {name}: {conflict}")


def create(name: str, trainer: "Trainer", create_optimizer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the Trainer's `create_optimizer` with this optimizer's class; parameter groups remain the Trainer's.

    Raises:
        MemOptError: the Trainer's own `create_optimizer` creates another optimizer.
    """
    if trainer.optimizer is not None:
        return create_optimizer(*args, **kwargs)
    config = deepspeed_config(trainer)
    if name == "deepspeed_cpu_adam" and config is not None and _offloads(config):
        # Otherwise accelerate (1.15, `map_pytorch_optim_to_deepspeed`) converts it to a new DeepSpeedCPUAdam, with L2
        # regularization instead of decoupled weight decay. DeepSpeed requires its own CPU optimizer, and this is one.
        config["zero_force_ds_cpu_optimizer"] = False
    cls, arguments = OPTIMIZERS[name].load()
    # Read here, since a hyperparameter search changes them between runs.
    args_now = trainer.args
    betas = (args_now.adam_beta1, args_now.adam_beta2)
    arguments |= {"lr": args_now.learning_rate, "betas": betas, "eps": args_now.adam_epsilon}
    trainer.optimizer_cls_and_kwargs = (cls, arguments)
    try:
        optimizer = create_optimizer(*args, **kwargs)
    finally:
        trainer.optimizer_cls_and_kwargs = None
    if not isinstance(optimizer, cls):
        raise MemOptError(
            f"{FLAG} {name}: {type(trainer).__name__}.create_optimizer creates its own {type(optimizer).__name__}; "
            "leave out one of them"
        )
    return optimizer


def deepspeed_config(trainer: "Trainer") -> dict[str, Any] | None:
    """Returns the run's DeepSpeed config, from --deepspeed or accelerate's launcher; None without DeepSpeed."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.deepspeed_config


def _conflict(trainer: "Trainer") -> str:
    args = trainer.args
    if trainer.optimizer is not None:
        return "the Trainer was given an optimizer (optimizers=…); leave out one of them"
    if trainer.optimizer_cls_and_kwargs is not None:
        return "the Trainer was given optimizer_cls_and_kwargs; leave out one of them"
    if args.optim != type(args).__dataclass_fields__["optim"].default:
        return f"--optim {getattr(args.optim, 'value', args.optim)} names an optimizer too; leave out one of them"
    if args.optim_args:
        return "--optim_args are for Trainer's own optimizers; leave them out"
    return ""


def _offloads(config: Mapping[str, Any] | None) -> bool:
    zero = (config or {}).get("zero_optimization") or {}
    return bool(zero.get("cpu_offload")) or (zero.get("offload_optimizer") or {}).get("device", "none") != "none"


def _deepspeed_conflict(name: str, config: Mapping[str, Any] | None) -> str:
    if config is None:
        return ""
    if "optimizer" in config:
        return 'the DeepSpeed config has its own "optimizer", which takes precedence; leave out one of them'
    # accelerate would replace it by DeepSpeedCPUAdam.
    forced = name != "torch_fused_adamw" or config.get("zero_force_ds_cpu_optimizer", True)
    if name != "deepspeed_cpu_adam" and _offloads(config) and forced:
        return f"DeepSpeed's offload_optimizer steps on the CPU; use {FLAG} deepspeed_cpu_adam, or do not offload"
    return ""
