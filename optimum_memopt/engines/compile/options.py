"""The flags of the compile engine. Importing this imports nothing of torch's compilers."""

from dataclasses import dataclass, field

COMPILERS = ("inductor", "aot_eager")


@dataclass
class CompileOptions:
    """How torch.compile runs the model."""

    memory_opt_compiler: str | None = field(
        default=None,
        metadata={
            "choices": COMPILERS,
            "help": "What runs the graphs of the compile engine: inductor (kernels of its own; half a minute to "
            "compile on a CPU) or aot_eager (PyTorch's operators one by one; seconds, loss and gradients bitwise "
            "those of PyTorch). Default: inductor on a GPU, else aot_eager.",
        },
    )
