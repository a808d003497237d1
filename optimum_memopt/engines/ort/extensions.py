"""Builds, finds and loads the two torch C++ extensions of ORTModule.

`torch_interop_utils` runs a user's `torch.autograd.Function` inside ONNX Runtime's graph, `aten_op_executor` runs
single torch operators there. onnxruntime-training ships them as sources only, and its own build writes into
site-packages and fails on torch >= 2.7. Here a patched copy (`extension_sources.py`) is built into a user cache.

Nothing here imports `onnxruntime.training`: that import already needs what is built here.
"""

import hashlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TextIO

import torch
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from optimum_memopt.engines.ort.extension_sources import SUBSTITUTIONS, patch_source
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger, rank

NAMES = ("aten_op_executor", "torch_interop_utils")
BUILD_COMMAND = "optimum-cli memopt env --build"
CACHE_VARIABLE = "OPTIMUM_MEMOPT_CACHE"

_PARENT = "onnxruntime.training.ortmodule.torch_cpp_extensions"


def onnxruntime_dir() -> Path | None:
    """The folder of the package `onnxruntime`, found without importing it; None when it is not installed."""
    spec = importlib.util.find_spec("onnxruntime")
    locations = (spec and spec.submodule_search_locations) or ()
    return next((Path(location) for location in locations), None)


def sources_dir() -> Path:
    """The wheel's own C++ sources.

    Raises:
        MemOptError: onnxruntime-training is not installed.
    """
    package = onnxruntime_dir()
    sources = package and package / "training" / "ortmodule" / "torch_cpp_extensions" / "cpu"
    if not (sources and sources.is_dir()):
        raise MemOptError(
            "the torch extensions are built from the sources in onnxruntime-training, which is not installed; "
            "get it with: pip install onnxruntime-training-cpu==1.19.2 onnx"
        )
    return sources


def onnxruntime_build() -> dict[str, str]:
    """Build information of the installed files: `package_name`, `__version__` and, in a CUDA build, `cuda_version`.

    The metadata of the distributions is not reliable, since `onnxruntime` and `onnxruntime-training` overwrite each
    other's files. Empty when onnxruntime is not installed.
    """
    package = onnxruntime_dir()
    info = package and package / "capi" / "build_and_package_info.py"
    if not (info and info.is_file()):
        return {}
    return {name: value for name, value in runpy.run_path(str(info)).items() if isinstance(value, str)}


