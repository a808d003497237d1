"""The flags of a step that is predicted, the same for all commands that predict one.

Nothing heavy is imported before a command runs.
"""

from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimum_memopt.engines.api.run import StepSpec
    from optimum_memopt.options import MemOptOptions
    from optimum_memopt.predict.workload import Workload

# Of rows, ranks and steps; torch's operators index more with 64 bits.
MOST_COUNT = 2**31


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of the model, of its batch without the rows, and of how it trains, in groups."""
    model = parser.add_argument_group("model and batch")
    model.add_argument(
        "--task",
        help="text-classification, fill-mask, text-generation, …. Default: by the name of the class in the config.",
    )
    model.add_argument("--seq_len", type=int, default=128, help="Tokens per row, without padding (default: 128).")
    model.add_argument(
        "--no_padding",
        action="store_true",
        help="All rows are equally long, as packed ones: models leave their masks out.",
    )
    model.add_argument(
        "--dtype", help="Type of the weights, as bfloat16. Default: that of the config, as transformers 5 loads it."
    )
    model.add_argument("--attention", help="transformers' attention: sdpa or eager. Default: transformers' choice.")
    model.add_argument(
        "--peft",
        metavar="FIELD=VALUE,… or FILE",
        help="PEFT's adapter, as r=16,target=all-linear or r=8,target=q_proj+v_proj,use_dora=true, or an "
        "adapter_config.json.",
    )
    model.add_argument(
        "--quantize",
        metavar="KIND[,FIELD=VALUE]",
        help="Weights of 4 bits, as bitsandbytes loads them for QLoRA: nf4 or fp4; with fields as "
        "nf4,double=false,compute=float32,prepare=false (default: double quantization, products in bfloat16, PEFT's "
        "prepare_model_for_kbit_training). Needs --peft.",
    )
    model.add_argument(
        "--trainable",
        metavar="PATTERN[,PATTERN]",
        help="Train these parameters alone: parts of their names as PEFT's target_modules (query, classifier), "
        "globs or regular expressions. Default: all that the model trains.",
    )
    training = parser.add_argument_group("training")
    precision = training.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true", help="Under autocast, as Trainer's --bf16.")
    precision.add_argument("--fp16", action="store_true", help="Under autocast, as Trainer's --fp16.")
    training.add_argument("--optim", help="The optimizer, as Trainer's --optim (default: adamw_torch_fused).")
    training.add_argument(
        "--release_gradients",
        action="store_true",
        help="The compile engine's plans: as --memory_opt_release_gradients, the optimizer steps in the backward.",
    )
    training.add_argument(
        "--fsdp",
        type=int,
        metavar="RANKS",
        help="Predict one of so many ranks that share parameters, gradients and optimizer states, as a Trainer "
        "under FSDP2 shards them (default: 1, not sharded).",
    )
    training.add_argument(
        "--compiler",
        help="As --memory_opt_compiler takes it (default: the one that would train, inductor with --device).",
    )
    training.add_argument(
        "--keep_outputs",
        action="store_true",
        help="plain PyTorch: the loop holds the model's outputs, logits and key-value cache, during the backward, "
        "as loops of one's own often do. Trainer drops them.",
    )


def add_model(parser: ArgumentParser) -> None:
    """Add the flag of the model, which each command has first."""
    parser.add_argument(
        "--model", required=True, help="Folder with a config.json, path of a config file, or name on the hub."
    )


def workload_of(args: Any, rows: int = 8) -> "Workload":
    """The model and a batch of n rows, checked without a model.

    Raises:
        MemOptError: one line.
    """
    from optimum_memopt.predict.workload import Workload

    workload = Workload(
        args.model,
        args.task or "",
        rows,
        args.seq_len,
        tuple(args.trainable.split(",")) if args.trainable is not None else (),
        has_padding=not args.no_padding,
        dtype=args.dtype or "",
        attention=args.attention or "",
        adapter=args.peft or "",
        quantization=args.quantize or "",
    )
    return workload.checked(finds_task=args.task is None)


def spec_of(args: Any, device: str | None, micro_batches: int = 1, loss: str = "auto") -> "StepSpec":
    """How the step runs.

    Raises:
        MemOptError: an unknown optimizer, or numbers that are none from 1 on.
    """
    from optimum_memopt.engines.api.run import StepSpec
    from optimum_memopt.errors import MemOptError
    from optimum_memopt.memory import optimizers

    check_counts(args, "fsdp")
    if args.quantize and (args.fsdp or 1) > 1:
        raise MemOptError("--quantize with --fsdp: shares of quantized weights are not predicted; leave one out")
    for flag in ("keep_outputs", "no_padding"):
        if getattr(args, flag) and (args.fsdp or 1) > 1:
            raise MemOptError(f"--{flag} with --fsdp: is of plain PyTorch, on one device; leave one of the two out")
    optim = args.optim or optimizers.DEFAULT
    optimizers.check(optim)
    return StepSpec(
        device,
        args.compiler,
        "bfloat16" if args.bf16 else "float16" if args.fp16 else "",
        optim,
        micro_batches,
        loss,
        keeps_outputs=args.keep_outputs,
        fsdp=args.fsdp or 1,
        releases_gradients=args.release_gradients,
    )


def check_counts(args: Any, *flags: str) -> None:
    """Raise a MemOptError for a flag that was given and is no number from 1 to `MOST_COUNT`."""
    from optimum_memopt.errors import MemOptError, excerpt

    for flag in flags:
        if (value := getattr(args, flag)) is not None and value < 1:
            raise MemOptError(f"--{flag} {value}: allowed are numbers from 1 on")
        if value is not None and value > MOST_COUNT:
            raise MemOptError(f"--{flag} {excerpt(value)}: allowed are numbers from 1 to {MOST_COUNT}")


def checked_options(**options: Any) -> "MemOptOptions":
    """Options by their fields.

    Raises:
        MemOptError: one line, with the commands' shorter names of flags.
    """
    from optimum_memopt.errors import MemOptError
    from optimum_memopt.options import MemOptOptions

    chosen = MemOptOptions(**options)
    try:
        chosen.check()
    except MemOptError as error:
        raise MemOptError(str(error).replace("--memory_opt_", "--")) from error
    return chosen
