"""Every option of ORTModule: the `--ort_…` flags, and where they cannot work. Imports nothing of onnxruntime."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch

from optimum_memopt.compat import installed_version
from optimum_memopt.engines.api.run import EngineOptions
from optimum_memopt.engines.ort.compat import extensions, installation
from optimum_memopt.errors import MemOptError, UnsupportedModelError, excerpt, path_excerpt
from optimum_memopt.option_values import Numbers, check_written, flag
from optimum_memopt.plans.plan_file import read_json

if TYPE_CHECKING:
    from transformers import TrainingArguments

# What `register_engine` is told of these options.
FOR_ANY_ENGINE = NEED_TRAINER = frozenset({"ort_fp16_optimizer"})
PER_RANK = frozenset({"ort_cache_dir", "ort_save_onnx"})

CONV_SEARCHES = ("HEURISTIC", "EXHAUSTIVE")
NO_SKIP = "SKIP_CHECK_DISABLED"
# What stays undetected without each check.
_SKIPS = {
    "SKIP_CHECK_DEVICE": "inputs on another device than the model are not detected",
    "SKIP_CHECK_BUILD_GRADIENT": "other keyword arguments or dtypes than the first's are ignored or an error",
    "SKIP_CHECK_EXECUTION_AGENT": "another device or torch.use_deterministic_algorithms() is not detected",
}
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
_LARGEST_FILE = 64 * 2**20


@dataclass
class OrtOptions(EngineOptions):
    """How ORTModule runs the model."""

    ort_fallback: bool = flag(
        True, "Train with plain PyTorch, and say so, when ONNX Runtime cannot train the model; false: stop."
    )
    ort_arena: bool = flag(
        False,
        "Let ONNX Runtime keep freed CPU memory in its arena: faster steps at up to a tenth more peak, "
        "and what a plan saves is not there for the rest of the process.",
    )
    ort_cache_dir: os.PathLike | str | None = flag(
        None,
        "Keep exported graphs in this folder and skip most of the export when the same model runs again "
        "with a first batch of the same shape.",
    )
    ort_save_onnx: os.PathLike | str | None = flag(
        None, "Write the exported, optimized and executed ONNX graphs into this folder."
    )
    ort_opset: Annotated[int | None, Numbers(12, 20, "12 to 20, the opsets that ONNX Runtime 1.19 trains")] = flag(
        None, "ONNX opset of the export; ONNX Runtime's default is 17."
    )
    ort_module_with_loss: bool = flag(
        False,
        "Compute the loss in ONNX Runtime, label smoothing included, from the tokens that have a "
        "label only (masked LM: 15%% of them). A training forward then returns the loss and nothing else.",
    )
    ort_fp16_optimizer: bool = flag(
        False,
        "Put ONNX Runtime's FP16_Optimizer around DeepSpeed's or Apex's fp16 optimizer, if it knows that "
        "version, and say so if it does not.",
    )
    ort_custom_autograd: bool | None = flag(
        None,
        "Run the model's own torch.autograd.Functions with their own backward. On where the torch "
        "extensions are built; false: such a model is refused.",
    )
    ort_mem_efficient_grad_mgmt: bool = flag(
        False,
        "Accumulate each gradient as soon as it is computed, instead of all at the end of backward: "
        "a lower peak. Needs the torch extensions.",
    )
    ort_allow_autograd_checkpoint: bool = flag(
        False,
        "Train a model with re-entrant activation checkpointing: PyTorch runs the checkpointed layers, "
        "ONNX Runtime the rest. Needs the torch extensions.",
    )
    ort_compute_optimizer: bool = flag(True, "Let ONNX Runtime move operators that shrink tensors ahead of others.")
    ort_label_sparse_optimizer: bool | None = flag(
        None,
        "Leave labels that are ignored out of the loss and of what leads to it: with "
        "--ort_module_with_loss, or where the model holds an nn.CrossEntropyLoss, the torch extensions are built "
        "and the first batch has more than 10%% of such labels. ONNX Runtime's default is on.",
    )
    ort_embedding_sparse_optimizer: bool | None = flag(
        None,
        "Leave padding out of the layers, when the first batch has more than 10%% of it. ONNX Runtime's "
        "default is on, and does nothing without CUDA.",
    )
    ort_deepcopy_before_export: bool = flag(
        True,
        "Look for the model's outputs with a copy of it; false: with the model itself, which saves its "
        "size in memory for a moment, and what its forward counts is counted once more.",
    )
    ort_skip_check: str | None = flag(
        None,
        "Checks that ONNX Runtime leaves out from the second step on, separated by |: SKIP_CHECK_DEVICE, "
        "SKIP_CHECK_BUILD_GRADIENT, SKIP_CHECK_EXECUTION_AGENT. Without the second, other keyword arguments or "
        "dtypes are ignored or end in an error. Default: SKIP_CHECK_DISABLED.",
    )
    ort_efficient_attention: bool = flag(False, "Use torch's memory-efficient attention in the graph; needs CUDA.")
    ort_triton: bool = flag(
        False, "Fuse operators into Triton kernels; needs CUDA. Once on, it is on for the process."
    )
    ort_triton_config: os.PathLike | str | None = flag(
        None, "JSON file that says which operators Triton may fuse; with --ort_triton."
    )
    ort_flash_attention: bool = flag(False, "Use flash attention written in Triton; with --ort_triton.")
    ort_tuning: bool = flag(False, "Time several kernels for an operator and keep the fastest; needs CUDA.")
    ort_tuning_duration_ms: Annotated[int | None, Numbers(1)] = flag(
        None, "Longest time to spend on one operator, in ms; with --ort_tuning."
    )
    ort_tuning_results: os.PathLike | str | None = flag(
        None, "JSON file with found kernels: written with --ort_tuning, read without it; needs CUDA."
    )
    ort_conv_search: str | None = flag(
        None,
        "How cuDNN looks for a convolution's algorithm; ONNX Runtime's default is HEURISTIC. Needs CUDA.",
        choices=CONV_SEARCHES,
    )
    ort_zero_stage3: bool = flag(
        False, "ONNX Runtime's support for ZeRO stage 3; needs CUDA and DeepSpeed 0.13.1 or older."
    )

    def check_ort(self) -> None:
        """Find what is wrong, or cannot work on this machine, before a model or data is loaded.

        Raises:
            MemOptError: one line that names the option and what is allowed, or a suggestion.
        """
        if self.ort_save_onnx is not None and not os.path.isdir(self.ort_save_onnx):
            raise MemOptError(f"--ort_save_onnx {path_excerpt(self.ort_save_onnx)}: no such folder; make it first")
        if self.ort_cache_dir is not None:
            folder = Path(self.ort_cache_dir)
            # Not `Path.exists`, which raises for a name that is too long.
            there = (path for path in (folder, *folder.parents) if os.path.exists(path))
            if file := next((path for path in there if not os.path.isdir(path)), None):
                raise MemOptError(
                    f"--ort_cache_dir {path_excerpt(folder)}: {path_excerpt(file)} is a file; name a folder"
                )
        given = _given(self)
        for name in _NEED_CUDA:
            if name in given and (missing := installation.cuda_missing()):
                raise MemOptError(f"{given[name]} needs CUDA, and {missing}; leave it out")
        for name in _NEED_EXTENSIONS:
            marks_itself = name == "ort_label_sparse_optimizer" and self.ort_module_with_loss
            if name in given and not marks_itself and extensions.find() is None:
                raise MemOptError(
                    f"{given[name]} needs ONNX Runtime's torch extensions; build them with: {extensions.BUILD_COMMAND}"
                )
        for name, needed in _NEED_ANOTHER.items():
            if name in given and needed not in given:
                raise MemOptError(f"{given[name]} without --{needed} does nothing; give both or none")
        _check_combinations(self, given)
        _check_files(self)
        if self.ort_skip_check is not None:
            _check_skips(self.ort_skip_check)
        if self.ort_zero_stage3:
            _check_deepspeed()


def _given(options: OrtOptions) -> dict[str, str]:
    names = dict.fromkeys((*_NEED_CUDA, *_NEED_EXTENSIONS))
    values = {name: getattr(options, name) for name in names}
    return {
        name: f"--{name}" if value is True else f"--{name} {excerpt(value)}"
        for name, value in values.items()
        if value not in (None, False)
    }


def _check_combinations(options: OrtOptions, given: dict[str, str]) -> None:
    for name in _HIDE_PARAMETERS:
        if name in given and options.ort_custom_autograd is False:
            raise MemOptError(f"--{name} runs as a torch.autograd.Function; leave out --ort_custom_autograd false")
    for name in ("ort_label_sparse_optimizer", "ort_embedding_sparse_optimizer"):
        if getattr(options, name) and not options.ort_compute_optimizer:
            raise MemOptError(
                f"--{name} is part of what --ort_compute_optimizer false turns off; leave one of them out"
            )
    if options.ort_triton and find_spec("triton") is None:
        raise MemOptError("--ort_triton needs the package triton; pip install triton")


def _check_files(options: OrtOptions) -> None:
    """ORT ignores a missing file silently, and fails on an unreadable one in the middle of training."""
    if options.ort_tuning and options.ort_tuning_results is not None:
        check_written("--ort_tuning_results", str(options.ort_tuning_results))
    read = ("ort_triton_config",) if options.ort_tuning else ("ort_triton_config", "ort_tuning_results")
    for name in read:
        if (path := getattr(options, name)) is not None:
            read_json(Path(path), f"--{name}", "nested too deeply", _LARGEST_FILE)


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
    """A line about what `--ort_skip_check` leaves undetected; empty when nothing."""
    undetected = [_SKIPS[name] for name in (policy or NO_SKIP).split("|") if name in _SKIPS]
    return f"--ort_skip_check {policy}: from the second step on {'; '.join(undetected)}" if undetected else ""


def _check_deepspeed() -> None:
    installed, last = installed_version(("deepspeed",)), ".".join(map(str, _LAST_DEEPSPEED))
    if installed is None:
        raise MemOptError(f"--ort_zero_stage3 needs DeepSpeed {last} or older, which is not installed")
    if tuple(int(part) for part in installed[1].split("+")[0].split(".")[:3] if part.isdigit()) > _LAST_DEEPSPEED:
        raise MemOptError(
            f"--ort_zero_stage3: ONNX Runtime 1.19 supports the hooks of DeepSpeed up to {last}, and {installed[1]} "
            "is installed; use ZeRO 0, 1 or 2"
        )


def check_model(options: OrtOptions, model: torch.nn.Module) -> None:
    """Refuse options that need CUDA for a model on the CPU. Raises UnsupportedModelError."""
    given = _given(options)
    needs_cuda = [given[name] for name in _NEED_CUDA if name in given]
    on_cpu = [name for name, parameter in model.named_parameters() if parameter.device.type == "cpu"]
    if needs_cuda and on_cpu:
        raise UnsupportedModelError(
            f"{needs_cuda[0]} needs CUDA, and {type(model).__name__} is on the CPU; move it to a GPU or leave that "
            "option out"
        )


def check_arguments(options: OrtOptions, args: "TrainingArguments") -> None:
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
