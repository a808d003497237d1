"""Detects a launch of several processes in which each process would train alone.

Without a GPU this happens silently in every launcher (accelerate 1.15, transformers 5.23): a script that is not given
`--use_cpu true` joins no process group, and `accelerate launch --cpu --num_processes 2` starts one process only. The
same examples are then trained once or twice, at a fraction of the batch that was meant.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil

from optimum_memopt.errors import MemOptError

# Set by accelerate's launcher of one process and by none of its others (accelerate/utils/launch.py,
# prepare_simple_launcher_cmd_env), so nobody else's parent process is ever looked at.
_SET_BY_SIMPLE_LAUNCHER = "ACCELERATE_USE_CPU"


@dataclass(frozen=True)
class AccelerateLaunch:
    """What `accelerate launch` was asked for."""

    num_processes: int
    script: str


def check_world(world_size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Stop a run that was launched as several processes and is a world of one.

    Args:
        world_size: of the training arguments, after they have set up their device.
        environment: this process's.

    Raises:
        MemOptError: with what to write instead.
    """
    if world_size > 1:
        return
    if (announced := environment.get("WORLD_SIZE", "")).isdigit() and int(announced) > 1:
        rank_missing = "LOCAL_RANK" not in environment
        way_out = (
            "set RANK and LOCAL_RANK too, as torchrun does"
            if rank_missing
            else "on a machine without a GPU add --use_cpu true to the script's arguments"
        )
        raise MemOptError(
            f"this process is one of {announced} (WORLD_SIZE={announced}) but would train alone, as each of them: "
            f"{way_out}; for a single process unset WORLD_SIZE"
        )
    if _SET_BY_SIMPLE_LAUNCHER not in environment:
        return
    launch = accelerate_launch(_parent_command())
    if launch is not None and launch.num_processes > 1:
        number = launch.num_processes
        raise MemOptError(
            f"accelerate launch was asked for {number} processes and started one (with --cpu, or without "
            f"--multi_gpu, it does so silently); write: accelerate launch --multi_gpu --num_processes {number} "
            f"{launch.script} …, and on a machine without a GPU --use_cpu true behind it; or --num_processes 1"
        )


def accelerate_launch(command: Sequence[str]) -> AccelerateLaunch | None:
    """What the command line of an `accelerate launch` asks for, read as accelerate reads it: its flags, then its
    config file.

    Args:
        command: a process's command line, word by word.

    Returns:
        None for any other command, and for one that cannot be read or names no number.
    """
    words = _launch_arguments(command)
    if words is None:
        return None
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    # What cannot be parsed is let through: accelerate has parsed it already, so it must be another version.
    try:
        args = launch_command_parser().parse_args(words)
        number = args.num_processes
        has_file = args.config_file is not None or (os.path.isfile(default_config_file) and not args.cpu)
        if number is None and has_file:
            number = getattr(load_config_from_file(args.config_file), "num_processes", None)
    except (SystemExit, Exception):
        return None
    return None if number is None else AccelerateLaunch(int(number), str(args.training_script))


def _launch_arguments(command: Sequence[str]) -> list[str] | None:
    """What stands behind `accelerate launch`, `accelerate-launch` or `python -m accelerate.commands.launch`."""
    for place, word in enumerate(command):
        # The word itself for a module, its stem for a program (Scripts\accelerate.exe).
        names, behind = {word, PurePath(word).stem}, list(command[place + 1 :])
        if names & {"accelerate-launch", "accelerate.commands.launch"}:
            return behind
        if names & {"accelerate", "accelerate.commands.accelerate_cli"} and behind[:1] == ["launch"]:
            return behind[1:]
    return None


def _parent_command() -> list[str]:
    """The parent process's command line, empty when it cannot be had."""
    try:
        parent = psutil.Process().parent()
        return parent.cmdline() if parent is not None else []
    except (psutil.Error, OSError):
        return []
