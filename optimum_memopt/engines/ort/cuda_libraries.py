"""Whether ONNX Runtime's CUDA provider finds CUDA's libraries, found by loading it.

onnxruntime-training 1.19.2 for GPUs is built for CUDA 11.8 and cuDNN 8; torch 2.9 and later bring CUDA 12 or 13.
"""

import ctypes
import functools
import importlib.util
import re
import site
import sysconfig
from pathlib import Path

_PROVIDER = "capi/libonnxruntime_providers_cuda.so"
# glibc's text for a library that another one needs.
_NOT_FOUND = re.compile(r"(lib[\w.+-]+?\.so[\d.]*): cannot open shared object file")
# By the beginning of a library's name. cuDNN 9 has other names than the provider asks for.
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


@functools.cache
def missing() -> str:
    """The first library that the provider needs and that is not here; empty when it loads, or there is no provider."""
    provider = _provider()
    return "" if provider is None else load(provider)


def load(library: Path) -> str:
    """Load a library with those that it needs, which may lie in NVIDIA's wheels, where no loader looks.

    Returns:
        The name of the one that was not found; empty where all were.
    """
    tried: set[str] = set()
    while True:
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return ""
        except OSError as error:
            lacking = library_in(str(error))
        if not lacking:
            # It was found, and needs something of ONNX Runtime's own.
            return ""
        found = _in_wheels(lacking)
        if found is None or lacking in tried:
            return lacking
        tried.add(lacking)
        if others := load(found):
            return others


def library_in(error: str) -> str:
    """The library that a loader's error names; empty where it is another error."""
    match = _NOT_FOUND.search(error)
    return match[1] if match else ""


def command(library: str) -> str:
    """How to get a library, with those that it will be followed by.

    Args:
        library: as `libcublas.so.11`.
    """
    own = next((wheel for name, wheel in _WHEELS.items() if library.startswith(name)), "")
    others = (_WHEELS[name] for name in ("libcublas", "libcudart", "libcudnn", "libcufft", "libcurand"))
    return "pip install " + " ".join(f"'{wheel}'" for wheel in dict.fromkeys((own, *others)) if wheel)


def _provider() -> Path | None:
    found = importlib.util.find_spec("onnxruntime")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (path := Path(folder, _PROVIDER)).is_file():
            return path
    return None


def _in_wheels(library: str) -> Path | None:
    folders = dict.fromkeys((*site.getsitepackages(), sysconfig.get_path("purelib")))
    return next((path for folder in folders for path in Path(folder).glob(f"nvidia/*/lib/{library}")), None)
