"""The flags of the compile engine. Importing this imports nothing of torch's compilers."""

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
    """How torch.compile runs the model, and the memory that a step may take."""

    memory_opt_budget: str | None = flag(
        None,
        "The peak that no training step may pass: a size (24GiB, 800MiB; GB is 1000-based), a share of the device's "
        "memory (90%%), or auto, what is free when training starts. The cheapest recompute that fits is chosen. "
        "Instead of a config or a level; compile engine.",
    )
    memory_opt_variants: Annotated[int, Numbers(1, 3)] = flag(
        1,
        "With a budget: how many plans a run may have. 1: that of the largest batch, for all batches. 2, 3: shorter "
        "batches run under cheaper plans, each compiled when its first batch comes.",
    )
    memory_opt_batch: str | None = flag(
        None,
        "auto: with a budget, micro-batch and gradient accumulation are chosen before training, for the most samples "
        "a second. Their product stays what --per_device_train_batch_size times --gradient_accumulation_steps is.",
        choices=(AUTO,),
    )
    memory_opt_plan: str | None = flag(
        None,
        "A plan file, as optimum-cli memopt plan --budget … --output and trainer.memopt.save_plan write it: what is "
        "recomputed, activation by activation. Refused for a model with another graph. Instead of a config, a level "
        "or a budget; compile engine.",
    )
    memory_opt_compress: str | None = flag(
        None,
        "fp8: all activations that a config, a level or no plan saves, and that may be inexact, are saved as "
        "float8_e4m3fn with a float32 scale for each row: a quarter of float32's bytes, half of bfloat16's. The loss "
        "is exact, gradients are not. With a budget: where that costs less time than recompute. Not with a plan file; "
        "compile engine.",
        choices=FORMATS,
    )
    memory_opt_unit: str = flag(
        AUTO,
        "Compilation unit: layer compiles each repeated block once, so that a deep model's first step takes as long "
        "as a shallow one's; model compiles one graph; auto is layer where a model has four equal layers and more.",
        choices=UNITS,
    )
    memory_opt_compiler: str | None = flag(
        None,
        "What runs the graphs of the compile engine: inductor (kernels of its own; half a minute to compile on a CPU) "
        "or aot_eager (PyTorch's operators one by one; seconds, loss and gradients bitwise those of PyTorch where the "
        "loss is plain and PyTorch's kernels are deterministic). Default: inductor on a GPU, else aot_eager.",
        choices=COMPILERS,
    )
    memory_opt_loss: str = flag(
        AUTO,
        "How a model with a vocabulary computes its training loss: chunked, from the tokens that have a label and "
        "without ever holding the logits of all of them, plain, as the model does, or auto: chunked where that saves "
        "memory and nobody reads the logits. Gradients are those of plain up to the order of sums.",
        choices=LOSSES,
    )
    memory_opt_release_gradients: bool = flag(
        False,
        "Let the optimizer step in the backward, as soon as a layer's gradients are complete, and free these: a step "
        "holds the gradients of one layer at a time. Weights are the same to the last bit. One device, no gradient "
        "accumulation, --max_grad_norm 0, no --fp16; compile engine.",
    )

    @property
    def budget(self) -> Budget | None:
        """`memory_opt_budget`, read.

        Raises:
            MemOptError: it is no size, share or `auto`.
        """
        return None if self.memory_opt_budget is None else parse_budget(self.memory_opt_budget)

    @property
    def plan_file(self) -> PlanFile | None:
        """`memory_opt_plan`, read the first time.

        Raises:
            MemOptError: it cannot be read.
        """
        path = self.memory_opt_plan
        return None if path is None else self._read(f"plan {path}", lambda: PlanFile.load(Path(path)))
