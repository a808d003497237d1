"""Every option of the package, once: the flags of the command line, the arguments of `attach` and of `optimize`."""

import difflib
import os
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from optimum_memopt import option_values
from optimum_memopt.engines.base import ENGINES
from optimum_memopt.engines.ort.env_options import from_environment
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.logs import LOG_LEVELS
from optimum_memopt.option_values import Numbers
from optimum_memopt.plans.grammar import ConfigSource, PlanConfig, to_text
from optimum_memopt.training.optimizers import OPTIMIZERS

_LEVELS = Numbers(0, 2, "0 (the config), 1 (recompute in each layer) and 2 (also with compromised saving)")
COMPILERS = ("inductor", "aot_eager")


@dataclass
class MemOptOptions(OrtOptions):
    """Which engine trains the model under which memory plan, and what is shown of it.

    From Python `memory_opt_config` is also a list of `cluster_id:strategy:count`, a dict of cluster id to strategy
    (`{"Gelu+": 1}`, all occurrences) or to `strategy:count` (`{"Gelu+": "1:4"}`), the `Path` of a file, or a
    `PlanConfig`; `check` makes the flag's text of it, as it makes strings of paths.

    Raises:
        MemOptError: from `check`; nothing is read but a config file.
    """

    memory_opt_engine: str = field(
        default="auto",
        metadata={
            "choices": ("auto", *ENGINES),
            "help": "What trains the model: ort (ONNX Runtime's ORTModule), compile (torch.compile), or auto: the "
            "first of them that works here.",
        },
    )
    memory_opt_compiler: str | None = field(
        default=None,
        metadata={
            "choices": COMPILERS,
            "help": "What runs the graphs of the compile engine: inductor (kernels of its own; half a minute to "
            "compile on a CPU) or aot_eager (PyTorch's operators one by one; seconds, loss and gradients bitwise "
            "those of PyTorch). Default: inductor on a GPU, else aot_eager.",
        },
    )
    memory_opt_config: ConfigSource | None = field(
        default=None,
        metadata={
            "help": "Plans to turn on, cluster_id:strategy:count separated by commas, or a JSON file with a list of "
            "such strings. Strategy: 0 none, 1 recompute, 2 recompute with compromised saving, 3 offload to the host "
            "(compile engine). Count: -1 all, 0 off, N the first N (compile engine). Example: Gelu+:1:-1. The plan "
            "table lists the cluster ids of your model."
        },
    )
    memory_opt_level: Annotated[int, _LEVELS] = field(
        default=0,
        metadata={
            "help": "0: the plans of --memory_opt_config. 1: all recomputable plans inside each transformer layer, "
            "less those that would raise the peak. 2: also those with compromised saving. Not together with a config."
        },
    )
    memory_opt_strict: bool = field(
        default=True,
        metadata={"help": "Stop at a cluster id that the model does not have; false: warn and go on without it."},
    )
    memory_opt_log_level: str = field(
        default="info",
        metadata={
            "choices": tuple(LOG_LEVELS),
            "help": "info: the plan table, on rank 0. devinfo: also each node as ONNX Runtime sees it, on all ranks, "
            "and each memory phase as a line of its observer. "
            "verbose: also ONNX Runtime's own log.",
        },
    )
    log_input_density: bool = field(
        default=False,
        metadata={"help": "Log which part of the input and label tokens is not padding, for each step that is shown."},
    )
    log_memory_phases: bool = field(
        default=False,
        metadata={
            "help": "Log memory held and peak memory before and after forward and backward and after the optimizer."
        },
    )
    memory_opt_log_steps: Annotated[int, Numbers(0)] = field(
        default=0,
        metadata={
            "help": "Steps of which trackers and the log file get density and phases: 0 for steps 0-9 and then powers "
            "of two (the console shows 0, 1, 2, 4, 8, ...), or every N."
        },
    )
    memory_opt_log_file: os.PathLike | str | None = field(
        default=None, metadata={"help": "Also append all findings to this file, one JSON object a line."}
    )
    memory_opt_optim: str | None = field(
        default=None,
        metadata={
            "choices": tuple(OPTIMIZERS),
            "help": "AdamW of another library, with Trainer's learning rate, betas, epsilon and weight decay, instead "
            "of --optim. ort_fused_adam needs CUDA, deepspeed_cpu_adam the CPU or DeepSpeed's offload.",
        },
    )
    ort_fp16_optimizer: bool = field(
        default=False,
        metadata={
            "help": "Put ONNX Runtime's FP16_Optimizer around DeepSpeed's or Apex's fp16 optimizer, if it knows that "
            "version, and say so if it does not."
        },
    )
    group_by_complexity: bool = field(
        default=False,
        metadata={
            "help": "Give all ranks samples of nearly the same length in each step, so that none waits for the "
            "slowest. Lengths: the column --length_column_name, else attention_mask, else input_ids."
        },
    )

    @property
    def plan_config(self) -> PlanConfig | None:
        """`memory_opt_config`, read.

        Raises:
            ConfigError: it cannot be read.
        """
        return None if self.memory_opt_config is None else PlanConfig.load(self.memory_opt_config)

    def check(self) -> None:
        """Find everything that is wrong before a model or data is loaded.

        Raises:
            MemOptError: one line that names the option, or ONNX Runtime's variable in the environment, and what is
                allowed.
        """
        self.check_values()
        if self.memory_opt_engine in ("auto", "ort"):
            from_environment(self, os.environ)

    def check_values(self) -> None:
        """`check` without the environment."""
        config = self.memory_opt_config
        option_values.check(self, MemOptOptions)
        if config is not None:
            self.memory_opt_config = to_text(config)
        if self.memory_opt_level and self.memory_opt_config is not None:
            raise MemOptError(
                f"--memory_opt_level {self.memory_opt_level} together with --memory_opt_config: a level chooses the "
                "plans itself; give one of the two"
            )
        config = self.plan_config
        if self.memory_opt_engine != "auto":
            self.check_engine(self.memory_opt_engine)
        # compile takes offload and any count; `auto` decides when the engine is made.
        if self.memory_opt_engine == "ort" and config is not None:
            from optimum_memopt.engines.ort.selection import check_supported

            check_supported(config)
        if self.memory_opt_engine != "compile":
            self.check_ort()

    def check_engine(self, name: str) -> None:
        """Refuse options that the engine `name` would not read.

        Raises:
            MemOptError: one line that names them.
        """
        if name == "ort":
            if self.memory_opt_compiler is not None:
                raise MemOptError(
                    f"--memory_opt_compiler {self.memory_opt_compiler} with the ort engine, which has no compiler: "
                    "leave it out, or give --memory_opt_engine compile"
                )
            return
        if given := self.given_for_ort():
            raise MemOptError(
                f"{', '.join(given)} with the {name} engine: only the ort engine reads "
                f"{'it' if len(given) == 1 else 'them'}; leave out, or give --memory_opt_engine ort"
            )

    def given_for_ort(self) -> list[str]:
        """Flags of the ort engine alone whose value is not the default."""
        # Of the object's own class: a subclass may have other defaults (the examples' `ort_fallback`).
        defaults = {field.name: field.default for field in fields(self)}
        return [f"--{field.name}" for field in fields(OrtOptions) if getattr(self, field.name) != defaults[field.name]]


def from_keywords(**options: Any) -> MemOptOptions:
    """The options of `attach` and `optimize`, not yet checked.

    Raises:
        MemOptError: a name that is no field of `MemOptOptions`; near names come with it.
    """
    names = [one.name for one in fields(MemOptOptions)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; see optimum_memopt.MemOptOptions"
            raise MemOptError(f"there is no option {excerpt(name)}{hint}")
    return MemOptOptions(**options)
