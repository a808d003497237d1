"""Checks a distributed run: one world, and the same options and software on all ranks.

Ranks that differ do train: DDP and ZeRO average whatever gradients they get. So a node with another version of an
engine, or another environment variable, would go unnoticed. With sharded parameters, different options issue different
collectives, which hang. A launch of several processes that each train alone goes unnoticed, too: without a GPU this
happens silently in every launcher (accelerate 1.15, transformers 5.23), since a script without `--use_cpu true` joins
no process group, and `accelerate launch --cpu --num_processes 2` starts one process. The same examples are then
trained once or twice, at a fraction of the intended batch size.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import Any

import psutil
import torch
import torch.distributed
from transformers import Trainer, TrainerState

from optimum_memopt.compat.accelerate import fsdp_version
from optimum_memopt.compat.deepspeed import is_sharded_by_deepspeed
from optimum_memopt.compat.installed import software
from optimum_memopt.compat.torch import of_all_ranks
from optimum_memopt.engines.shared.registry import factory, registrations
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger, launcher_number
from optimum_memopt.options import MemOptOptions

# Options that may differ between ranks: paths of outputs, and logging.
_OWN_OPTIONS = {
    "memory_opt_log_level",
    "memory_opt_log_steps",
    "memory_opt_log_file",
    "memory_opt_report",
    "log_input_density",
    "log_memory_phases",
}
_FAILURE = "failure"
_ABSENT = "nothing"


def facts(engine: str, options: MemOptOptions) -> dict[str, str]:
    """Returns the facts that must be the same on all ranks, by name: engine, options and software versions.

    The plan table is not among them. Its rows come from the first batch, which differs between ranks: with or without
    padding, longer or shorter than a window of local attention. A plan changes no gradient.
    """
    own = _OWN_OPTIONS.union(*(registration.per_rank for registration in registrations()))
    result = {
        "engine": engine,
        **{
            f"--{each.name}": str(getattr(options, each.name))
            for each in fields(MemOptOptions)
            if each.name not in own
        },
        # The content, not the path: files of one name may differ on two nodes, and files of two names may be equal.
        "--memory_opt_config": str(options.plan_config),
        "--memory_opt_plan": options.plan_file.digest if options.plan_file is not None else "None",
    }
    result |= {f"version of {distribution}": version for distribution, version in software().items()}
    for registration in registrations():
        result |= factory(registration.name).version_facts()
    return result


def failure(error: BaseException, when: str) -> dict[str, str]:
    """Returns the facts of a rank that has failed; `when` completes "rank 1 failed {when}"."""
    return {_FAILURE: f"{when}, so all ranks stop: {' '.join(f'{type(error).__name__}: {error}'.split())}"}


@contextlib.contextmanager
def stopping_all(when: str) -> Iterator[None]:
    """Report an error of the block to the other ranks, which wait in `check_ranks_agree`; `when` as in `failure`."""
    try:
        yield
    except Exception as error:
        # This rank raises its own error in any case.
        with contextlib.suppress(Exception):
            check_ranks_agree(failure(error, when))
        raise


def check_ranks_agree(own: Mapping[str, str]) -> None:
    """Compare this rank's facts, or its failure, with those of all other ranks; every rank must call this.

    Raises:
        MemOptError: on all ranks, if one differs or has failed; names the rank and the differences.
    """
    if difference := describe_difference(of_all_ranks(dict(own))):
        raise MemOptError(difference)


def describe_difference(ranks: Sequence[Mapping[str, str]]) -> str:
    """Returns a line about the first rank that failed, else the first unlike rank 0; empty if all agree."""
    for rank, other in enumerate(ranks):
        if _FAILURE in other:
            return f"rank {rank} failed {other[_FAILURE]}"
    first = ranks[0]
    for rank, other in enumerate(ranks):
        differences = [
            f"{name}: {first.get(name, _ABSENT)} on rank 0, {other.get(name, _ABSENT)} on rank {rank}"
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        ]
        if differences:
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            return f"rank {rank} trains with a different setup than rank 0: {'; '.join(differences[:3])}{more}"
    return ""


def gathers_parameters(model: torch.nn.Module) -> bool:
    """True if ranks gather the model's parameters together: under FSDP2 and ZeRO 3."""
    from torch.distributed.fsdp import FSDPModule

    return is_sharded_by_deepspeed(model) or any(isinstance(module, FSDPModule) for module in model.modules())


