"""What the compile engine finds on this machine: compilers, devices, kernels, and what is missing."""

import torch

from optimum_memopt.engines.api.factory import Ability, Report
from optimum_memopt.engines.compile.capture.backend import default_compiler, missing_for
from optimum_memopt.installed import installed_version

_TRITONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")


def report() -> Report:
    """Looks at what is installed; compiles nothing."""
    triton = installed_version(_TRITONS)
    installed = {"triton": triton and triton[1]}
    devices = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices.append(accelerator.type)
    abilities = (
        Ability("compile engine", True, f"torch {torch.__version__}: plans, levels, offload, predicted peaks"),
        Ability(
            "compiler aot_eager", True, "PyTorch's operators one by one, bitwise its gradients; needs no compiler"
        ),
        *(_inductor(device) for device in devices),
        Ability("bf16, fp16 on the compile engine", True, "bf16 on every device, fp16 on a GPU"),
        _offload(devices),
        Ability("attention kernels", True, "; ".join(_attention(device) for device in devices)),
    )
    compiler, reason = default_compiler(devices[-1])
    return Report(
        installed,
        abilities,
        f"recommended: --memory_opt_engine compile, for every model that torch can trace; on {_name(devices[-1])} it "
        f"takes --memory_opt_compiler {compiler} by default ({reason})",
    )


def _name(device: str) -> str:
    if device == "cpu":
        return "the CPU"
    return f"{torch.cuda.get_device_name()} ({device})" if device == "cuda" else device


def _inductor(device: str) -> Ability:
    lacking, command = missing_for(device)
    return Ability(f"compiler inductor on {_name(device)}", not lacking, lacking or "kernels of its own", command)


def _offload(devices: list[str]) -> Ability:
    what = "offload to the host (strategy 3)"
    if len(devices) > 1:
        return Ability(what, True, f"from {_name(devices[-1])}")
    return Ability(what, False, "torch sees no GPU; on a CPU saved activations are in the host's memory already")


def _attention(device: str) -> str:
    kernels = {"math": True, "flash": True}
    if device == "cuda":
        kernels["flash"] = torch.backends.cuda.is_flash_attention_available()
        kernels |= {"memory-efficient": True, "cuDNN": torch.backends.cudnn.is_available()}
    return f"torch's {', '.join(name for name, is_there in kernels.items() if is_there)} on {_name(device)}"
