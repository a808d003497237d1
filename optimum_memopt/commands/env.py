"""`optimum-cli memopt env`: what is installed, what works here, what is missing and the command to get it.

Nothing heavy is imported before `run()`: optimum imports this module whenever any of its commands starts.
"""

import json
import platform
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from optimum.commands.base import BaseOptimumCLICommand

# All are imported as `onnxruntime` and write the same files; pip does not object to two of them.
ONNXRUNTIMES = ("onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime", "onnxruntime-gpu")
LIBRARIES = ("torch", "transformers", "accelerate", "optimum", *ONNXRUNTIMES, "onnx", "deepspeed")


@dataclass(frozen=True)
class Ability:
    """Something a user may want: whether it works here, why (not), and the shell command that gets it ("" if none)."""

    what: str
    works: bool
    why: str
    command: str = ""


class EnvCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument(
            "--build",
            action="store_true",
            help="Build the two torch extensions of onnxruntime-training into the user's cache (1 to 3 minutes).",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")

    def run(self) -> None:
        from optimum_memopt.errors import MemOptError

        if self.args.build:
            from optimum_memopt.engines.ort import extensions

            try:
                extensions.build()
            except MemOptError as error:
                sys.exit(f"error: {error}")
        versions = installed()
        abilities = ort_abilities(versions)
        extension_paths = built_extensions()
        if self.args.json:
            report = {"installed": versions, "works": [asdict(a) for a in abilities], "extensions": extension_paths}
            print(json.dumps(report, indent=2))
        else:
            print(to_text(versions, abilities, extension_paths))


def installed() -> dict[str, str | None]:
    """Versions by name, None for what is not installed."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "CUDA (of torch)": _cuda(),
        "C++ compiler": _compiler(),
    }


def _version(distribution: str) -> str | None:
    from optimum_memopt.engines.base import installed_version

    found = installed_version((distribution,))
    return found and found[1]


def _cuda() -> str | None:
    import torch

    if torch.version.cuda is None:
        return None
    return f"{torch.version.cuda}, {torch.cuda.device_count()} device(s)"


def _compiler() -> str | None:
    from optimum_memopt.engines.ort import extensions
    from optimum_memopt.errors import MemOptError

    try:
        return extensions.check_compiler()
    except MemOptError:
        return None


def clash(versions: Mapping[str, str | None]) -> list[str]:
    """The installed packages that overwrite each other's files; empty when there is at most one."""
    found = [name for name in ONNXRUNTIMES if versions.get(name)]
    return found if len(found) > 1 else []


def install_command(versions: Mapping[str, str | None]) -> str:
    """What installs the right onnxruntime-training and nothing that overwrites it."""
    package = "onnxruntime-training" if versions.get("CUDA (of torch)") else "onnxruntime-training-cpu"
    install = f"pip install {package}==1.19.2 onnx"
    overwriting = clash(versions) or [name for name in ("onnxruntime", "onnxruntime-gpu") if versions.get(name)]
    return f"pip uninstall -y {' '.join(overwriting)} && {install}" if overwriting else install


def ort_abilities(versions: Mapping[str, str | None]) -> list[Ability]:
    """What the ort engine can do here; this imports onnxruntime-training."""
    engine = _ort_engine(versions)
    needs_extensions = (
        "custom torch.autograd.Function",
        "memory-efficient gradient management",
        "re-entrant activation checkpointing on the ort engine",
    )
    extensions = (_extensions(engine, what) for what in needs_extensions)
    return [engine, *extensions, _half_precision(engine), _cuda_levers(engine)]


def _ort_engine(versions: Mapping[str, str | None]) -> Ability:
    from optimum_memopt.engines import ort

    what = "ort engine"
    if packages := clash(versions):
        why = f"{' and '.join(packages)} are installed together and overwrite each other's files"
        return Ability(what, False, why, install_command(versions))
    if why := ort.missing():
        return Ability(what, False, why, install_command(versions))
    from optimum_memopt.engines.ort import compat

    try:
        compat.load()
    # Whatever a half-installed or overwritten native package does on import is the answer to the user's question.
    except Exception as error:
        return Ability(what, False, f"{type(error).__name__}: {error}".splitlines()[0], install_command(versions))
    return Ability(what, True, "onnxruntime-training can be imported")


def _extensions(engine: Ability, what: str) -> Ability:
    from optimum_memopt.engines.ort import extensions
    from optimum_memopt.errors import MemOptError

    if not engine.works:
        return Ability(what, False, "needs the ort engine")
    if extensions.find():
        return Ability(what, True, "the torch extensions are built")
    try:
        extensions.check_compiler()
    except MemOptError as error:
        return Ability(what, False, f"the torch extensions are not built: {error}", extensions.BUILD_COMMAND)
    return Ability(what, False, "the torch extensions are not built", extensions.BUILD_COMMAND)


def _half_precision(engine: Ability) -> Ability:
    what = "fp16, bf16 on the ort engine"
    if not engine.works:
        return Ability(what, False, "needs the ort engine")
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return Ability(what, True, "on CUDA devices; on the CPU float32 only")
    return Ability(what, False, "ONNX Runtime's CPU provider trains float32 only")


def _cuda_levers(engine: Ability) -> Ability:
    what = "efficient and flash attention, Triton, tuning"
    if not engine.works:
        return Ability(what, False, "needs the ort engine")
    from optimum_memopt.engines.ort import extensions

    missing = extensions.cuda_missing()
    return Ability(what, not missing, missing or "on CUDA devices")


def built_extensions() -> dict[str, str]:
    """Where the built torch extensions lie, by name; empty when they are not built."""
    from optimum_memopt.engines.ort import extensions

    return {name: str(path) for name, path in (extensions.find() or {}).items()}


def to_text(versions: Mapping[str, str | None], abilities: list[Ability], extension_paths: Mapping[str, str]) -> str:
    """The report for a terminal."""
    from tabulate import tabulate

    parts = [
        tabulate([(name, version or "-") for name, version in versions.items()], headers=("installed", "version")),
        tabulate(
            [(a.what, "yes" if a.works else "no", a.why) for a in abilities],
            headers=("what", "works", "why"),
            maxcolwidths=(None, None, 70),
        ),
    ]
    if extension_paths:
        parts.append("\n".join(("torch extensions:", *(f"  {path}" for path in extension_paths.values()))))
    if missing := [a for a in abilities if a.command]:
        parts.append("\n".join(("to get what is missing:", *(f"  {a.what}: {a.command}" for a in missing))))
    return "\n\n".join(parts)