def cuda_missing() -> str:
    """Why nothing can run on CUDA here; empty when it can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if "cuda_version" not in onnxruntime_build():
        return "the installed onnxruntime-training is its CPU build"
    return ""


def cache_root() -> Path:
    """The package's cache: `OPTIMUM_MEMOPT_CACHE`, else `optimum_memopt` in `XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        MemOptError: there is no home folder. In one for temporary files others may write, so no program is kept there.
    """
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optimum_memopt"
    except RuntimeError:
        raise MemOptError(f"the user has no home folder for the torch extensions; set {CACHE_VARIABLE}") from None


def cache_dir() -> Path:
    """The folder of the extensions for this exact torch, onnxruntime and Python; it may not exist yet."""
    accelerator = torch.version.cuda or torch.version.hip or "cpu"
    sources = hashlib.sha256(repr(SUBSTITUTIONS).encode()).hexdigest()[:8]
    key = (
        f"torch-{torch.__version__}-{accelerator}",
        f"ort-{onnxruntime_build().get('__version__', 'none')}",
        sysconfig.get_config_var("SOABI"),
        sources,
    )
    return cache_root() / "torch_extensions" / "_".join(key)


def expected_paths(folder: Path) -> dict[str, Path]:
    """Paths of the extensions in `folder` after a build."""
    return {name: folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}" for name in NAMES}


def find() -> dict[str, Path] | None:
    """The built extensions by name; None unless both exist."""
    try:
        paths = expected_paths(cache_dir())
    except MemOptError:
        return None
    return paths if all(path.is_file() for path in paths.values()) else None


def check_compiler() -> str:
    """The C++ compiler that a build would call.

    Raises:
        MemOptError: no compiler or no Python headers; the message says what to install.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        raise MemOptError(
            f"no C++ compiler: `{compiler}` is not on PATH; install one (Debian, Ubuntu: apt-get install g++; "
            "Fedora: dnf install gcc-c++; conda: conda install -c conda-forge gxx) or name it in CXX"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise MemOptError(
            "no Python headers (Python.h): install them (Debian, Ubuntu: apt-get install python3-dev; "
            "Fedora: dnf install python3-devel)"
        )
    return compiler


def build() -> dict[str, Path]:
    """Compile both extensions into `cache_dir()` unless they exist; returns their paths by name.

    Takes 1 to 3 minutes. Concurrent processes wait for the first one and use its result. Files appear atomically.

    Raises:
        MemOptError: onnxruntime-training or a compiler is missing, or the compilation failed; the message has the
            first error and the path of the compiler's full output.
    """
    if built := find():
        return built
    sources, folder = sources_dir(), cache_dir()
    check_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with _progress() as show, _locked(folder / "lock", partial(show, "waiting for another process that builds")):
        if built := find():
            return built
        work, log = folder / "build", folder / "build.log"
        # Left by a build that was killed; the lock guarantees that nobody uses it.
        shutil.rmtree(work, ignore_errors=True)
        try:
            _copy_patched(sources, work)
            for number, name in enumerate(NAMES, 1):
                _compile(work / name, log, partial(show, f"building {name} ({number}/{len(NAMES)})"))
            for name, path in expected_paths(folder).items():
                os.replace(work / name / "out" / path.name, path)
            log.unlink()
        finally:
            shutil.rmtree(work, ignore_errors=True)
    get_logger().info("torch extensions built in %s", folder)
    return expected_paths(folder)


def load(paths: dict[str, Path]) -> dict[str, ModuleType]:
    """Import the built extensions under the names that onnxruntime imports; a second call has no effect.

    Args:
        paths: as `find()` and `build()` return them.

    Raises:
        MemOptError: a file cannot be loaded, for instance one that another machine built in a shared home folder.
    """
    modules = {}
    for name, path in paths.items():
        full_name = f"{_PARENT}.{name}"
        module = sys.modules.get(full_name)
        if module is None:
            spec = importlib.util.spec_from_file_location(full_name, path)
            try:
                assert spec is not None and spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            except ImportError as error:
                raise MemOptError(f"{error}; delete {path.parent} and run: {BUILD_COMMAND}") from error
            sys.modules[full_name] = module
        # A later import of the parent finds the module in sys.modules by itself.
        if parent := sys.modules.get(_PARENT):
            setattr(parent, name, module)
        modules[name] = module
    return modules


def _copy_patched(sources: Path, destination: Path) -> None:
    """Copy the sources of both extensions with the substitutions applied."""
    for name in NAMES:
        for source in sorted((sources / name).iterdir()):
            if source.suffix in (".py", ".cc", ".h"):
                target = destination / name / source.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(
                    patch_source(f"{name}/{source.name}", source.read_text(encoding="utf-8")), encoding="utf-8"
                )


def _compile(folder: Path, log: Path, tick: Callable[[], None]) -> None:
    """Build the extension in `folder` and import it, each in a subprocess with output to `log`.

    The import finds symbols that torch hides, which the linker does not.

    Args:
        folder: with the extension's sources.
        log: file for the compiler's output.
        tick: called while a subprocess runs.
    """
    for python_arguments in (
        ["setup.py", "build_ext", "--build-lib", "out", "--build-temp", "tmp"],
        ["-c", f"import sys, torch; sys.path.insert(0, 'out'); import {folder.name}"],
    ):
        with log.open("w", encoding="utf-8") as output:
            returncode = _run([sys.executable, *python_arguments], folder, output, tick)
        if returncode != 0:
            reason = first_error(log.read_text(encoding="utf-8", errors="replace"))
            raise MemOptError(f"building {folder.name} failed: {reason} (full output: {log})")


def _run(command: list[str], folder: Path, output: TextIO, tick: Callable[[], None]) -> int:
    """Run a command and return its exit code; terminates it if this process is interrupted."""
    # Python's own flags include debug information: 40 MB of files and half a minute for nothing.
    environment = {**os.environ, "CFLAGS": f"{os.environ.get('CFLAGS', '')} -g0"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            tick()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_tick_seconds())
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    return process.returncode


def first_error(output: str) -> str:
    """The first error line in a compiler's or linker's output; the last line when there is none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    error = re.compile(r"\b(fatal )?error: |undefined reference|cannot find -l|No space left")
    return next(filter(error.search, lines), lines[-1] if lines else "no output")


def _tick_seconds() -> float:
    return 1.0 if sys.stderr.isatty() else 15.0


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that sets the text of a progress line with the elapsed time, on rank 0."""
    layout = "[memopt] {desc}: {elapsed}"
    with tqdm(disable=rank() != 0, bar_format=layout, desc="torch extensions", leave=False) as bar:
        yield bar.set_description_str


@contextmanager
def _locked(path: Path, tick: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file; call `tick` while waiting for another process."""
    lock = FileLock(path)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_tick_seconds())
        except Timeout:
            tick()
    try:
        yield
    finally:
        lock.release()
