"""Refuses ORT options that cannot work on this machine, together, or with this model."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from optimum_memopt.engines.ort import extensions
from optimum_memopt.engines.ort.env_options import NO_SKIP
from optimum_memopt.errors import MemOptError, UnsupportedModelError, excerpt, path_excerpt
from optimum_memopt.installed import installed_version

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from optimum_memopt.engines.ort.options import OrtOptions

_SKIPS = ("SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT", "SKIP_CHECK_EXECUTION_AGENT")
_NEED_CUDA = (
    "ort_embedding_sparse_optimizer",
    "ort_efficient_attention",
    "ort_triton",
    "ort_triton_config",
    "ort_flash_attention",
    "ort_tuning",
    "ort_tuning_duration_ms",
    "ort_tuning_results",
    "ort_conv_search",
    "ort_zero_stage3",
)
_NEED_EXTENSIONS = (
    "ort_custom_autograd",
    "ort_mem_efficient_grad_mgmt",
    "ort_allow_autograd_checkpoint",
    "ort_label_sparse_optimizer",
    "ort_embedding_sparse_optimizer",
    "ort_efficient_attention",
)
_NEED_ANOTHER = {
    "ort_triton_config": "ort_triton",
    "ort_flash_attention": "ort_triton",
    "ort_tuning_duration_ms": "ort_tuning",
}
# Parameters get their gradients inside the backward of ONNX Runtime's single autograd node, not from torch's graph.
_HIDE_PARAMETERS = ("ort_mem_efficient_grad_mgmt", "ort_allow_autograd_checkpoint")
# The last version that ORT's hooks support; later ones changed ZeRO stage 3's parameter hooks (DeepSpeed PR 4966).
_LAST_DEEPSPEED = (0, 13, 1)


def check_here(options: "OrtOptions") -> None:
    """Refuse options that cannot work on this machine with any model.

    Raises:
        MemOptError: see there.
    """
    given = _given(options)
    for name in _NEED_CUDA:
        if name in given and (missing := extensions.cuda_missing()):
            raise MemOptError(f"{given[name]} needs CUDA, and {missing}; leave it out")
    for name in _NEED_EXTENSIONS:
        marks_itself = name == "ort_label_sparse_optimizer" and options.ort_module_with_loss
        if name in given and not marks_itself and extensions.find() is None:
            raise MemOptError(
                f"{given[name]} needs ONNX Runtime's torch extensions; build them with: {extensions.BUILD_COMMAND}"
            )
    for name, needed in _NEED_ANOTHER.items():
        if name in given and needed not in given:
            raise MemOptError(f"{given[name]} without --{needed} does nothing; give both or none")
    _check_combinations(options, given)
    _check_files(options)
    if options.ort_skip_check is not None:
        _check_skips(options.ort_skip_check)
    if options.ort_zero_stage3:
        _check_deepspeed()


def _given(options: "OrtOptions") -> dict[str, str]:
    """Names of the options that are set, with the text of the flag."""
    names = dict.fromkeys((*_NEED_CUDA, *_NEED_EXTENSIONS))
    values = {name: getattr(options, name) for name in names}
    return {
        name: f"--{name}" if value is True else f"--{name} {excerpt(value)}"
        for name, value in values.items()
        if value not in (None, False)
    }


def _check_combinations(options: "OrtOptions", given: dict[str, str]) -> None:
    for name in ("ort_mem_efficient_grad_mgmt", "ort_allow_autograd_checkpoint"):
        if name in given and options.ort_custom_autograd is False:
            raise MemOptError(f"--{name} runs as a torch.autograd.Function; leave out --ort_custom_autograd false")
    for name in ("ort_label_sparse_optimizer", "ort_embedding_sparse_optimizer"):
        if getattr(options, name) and not options.ort_compute_optimizer:
            raise MemOptError(
                f"--{name} is part of what --ort_compute_optimizer false turns off; leave one of them out"
            )
    if options.ort_triton and find_spec("triton") is None:
        raise MemOptError("--ort_triton needs the package triton; pip install triton")


def _check_files(options: "OrtOptions") -> None:
    """ORT ignores a missing file silently, and fails on an unreadable one in the middle of training."""
    for name, is_read in (("ort_triton_config", True), ("ort_tuning_results", not options.ort_tuning)):
        path = getattr(options, name)
        if path is None:
            continue
        if not is_read:
            if not os.path.isdir(os.path.dirname(path) or os.curdir):
                raise MemOptError(f"--{name} {path_excerpt(path)}: no such folder; make it first")
            continue
        try:
            json.loads(Path(path).read_text())
        except OSError as error:
            raise MemOptError(f"--{name} {path_excerpt(path)}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise MemOptError(f"--{name} {path_excerpt(path)}: not JSON ({excerpt(str(error))})") from error


def _check_skips(policy: str) -> None:
    names = set(policy.split("|"))
    if names - {*_SKIPS, NO_SKIP}:
        raise MemOptError(
            f"--ort_skip_check {excerpt(policy)}: allowed are {NO_SKIP}, or of {', '.join(_SKIPS)} several with |"
        )
    if NO_SKIP in names and len(names) > 1:
        raise MemOptError(f"--ort_skip_check {excerpt(policy)}: {NO_SKIP} turns all others off; give it alone")
    if "SKIP_CHECK_EXECUTION_AGENT" in names and "SKIP_CHECK_BUILD_GRADIENT" not in names:
        raise MemOptError(
            f"--ort_skip_check {excerpt(policy)}: a new graph would run in the session of the old one; "
            "add SKIP_CHECK_BUILD_GRADIENT or leave out SKIP_CHECK_EXECUTION_AGENT"
        )


def skip_check_remark(policy: str | None) -> str:
    """What `--ort_skip_check` leaves undetected; empty when nothing."""
    skipped = {
        "SKIP_CHECK_BUILD_GRADIENT": "other keyword arguments or dtypes than the first's are ignored or an error",
        "SKIP_CHECK_EXECUTION_AGENT": "another device or torch.use_deterministic_algorithms() is not detected",
        "SKIP_CHECK_DEVICE": "inputs on another device than the model are not detected",
    }
    undetected = [skipped[name] for name in (policy or NO_SKIP).split("|") if name in skipped]
    return f"--ort_skip_check {policy}: from the second step on {'; '.join(undetected)}" if undetected else ""


def _check_deepspeed() -> None:
    installed = installed_version(("deepspeed",))
    last = ".".join(map(str, _LAST_DEEPSPEED))
    if installed is None:
        raise MemOptError(f"--ort_zero_stage3 needs DeepSpeed {last} or older, which is not installed")
    version = tuple(int(part) for part in installed[1].split("+")[0].split(".")[:3] if part.isdigit())
    if version > _LAST_DEEPSPEED:
        raise MemOptError(
            f"--ort_zero_stage3: ONNX Runtime 1.19 supports the hooks of DeepSpeed up to {last}, and {installed[1]} "
            "is installed; use ZeRO 0, 1 or 2"
        )


def check_model(options: "OrtOptions", model: torch.nn.Module) -> None:
    """Refuse options that need CUDA for a model on the CPU.

    Raises:
        UnsupportedModelError: see there.
    """
    given = _given(options)
    needs_cuda = [given[name] for name in _NEED_CUDA if name in given]
    on_cpu = [name for name, parameter in model.named_parameters() if parameter.device.type == "cpu"]
    if needs_cuda and on_cpu:
        raise UnsupportedModelError(
            f"{needs_cuda[0]} needs CUDA, and {type(model).__name__} is on the CPU; move it to a GPU or leave that "
            "option out"
        )


def check_arguments(options: "OrtOptions", args: "TrainingArguments") -> None:
    """Refuse Trainer arguments that conflict with ORT options.

    Raises:
        MemOptError: DDP would search the autograd graph for parameters that are not in it.
    """
    hidden = [name for name in _HIDE_PARAMETERS if getattr(options, name)]
    with_ddp = args.world_size > 1 and not args.deepspeed
    if hidden and with_ddp and args.ddp_find_unused_parameters is not False:
        raise MemOptError(
            f"--{hidden[0]} with {args.world_size} processes: DDP would find all parameters unused; "
            "add --ddp_find_unused_parameters false"
        )
