"""Inspects the installed ONNX Runtime, its build and the CUDA libraries that it finds, without importing it.

The GPU build of onnxruntime-training 1.19.2 needs CUDA 11.8 and cuDNN 8; torch 2.9 and later ship CUDA 12 or 13.
"""

import ctypes
import functools
import importlib.util
import re
import runpy
import site
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch

from optimum_memopt.compat.installed import installed_version

DISTRIBUTIONS = ("onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime-training-rocm")
_INFERENCE_ONLY = ("onnxruntime", "onnxruntime-gpu")
# All are imported as `onnxruntime` and install the same files; pip allows installing several of them.
ONNXRUNTIMES = ("onnxruntime-training", "onnxruntime-training-cpu", *_INFERENCE_ONLY)

# glibc's error for a missing dependency of a library.
_NOT_FOUND = re.compile(r"(lib[\w.+-]+?\.so[\d.]*): cannot open shared object file")
# Wheels by the prefix of a library's name. cuDNN 9 has other library names than the CUDA provider needs.
_WHEELS = {
    "libcublas": "nvidia-cublas-cu11",
    "libcudart": "nvidia-cuda-runtime-cu11",
    "libcudnn": "nvidia-cudnn-cu11<9",
    "libcufft": "nvidia-cufft-cu11",
    "libcupti": "nvidia-cuda-cupti-cu11",
    "libcurand": "nvidia-curand-cu11",
    "libcusolver": "nvidia-cusolver-cu11",
    "libcusparse": "nvidia-cusparse-cu11",
    "libnccl": "nvidia-nccl-cu11",
    "libnvrtc": "nvidia-cuda-nvrtc-cu11",
}


def missing() -> str:
    """Returns why this engine cannot work here and how to install it; empty if it can."""
    if installed_version(DISTRIBUTIONS) is None:
        return "onnxruntime-training is not installed; pip install 'optimum-memopt[ort]' (Python 3.12 or older)"
    if clash := installed_version(_INFERENCE_ONLY):
        return (
            f"the package {clash[0]} overwrites onnxruntime-training, both are imported as onnxruntime; "
            f"pip uninstall {clash[0]} and reinstall onnxruntime-training"
        )
    return ""


def clash(versions: Mapping[str, str | None]) -> list[str]:
    """Returns the installed packages that overwrite each other's files; empty if there is at most one."""
    installed = [name for name in ONNXRUNTIMES if versions.get(name)]
    return installed if len(installed) > 1 else []


def install_command(versions: Mapping[str, str | None], cuda: str | None) -> str:
    """Returns the command that installs the right onnxruntime-training and removes packages that overwrite it.

    Args:
        versions: versions of packages; None or absent if not installed.
        cuda: the CUDA version that torch is built for; None without CUDA.
    """
    install = f"pip install {'onnxruntime-training' if cuda else 'onnxruntime-training-cpu'}==1.19.2 onnx"
    overwriting = clash(versions) or [name for name in _INFERENCE_ONLY if versions.get(name)]
    return f"pip uninstall -y {' '.join(overwriting)} && {install}" if overwriting else install


def onnxruntime_dir() -> Path | None:
    """Returns the folder of the package `onnxruntime`; None if it is not installed."""
    spec = importlib.util.find_spec("onnxruntime")
    return next(map(Path, (spec and spec.submodule_search_locations) or ()), None)


def onnxruntime_build() -> dict[str, str]:
    """Returns build information of the installed files: `package_name`, `__version__` and, in a CUDA build,
    `cuda_version`; empty if onnxruntime is not installed.

    The metadata of the distributions is not reliable, since `onnxruntime` and `onnxruntime-training` overwrite each
    other's files.
    """
    package = onnxruntime_dir()
    info = package and package / "capi" / "build_and_package_info.py"
    if not (info and info.is_file()):
        return {}
    return {name: value for name, value in runpy.run_path(str(info)).items() if isinstance(value, str)}


def cuda_missing() -> str:
    """Returns why ONNX Runtime cannot run on CUDA here; empty if it can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if "cuda_version" not in onnxruntime_build():
        return "the installed onnxruntime-training is its CPU build"
    return ""


@functools.cache
def missing_library() -> str:
    """Returns the first library that the CUDA provider needs and lacks; empty if it loads or does not exist."""
    package = onnxruntime_dir()
    provider = package and package / "capi" / "libonnxruntime_providers_cuda.so"
    return load_library(provider) if provider and provider.is_file() else ""


def load_library(library: Path) -> str:
    """Load a library and its dependencies, which may be in NVIDIA's wheels, where the loader does not look.

    Returns:
        The name of the dependency that was not found; empty if all were.
    """
    tried: set[str] = set()
    while True:
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return ""
        except OSError as error:
            lacking = library_in(str(error))
        if not lacking:
            # All libraries were found; the error is about a part of ONNX Runtime itself.
            return ""
        folders = dict.fromkeys((*site.getsitepackages(), sysconfig.get_path("purelib")))
        wheels = (path for folder in folders for path in Path(folder).glob(f"nvidia/*/lib/{lacking}"))
        path = next(wheels, None)
        if path is None or lacking in tried:
            return lacking
        tried.add(lacking)
        if needed := load_library(path):
            return needed


def library_in(error: str) -> str:
    """Returns the missing library that a loader's error names; empty for other errors."""
    match = _NOT_FOUND.search(error)
    return match[1] if match else ""


def library_command(library: str) -> str:
    """Returns the command that installs a library, such as `libcublas.so.11`, and the libraries that the CUDA provider
    usually needs besides."""
    own = next((wheel for name, wheel in _WHEELS.items() if library.startswith(name)), "")
    usual = (_WHEELS[name] for name in ("libcublas", "libcudart", "libcudnn", "libcufft", "libcurand"))
    return "pip install " + " ".join(f"'{wheel}'" for wheel in dict.fromkeys((own, *usual)) if wheel)
