"""Every option of ORTModule, typed: the `--ort_…` flags. Importing this imports nothing of onnxruntime."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from optimum_memopt.engines.api.options import EngineOptions
from optimum_memopt.engines.ort.env_option_checks import check_here
from optimum_memopt.errors import MemOptError, path_excerpt
from optimum_memopt.option_values import Numbers

_OPSETS = Numbers(12, 20, "12 to 20, the opsets that ONNX Runtime 1.19 trains")
CONV_SEARCHES = ("HEURISTIC", "EXHAUSTIVE")
# See `register_engine`.
FOR_ANY_ENGINE = frozenset({"ort_fp16_optimizer"})
NEED_TRAINER = frozenset({"ort_fp16_optimizer"})
PER_RANK = frozenset({"ort_cache_dir", "ort_save_onnx"})


@dataclass
class OrtOptions(EngineOptions):
    """How ORTModule runs the model.

    Raises:
        MemOptError: from `check_ort`.
    """

    ort_fallback: bool = field(
        default=True,
        metadata={
            "help": "Train with plain PyTorch, and say so, when ONNX Runtime cannot train the model; false: stop."
        },
    )
    ort_arena: bool = field(
        default=False,
        metadata={
            "help": "Let ONNX Runtime keep freed CPU memory in its arena: faster steps at up to a tenth more peak, "
            "and what a plan saves is not there for the rest of the process."
        },
    )
    ort_cache_dir: os.PathLike | str | None = field(
        default=None,
        metadata={
            "help": "Keep exported graphs in this folder and skip most of the export when the same model runs again "
            "with a first batch of the same shape."
        },
    )
    ort_save_onnx: os.PathLike | str | None = field(
        default=None, metadata={"help": "Write the exported, optimized and executed ONNX graphs into this folder."}
    )
    ort_opset: Annotated[int | None, _OPSETS] = field(
        default=None, metadata={"help": "ONNX opset of the export; ONNX Runtime's default is 17."}
    )
    ort_module_with_loss: bool = field(
        default=False,
        metadata={
            "help": "Compute the loss in ONNX Runtime, label smoothing included, from the tokens that have a "
            "label only (masked LM: 15%% of them). A training forward then returns the loss and nothing else."
        },
    )

    ort_fp16_optimizer: bool = field(
        default=False,
        metadata={
            "help": "Put ONNX Runtime's FP16_Optimizer around DeepSpeed's or Apex's fp16 optimizer, if it knows that "
            "version, and say so if it does not."
        },
    )
    ort_custom_autograd: bool | None = field(
        default=None,
        metadata={
            "help": "Run the model's own torch.autograd.Functions with their own backward. On where the torch "
            "extensions are built; false: such a model is refused."
        },
    )
    ort_mem_efficient_grad_mgmt: bool = field(
        default=False,
        metadata={
            "help": "Accumulate each gradient as soon as it is computed, instead of all at the end of backward: "
            "a lower peak. Needs the torch extensions."
        },
    )
    ort_allow_autograd_checkpoint: bool = field(
        default=False,
        metadata={
            "help": "Train a model with re-entrant activation checkpointing: PyTorch runs the checkpointed layers, "
            "ONNX Runtime the rest. Needs the torch extensions."
        },
    )
    ort_compute_optimizer: bool = field(
        default=True, metadata={"help": "Let ONNX Runtime move operators that shrink tensors ahead of others."}
    )
    ort_label_sparse_optimizer: bool | None = field(
        default=None,
        metadata={
            "help": "Leave labels that are ignored out of the loss and of what leads to it: with "
            "--ort_module_with_loss, or where the model holds an nn.CrossEntropyLoss, the torch extensions are built "
            "and the first batch has more than 10%% of such labels. ONNX Runtime's default is on.",
        },
    )
    ort_embedding_sparse_optimizer: bool | None = field(
        default=None,
        metadata={
            "help": "Leave padding out of the layers, when the first batch has more than 10%% of it. ONNX Runtime's "
            "default is on, and does nothing without CUDA."
        },
    )
    ort_deepcopy_before_export: bool = field(
        default=True,
        metadata={
            "help": "Look for the model's outputs with a copy of it; false: with the model itself, which saves its "
            "size in memory for a moment, and what its forward counts is counted once more."
        },
    )
    ort_skip_check: str | None = field(
        default=None,
        metadata={
            "help": "Checks that ONNX Runtime leaves out from the second step on, separated by |: SKIP_CHECK_DEVICE, "
            "SKIP_CHECK_BUILD_GRADIENT, SKIP_CHECK_EXECUTION_AGENT. Without the second, other keyword arguments or "
            "dtypes are ignored or end in an error. Default: SKIP_CHECK_DISABLED."
        },
    )
    ort_efficient_attention: bool = field(
        default=False, metadata={"help": "Use torch's memory-efficient attention in the graph; needs CUDA."}
    )
    ort_triton: bool = field(
        default=False,
        metadata={"help": "Fuse operators into Triton kernels; needs CUDA. Once on, it is on for the process."},
    )
    ort_triton_config: os.PathLike | str | None = field(
        default=None, metadata={"help": "JSON file that says which operators Triton may fuse; with --ort_triton."}
    )
    ort_flash_attention: bool = field(
        default=False, metadata={"help": "Use flash attention written in Triton; with --ort_triton."}
    )
    ort_tuning: bool = field(
        default=False, metadata={"help": "Time several kernels for an operator and keep the fastest; needs CUDA."}
    )
    ort_tuning_duration_ms: Annotated[int | None, Numbers(1)] = field(
        default=None, metadata={"help": "Longest time to spend on one operator, in ms; with --ort_tuning."}
    )
    ort_tuning_results: os.PathLike | str | None = field(
        default=None,
        metadata={"help": "JSON file with found kernels: written with --ort_tuning, read without it; needs CUDA."},
    )
    ort_conv_search: str | None = field(
        default=None,
        metadata={
            "choices": CONV_SEARCHES,
            "help": "How cuDNN looks for a convolution's algorithm; ONNX Runtime's default is HEURISTIC. Needs CUDA.",
        },
    )
    ort_zero_stage3: bool = field(
        default=False,
        metadata={"help": "ONNX Runtime's support for ZeRO stage 3; needs CUDA and DeepSpeed 0.13.1 or older."},
    )

    def check_ort(self) -> None:
        """Find what is wrong, or cannot work on this machine, before a model or data is loaded.

        Raises:
            MemOptError: one line that names the option and what is allowed, or the way out.
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
        check_here(self)
