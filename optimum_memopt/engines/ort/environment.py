"""The ort engine's part of `memopt env`: conflicting packages, torch extensions, devices."""

from collections.abc import Mapping

import torch

from optimum_memopt.engines.api.factory import Ability, Report
from optimum_memopt.engines.ort import compat, cuda_libraries, extensions
from optimum_memopt.engines.ort.installed import missing
from optimum_memopt.errors import MemOptError
from optimum_memopt.installed import installed_version

# All are imported as `onnxruntime` and install the same files; pip allows several of them.
ONNXRUNTIMES = ("onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime", "onnxruntime-gpu")


def report() -> Report:
    """Imports onnxruntime-training, the only way to find out whether it can be imported."""
    installed = {name: _version(name) for name in (*ONNXRUNTIMES, "onnx")} | {"C++ compiler": _compiler()}
    abilities = _abilities(installed)
    advice = "--memory_opt_engine ort on a CPU where nothing is to be compiled, and for masked LM with few labels"
    built = {name: str(path) for name, path in (extensions.find() or {}).items()}
    return Report(installed, abilities, advice if abilities[0].works else "", built)


def _version(distribution: str) -> str | None:
    installed = installed_version((distribution,))
    return installed and installed[1]


def _compiler() -> str | None:
    try:
        return extensions.check_compiler()
    except MemOptError:
        return None


def clash(versions: Mapping[str, str | None]) -> list[str]:
    """The installed packages that overwrite each other's files; empty when there is at most one."""
    installed = [name for name in ONNXRUNTIMES if versions.get(name)]
    return installed if len(installed) > 1 else []


def install_command(versions: Mapping[str, str | None], cuda: str | None) -> str:
    """The command that installs the right onnxruntime-training without packages that overwrite it.

    Args:
        versions: of the installed packages.
        cuda: the CUDA version that torch is built for, None without CUDA.
    """
    package = "onnxruntime-training" if cuda else "onnxruntime-training-cpu"
    install = f"pip install {package}==1.19.2 onnx"
    overwriting = clash(versions) or [name for name in ("onnxruntime", "onnxruntime-gpu") if versions.get(name)]
    return f"pip uninstall -y {' '.join(overwriting)} && {install}" if overwriting else install


def _abilities(versions: Mapping[str, str | None]) -> tuple[Ability, ...]:
    engine = _ort_engine(versions)
    needs_extensions = (
        "custom torch.autograd.Function",
        "memory-efficient gradient management",
        "re-entrant activation checkpointing on the ort engine",
    )
    with_extensions = (_with_extensions(engine, what) for what in needs_extensions)
    return (engine, *with_extensions, _half_precision(engine), _cuda_options(engine))


def _ort_engine(versions: Mapping[str, str | None]) -> Ability:
    what, command = "ort engine", install_command(versions, torch.version.cuda)
    if packages := clash(versions):
        why = f"{' and '.join(packages)} are installed together and overwrite each other's files"
        return Ability(what, False, why, command)
    if why := missing():
        return Ability(what, False, why, command)
    try:
        compat.load()
    # A half-installed or overwritten native package can raise anything; the report shows the error.
    except Exception as error:
        library = cuda_libraries.library_in(str(error))
        needed = cuda_libraries.command(library) if library else command
        return Ability(what, False, f"{type(error).__name__}: {error}".splitlines()[0], needed)
    return Ability(what, True, "onnxruntime-training can be imported")


def _with_extensions(engine: Ability, what: str) -> Ability:
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
        if library := cuda_libraries.missing():
            return Ability(what, False, f"{library} of CUDA 11.8 is not here", cuda_libraries.command(library))
        return Ability(what, True, "on CUDA devices; on the CPU float32 only")
    return Ability(what, False, "ONNX Runtime's CPU provider trains float32 only")


def _cuda_options(engine: Ability) -> Ability:
    what = "efficient and flash attention, Triton, tuning"
    if not engine.works:
        return Ability(what, False, "needs the ort engine")
    lacking = extensions.cuda_missing()
    return Ability(what, not lacking, lacking or "on CUDA devices")
