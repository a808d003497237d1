"""AdamW of other libraries, values of `--memory_opt_optim`. Importing this imports none of the libraries."""

import importlib
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from optimum_memopt.compat import extension_lock
from optimum_memopt.installed import installed_version
from optimum_memopt.logs import get_logger


@dataclass(frozen=True)
class Provider:
    """One value of the flag.

    Attributes:
        missing: why it cannot run on this device type and what to do, empty when it can.
        load: the class, and the arguments that make it torch's AdamW (decoupled weight decay).
        needs: for the flag's help, as `CUDA`; empty: nothing.
    """

    missing: Callable[[str], str]
    load: Callable[[], tuple[type[torch.optim.Optimizer], dict[str, Any]]]
    needs: str = ""


def _deepspeed_missing(device: str, builder: str, needs_cpu: bool) -> str:
    if installed_version(("deepspeed",)) is None:
        return "deepspeed is not installed; pip install 'optimum-memopt[deepspeed]', or use torch_fused_adamw"
    if needs_cpu and device != "cpu":
        return (
            f"DeepSpeedCPUAdam steps on the CPU, this run is on {device}; turn on DeepSpeed's offload_optimizer, or "
            "use deepspeed_fused_adam"
        )
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if not needs_cpu and accelerator.partition(":")[0] != device:
        return f"DeepSpeed builds for {accelerator}, this run is on {device}; set DS_ACCELERATOR={device}"
    operator = getattr(importlib.import_module("deepspeed.ops.op_builder"), builder)()
    if not operator.is_compatible():
        return f"DeepSpeed cannot build {operator.name} here ({operator.error_log}); use torch_fused_adamw"
    if importlib.import_module("deepspeed.git_version_info").installed_ops.get(operator.name):
        return ""
    if lacking := _build_tools_missing():
        return f"DeepSpeed compiles its operator {operator.name}: {lacking}, or use torch_fused_adamw"
    get_logger().info(
        f"DeepSpeed compiles its operator {operator.name} at its first use on a machine, which takes minutes"
    )
    if (lock := extension_lock(operator.name)).exists():
        get_logger().warning(
            f"{lock}: another process compiles {operator.name}, and this one waits for it; a process that was killed "
            "leaves the file behind: if none compiles, delete it"
        )
    return ""


def _build_tools_missing() -> str:
    tools = importlib.import_module("torch.utils.cpp_extension")
    if shutil.which(tools.get_cxx_compiler()) is None:
        return f"no C++ compiler {tools.get_cxx_compiler()} here; install one or name yours in CXX"
    if not tools.is_ninja_available():
        return "no ninja on the PATH; pip install ninja and activate its environment"
    return ""


def _deepspeed_load(name: str, mode: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return getattr(importlib.import_module("deepspeed.ops.adam"), name), {mode: True}


def _torch_missing(device: str) -> str:
    try:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device=device))], fused=True)
    except RuntimeError as error:
        return f"torch {torch.__version__} has no fused AdamW on {device} ({error}); leave the flag out"
    return ""


OPTIMIZERS = {
    "deepspeed_fused_adam": Provider(
        lambda device: _deepspeed_missing(device, "FusedAdamBuilder", needs_cpu=False),
        lambda: _deepspeed_load("FusedAdam", "adam_w_mode"),
    ),
    "deepspeed_cpu_adam": Provider(
        lambda device: _deepspeed_missing(device, "CPUAdamBuilder", needs_cpu=True),
        lambda: _deepspeed_load("DeepSpeedCPUAdam", "adamw_mode"),
        needs="the CPU or DeepSpeed's offload",
    ),
    "torch_fused_adamw": Provider(_torch_missing, lambda: (torch.optim.AdamW, {"fused": True})),
}


def register_optimizer(name: str, provider: Provider) -> None:
    """Make a value of the flag known, before `optimum_memopt.options` is imported.

    Raises:
        ValueError: the name is taken.
    """
    if name in OPTIMIZERS:
        raise ValueError(f"there is an optimizer {name} already")
    OPTIMIZERS[name] = provider
