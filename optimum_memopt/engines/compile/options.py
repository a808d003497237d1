"""The flags of the compile engine. Importing this module imports none of torch's compilers."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from optimum_memopt.engines.api.run import AUTO, EngineOptions
from optimum_memopt.option_values import Numbers, flag
from optimum_memopt.plans.plan_file import LOSSES as PLAN_FILE_LOSSES
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.sizes import Budget, parse_budget

COMPILERS = ("inductor", "aot_eager")
PLAIN, CHUNKED = PLAN_FILE_LOSSES
LOSSES = (AUTO, PLAIN, CHUNKED)
FORMATS = ("fp8",)
LAYER, MODEL = "layer", "model"
UNITS = (AUTO, LAYER, MODEL)


@dataclass
class CompileOptions(EngineOptions):
    """Flags for how torch.compile runs the model, and for the memory that a step may take."""

    memory_opt_budget: str | None = flag(
        None,
        "Limit for the peak memory of each training step: a size (24GiB, 800MiB; GB is 1000-based), a share of the "
        "device's memory (90%%), or auto, the memory that is free when training starts. The cheapest recompute that "
        "fits is chosen. Instead of a config or a level; compile engine.",
    )
    memory_opt_variants: Annotated[int, Numbers(1, 3)] = flag(
        1,
        "With a budget: how many plans a run may have. 1: one plan for all batches, made for the largest one. 2, 3: "
        "shorter batches run under cheaper plans, each compiled at its first batch.",
    )
    memory_opt_batch: str | None = flag(
        None,
        "auto: with a budget, micro-batch and gradient accumulation are chosen before training, for the most samples "
        "per second. Their product stays --per_device_train_batch_size times --gradient_accumulation_steps.",
        choices=(AUTO,),
    )
    memory_opt_plan: os.PathLike | str | None = flag(
        None,
        "A plan file, as written by optimum-cli memopt plan --budget … --output and trainer.memopt.save_plan: it says "
        "for each activation whether it is recomputed. Refused for a model with a different graph. Instead of a "
        "config, a level or a budget; compile engine.",
    )
    memory_opt_compress: str | None = flag(
        None,
        "fp8: with a config, a level or no plan, all saved activations that may be inexact are stored as "
        "float8_e4m3fn with a float32 scale for each row: a quarter of float32's bytes, half of bfloat16's. With a "
        "budget, only those for which this takes less time than recompute. The loss is exact, gradients are not. Not "
        "with a plan file; compile engine.",
        choices=FORMATS,
    )
    memory_opt_unit: str = flag(
        AUTO,
        "Compilation unit: layer compiles each repeated block once, so that a deep model's first step takes as long "
        "as a shallow one's; model compiles one graph; auto is layer if a model has four or more equal layers.",
        choices=UNITS,
    )
    memory_opt_compiler: str | None = flag(
        None,
        "What runs the graphs of the compile engine: inductor (its own kernels; half a minute to compile on a CPU) or "
        "aot_eager (PyTorch's operators one by one; compiles in seconds, and loss and gradients are bitwise equal to "
        "PyTorch's if the loss is plain and PyTorch's kernels are deterministic). Default: inductor on a GPU, else "
        "aot_eager.",
        choices=COMPILERS,
    )
    memory_opt_loss: str = flag(
        AUTO,
        "How a model with a vocabulary computes its training loss: chunked uses only the tokens that have a label and "
        "never holds all their logits; plain is the model's own loss; auto is chunked if that saves memory and "
        "nothing reads the logits. Gradients are those of plain up to the order of sums.",
        choices=LOSSES,
    )
    memory_opt_release_gradients: bool = flag(
        False,
        "Run the optimizer step inside the backward, as soon as a layer's gradients are complete, and free them: a "
        "step holds the gradients of one layer at a time. Weights are bitwise identical. One device, no gradient "
        "accumulation, --max_grad_norm 0, no --fp16; compile engine.",
    )

    @property
    def budget(self) -> Budget | None:
        """Returns `memory_opt_budget`, parsed.

        Raises:
            MemOptError: the value is no size, share or `auto`.
        """
        return None if self.memory_opt_budget is None else parse_budget(self.memory_opt_budget)

    @property
    def plan_file(self) -> PlanFile | None:
        """Returns the plan file of `memory_opt_plan`, read at the first access.

        Raises:
            MemOptError: the file cannot be read.
        """
        path = self.memory_opt_plan
        return None if path is None else self._read(f"plan {path}", lambda: PlanFile.load(Path(path)))
