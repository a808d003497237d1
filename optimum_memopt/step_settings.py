"""Declares the settings of a planned step, each once, as a field with its type, default and help.

They are flags of `optimum-cli memopt plan` and `advise`, and keyword arguments of `plan()`, with the same names except
for `KEYWORDS`. Imports nothing heavy, since the commands read it before they run.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.option_values import Numbers, flag
from optimum_memopt.sizes import AUTO

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Dtypes of weights, and of matrix products with quantized weights.
DTYPES = ("float32", "bfloat16", "float16")
# Rows, tokens, steps: beyond this many elements torch's operators need indices of more than 32 bits.
COUNTS = Numbers(1, 2**31)


def patterns(trainable: object) -> tuple[str, ...]:
    """Returns patterns of parameter names from a sequence, or from a comma-separated string. Raises MemOptError."""
    found = trainable.split(",") if isinstance(trainable, str) else trainable
    if not isinstance(found, Sequence) or not all(isinstance(pattern, str) for pattern in found):
        raise MemOptError(f"trainable {excerpt(found)}: allowed: strings, and lists or tuples of strings")
    return tuple(found)


# Settings of a model and its batch that a measured step takes, too; all others are for predictions.
MEASURED = frozenset({"model", "task", "batch_size", "seq_len"})


@dataclass(frozen=True)
class ModelSettings:
    """A model, given by its config, and the batch that it trains on."""

    model: "str | PretrainedConfig" = flag(
        MISSING, "Folder with a config.json, path of a config file, or name on the hub."
    )
    task: str | None = flag(
        None, "text-classification, fill-mask, text-generation, …. Default: from the class that the config names."
    )
    batch_size: Annotated[int, COUNTS] = flag(
        8,
        "Rows of a (micro-)batch (default: 8); several, such as 1,2,4,8, for a table over batch sizes from one trace "
        "of the largest.",
        type=str,
    )
    seq_len: Annotated[int, COUNTS] = flag(128, "Tokens per row, without padding (default: 128).")
    trainable: tuple[str, ...] = flag(
        (),
        "Train only these parameters: parts of their names like PEFT's target_modules (query, classifier), globs or "
        "regular expressions. Default: all that the model trains.",
        type=patterns,
        metavar="PATTERN[,PATTERN]",
    )
    padding: bool = flag(True, "All rows have the same length, such as packed ones, so models skip their masks.")
    dtype: str | None = flag(
        None,
        "Dtype of the weights, such as bfloat16. Default: the config's, as transformers 5 loads it.",
        allowed=DTYPES,
    )
    # Implementations that need no GPU; flash attention's package does.
    attention: str | None = flag(
        None, "transformers' attention: sdpa or eager. Default: transformers' choice.", allowed=("eager", "sdpa")
    )
    peft: str | None = flag(
        None,
        "PEFT's adapter, such as r=16,target=all-linear or r=8,target=q_proj+v_proj,use_dora=true, or an "
        "adapter_config.json.",
        metavar="FIELD=VALUE,… or FILE",
    )
    quantize: str | None = flag(
        None,
        "Weights of 4 or 8 bits, as bitsandbytes loads them for QLoRA: nf4 or fp4, with optional fields: "
        "nf4,double=false,compute=float32,prepare=false,storage=bfloat16 (default: double quantization, products in "
        "bfloat16, PEFT's prepare_model_for_kbit_training, packed into uint8); int8, with prepare. Needs --peft.",
        metavar="KIND[,FIELD=VALUE]",
    )


@dataclass(frozen=True)
class StepSpec:
    """The settings under which a planned step runs.

    Attributes:
        unit: the compilation unit: `auto`, `layer` or `model`.
    """

    device: str | None = flag(
        None,
        "compile engine: the device to predict for, such as h100 or 'rtx 4090', or a JSON file (docs/budget.md), with "
        "its memory, speed, attention kernels, workspaces and allocator. Default: this machine.",
    )
    compiler: str | None = flag(
        None, "Like --memory_opt_compiler (default: the compiler that training here uses; with --device inductor)."
    )
    bf16: bool = flag(False, "Autocast to bfloat16, like Trainer's --bf16.")
    fp16: bool = flag(False, "Autocast to float16, like Trainer's --fp16.")
    # `DEFAULT` of `memory/optimizers.py`, which imports torch.
    optim: str = flag("adamw_torch_fused", "The optimizer, like Trainer's --optim (default: adamw_torch_fused).")
    gradient_accumulation_steps: Annotated[int, Numbers(1)] = flag(
        1, "Like Trainer's (default: 1): from 2 on, a forward holds the gradients of earlier micro-batches."
    )
    loss: str = flag(AUTO, "compile engine: like --memory_opt_loss (default: auto).")
    unit: str = AUTO
    keep_outputs: bool = flag(
        False,
        "The training loop holds the model's outputs (logits, and in plain PyTorch the key-value cache) during the "
        "backward, as custom loops often do. Trainer drops them.",
    )
    fsdp: Annotated[int, Numbers(1, 2**20)] = flag(
        1,
        "Predict one rank of this many, which shard parameters, gradients and optimizer states like a Trainer under "
        "FSDP2 (default: 1, not sharded).",
        metavar="RANKS",
    )
    release_gradients: bool = flag(
        False, "The compile engine's plans: step the optimizer in the backward, like --memory_opt_release_gradients."
    )

    @property
    def autocast(self) -> str:
        """Returns the autocast dtype, `bfloat16` or `float16`; empty for float32."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else ""

    def check(self, dashes: str = "") -> None:
        """Reject conflicting settings.

        Args:
            dashes: prefix of the settings' names in the error.

        Raises:
            MemOptError: settings conflict.
        """
        if self.bf16 and self.fp16:
            raise MemOptError(f"{dashes}bf16 together with {dashes}fp16: give only one")