def failing_together(trainer: Trainer, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `compute_loss` that stops all ranks if the first training forward of a run fails on one.

    At that point no gradient has been reduced: DDP averages during the backward, and under DeepSpeed even the
    optimizer steps there (accelerate, `DeepSpeedEngineWrapper.backward`). If ranks gather parameters in the forward, a
    failing rank stops alone: the others wait in a gather, which would be matched with this check's collective.
    """
    checked: TrainerState | None = None

    def compute_and_check(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        # Each train() makes a new state.
        if not torch.is_grad_enabled() or checked is trainer.state:
            return compute_loss(model, *args, **kwargs)
        if gathers_parameters(model):
            checked = trainer.state
            return compute_loss(model, *args, **kwargs)
        with stopping_all("in its first training step"):
            result = compute_loss(model, *args, **kwargs)
        checked = trainer.state
        check_ranks_agree({})
        return result

    return compute_and_check


def warn_unsharded(trainer: Trainer) -> None:
    """Warn if FSDP is requested but each process trains the whole model, as accelerate does on a CPU (1.15,
    `state.py`)."""
    if fsdp_version(trainer.args) is not None and trainer.accelerator.distributed_type != "FSDP":
        get_logger().warning(
            "NOT sharded: FSDP is requested, but accelerate shards only on accelerators; each process holds the whole "
            "model"
        )


# Set by accelerate's launcher of one process and by none of its others (accelerate/utils/launch.py,
# prepare_simple_launcher_cmd_env), so the parent process is only inspected if it is that launcher.
_SET_BY_SIMPLE_LAUNCHER = "ACCELERATE_USE_CPU"


def check_world(world_size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raise a MemOptError if a run was launched as several processes but its world size is 1.

    Args:
        world_size: world size of the training arguments, after they have set up their device.
    """
    if world_size > 1:
        return
    if (announced := launcher_number("WORLD_SIZE", environment)) is not None and announced > 1:
        suggestion = "on a machine without a GPU add --use_cpu true to the script's arguments"
        if "LOCAL_RANK" not in environment:
            suggestion = "set RANK and LOCAL_RANK too, as torchrun does"
        raise MemOptError(
            f"this process is one of {announced} (WORLD_SIZE={announced}), but each of them would train on its own: "
            f"{suggestion}; for a single process unset WORLD_SIZE"
        )
    if _SET_BY_SIMPLE_LAUNCHER not in environment:
        return
    number, script = accelerate_launch(_parent_command()) or (1, "")
    if number > 1:
        raise MemOptError(
            f"accelerate launch was asked for {number} processes but started one (with --cpu, or without --multi_gpu, "
            f"it does so silently); run: accelerate launch --multi_gpu --num_processes {number} {script} …, on a "
            "machine without a GPU with --use_cpu true after the script; or use --num_processes 1"
        )


def accelerate_launch(command: Sequence[str]) -> tuple[int, str] | None:
    """Returns the number of processes and the script of an `accelerate launch` command line, read as accelerate reads
    it: flags, then config file. None for any other command, and for one that cannot be parsed or names no number."""
    words = _launch_arguments(command)
    if words is None:
        return None
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    # Ignore a command that cannot be parsed: accelerate has parsed it already, so it must be another version.
    try:
        args = launch_command_parser().parse_args(words)
        number = args.num_processes
        has_file = args.config_file is not None or (os.path.isfile(default_config_file) and not args.cpu)
        if number is None and has_file:
            number = getattr(load_config_from_file(args.config_file), "num_processes", None)
    except (SystemExit, Exception):
        return None
    return None if number is None else (int(number), str(args.training_script))


def _launch_arguments(command: Sequence[str]) -> list[str] | None:
    """Returns the words after `accelerate launch`, `accelerate-launch` or `python -m accelerate.commands.launch`."""
    for place, word in enumerate(command):
        name, behind = PurePath(word).name, list(command[place + 1 :])
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return behind
        if name in ("accelerate", "accelerate.commands.accelerate_cli") and behind[:1] == ["launch"]:
            return behind[1:]
    return None


def _parent_command() -> list[str]:
    try:
        parent = psutil.Process().parent()
        return parent.cmdline() if parent is not None else []
    except (psutil.Error, OSError):
        return []
