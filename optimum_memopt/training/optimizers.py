"""AdamW of another library in a Trainer: what it conflicts with, and how it is created."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from optimum_memopt.engines.shared.registry import OPTIMIZERS
from optimum_memopt.errors import MemOptError

if TYPE_CHECKING:
    from transformers import Trainer

FLAG = "--memory_opt_optim"


def check(name: str, trainer: "Trainer") -> None:
    """Refuse what would create another optimizer than the flag names, or none at all.

    Raises:
        MemOptError: the library, a compiler or the device is missing, or something else chooses the optimizer too.
    """
    config = deepspeed_config(trainer)
    device = "cpu" if _offloads(config) else trainer.args.device.type
    if conflict := _conflict(trainer) or _deepspeed_conflict(name, config) or OPTIMIZERS[name].missing(device):
        raise MemOptError(f"{FLAG} {name}: {conflict}")


def create(name: str, trainer: "Trainer", create_optimizer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The Trainer's `create_optimizer` with this optimizer's class: parameter groups stay the Trainer's.

    Raises:
        MemOptError: the Trainer has a `create_optimizer` of its own that makes another one.
    """
    if trainer.optimizer is not None:
        return create_optimizer(*args, **kwargs)
    config = deepspeed_config(trainer)
    if name == "deepspeed_cpu_adam" and config is not None and _offloads(config):
        # Else accelerate (1.15, `map_pytorch_optim_to_deepspeed`) makes a new DeepSpeedCPUAdam of it, with L2
        # regularization instead of decoupled weight decay. DeepSpeed wants its own CPU optimizer, which this is.
        config["zero_force_ds_cpu_optimizer"] = False
    cls, arguments = OPTIMIZERS[name].load()
    # Read now, since a hyperparameter search changes them from run to run.
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
            f"{FLAG} {name}: {type(trainer).__name__}.create_optimizer makes its own {type(optimizer).__name__}; "
            "leave one of them out"
        )
    return optimizer


def deepspeed_config(trainer: "Trainer") -> dict[str, Any] | None:
    """The DeepSpeed config of this run, from --deepspeed or from accelerate's launcher; None without DeepSpeed."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.deepspeed_config


def _conflict(trainer: "Trainer") -> str:
    args = trainer.args
    if trainer.optimizer is not None:
        return "the Trainer was given an optimizer (optimizers=…); leave one of them out"
    if trainer.optimizer_cls_and_kwargs is not None:
        return "the Trainer was given optimizer_cls_and_kwargs; leave one of them out"
    if args.optim != type(args).__dataclass_fields__["optim"].default:
        return f"--optim {getattr(args.optim, 'value', args.optim)} names an optimizer too; leave one of them out"
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
        return 'the DeepSpeed config has an "optimizer" of its own, which is the one that runs; leave one of them out'
    # accelerate would put DeepSpeedCPUAdam in its place.
    forced = name != "torch_fused_adamw" or config.get("zero_force_ds_cpu_optimizer", True)
    if name != "deepspeed_cpu_adam" and _offloads(config) and forced:
        return f"DeepSpeed's offload_optimizer steps on the CPU; use {FLAG} deepspeed_cpu_adam, or do not offload"
    return ""