THIS_MACHINE = StepSpec()


@dataclass(frozen=True)
class PlanSettings:
    """The plan of a step; an engine's options have the same names, prefixed `memory_opt_`."""

    budget: str | None = flag(
        None, "Memory limit of the step, such as 24GiB, 90%% or auto; selects the cheapest plan that fits."
    )
    level: int = flag(0, "Like --memory_opt_level.")
    config: Any = flag(None, "Plans to enable, like --memory_opt_config.")
    plan: os.PathLike | str | None = flag(None, "A plan file, like --memory_opt_plan.")
    compress: str | None = flag(None, "Compress what the plan saves, like --memory_opt_compress.")


# Settings whose keyword argument has another name.
KEYWORDS = {"plan": "plan_file"}
_OPTIONS = {"compiler", "loss", *(setting.name for setting in fields(PlanSettings))}


def setting_of(flag: str) -> str:
    """Returns the name of a setting by its flag in a training script, without dashes: `memory_opt_budget` is `budget`
    here."""
    return {"per_device_train_batch_size": "batch_size"}.get(flag, flag.removeprefix("memory_opt_"))


def flags_of(kind: type) -> "dict[str, Field[Any]]":
    """Returns a dataclass's fields that have flags, by flag name; `no_` prefixes those that are on by default."""
    declared = [setting for setting in fields(kind) if "help" in setting.metadata]
    return {f"no_{each.name}" if each.default is True else each.name: each for each in declared}


def described() -> Iterator[tuple[str, str, str]]:
    """Yields flag, keyword and help of each setting."""
    for kind in (ModelSettings, StepSpec, PlanSettings):
        for name, setting in flags_of(kind).items():
            keyword = KEYWORDS.get(setting.name, setting.name)
            # A percent sign is doubled for argparse.
            yield f"--{name}", keyword + "=False" * (setting.default is True), setting.metadata["help"] % ()


def engine_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine options among settings, by their option names."""
    return {f"memory_opt_{name}": value for name, value in settings.items() if name in _OPTIONS}
