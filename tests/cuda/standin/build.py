"""Compiles the stand-in for a CUDA device against the CUDA build of torch of this interpreter.

    python tests/cuda/standin/build.py FOLDER

Calls that no file here answers get a stub that succeeds and does nothing; their names come from torch's libraries
and Triton's launcher.
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "libcuda.so.1"
SOURCES = ("device_memory.c", "device_answers.c")
# Libraries of torch, and a pattern for the undefined symbols that a device would provide.
_ASKING = {
    "libc10_cuda.so": r"(__)?cuda[A-Z]|cublas",
    "libtorch_cuda.so": r"(__)?cuda[A-Z]|cublas",
    "libtorch_cuda_linalg.so": r"(__)?cuda[A-Z]|cublas",
    "libtorch_python.so": r"(__)?cuda[A-Z]|cublas",
    "libcaffe2_nvrtc.so": r"cu[A-Z](?!ile)",
}
# Symbols that the runtime library itself provides without a device.
_OF_RUNTIME = re.compile(r"__cuda|cudaGetError(Name|String)$|cudaRuntimeGetVersion$")


def build(folder: Path) -> Path:
    """Compile the library from scratch into this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    stubs = folder / "stubs.c"
    objects = [folder / f"{Path(name).stem}.o" for name in SOURCES]
    for source, target in zip(SOURCES, objects, strict=True):
        _compile(HERE / source, target, "-c")
    answered = {symbol for target in objects for symbol in _symbols(target, "--defined-only")}
    missing = sorted(_asked() - answered)
    lines = [f'int {name}(void) {{ return standin_called("{name}"); }}' for name in missing]
    stubs.write_text("\n".join(["int standin_called(const char *name);", *lines, ""]))
    library = folder / LIBRARY
    _compile(*objects, stubs, library, "-shared")
    plain = folder / "libcuda.so"
    plain.unlink(missing_ok=True)
    plain.symlink_to(LIBRARY)
    return library


def _compile(*paths: "Path | str") -> None:
    *sources, target, mode = paths
    flags = [mode, "-fPIC", "-O1", f"-I{_headers()}", f"-I{HERE}", "-fno-builtin"]
    subprocess.run(["cc", *flags, "-o", target, *sources, "-lpthread"], check=True)


def _headers() -> Path:
    """Returns the folder of `driver_types.h` of torch's own CUDA release, whose structs differ from other releases."""
    site = _folder("torch").parent
    return next(iter([*site.glob("nvidia/cu1?/include"), *site.glob("nvidia/cuda_runtime/include")]))


def _asked() -> set[str]:
    libraries = _folder("torch") / "lib"
    of_torch = {
        symbol
        for name, pattern in _ASKING.items()
        if (libraries / name).exists()
        for symbol in _symbols(libraries / name, "--undefined-only", "-D")
        if re.match(pattern, symbol) and not _OF_RUNTIME.match(symbol)
    }
    driver = _folder("triton") / "backends/nvidia"
    # Up to Triton 3.5, the launcher is a template in the Python file.
    launcher = "".join((driver / name).read_text() for name in ("driver.c", "driver.py"))
    # Either called by name or looked up by name: defineGetFunctionHandle(…, cuLaunchKernelEx), dlsym(…, "…")
    return of_torch | set(re.findall(r"\b(cu[A-Z]\w+)\s*[()\"]", launcher))


def _symbols(library: Path, *options: str) -> Iterator[str]:
    listed = subprocess.run(["nm", *options, library], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        # A version may follow the name: cudaMalloc@libcudart.so.13
        yield line.split()[-1].split("@")[0]


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is not installed; the stand-in needs the CUDA build of torch, which brings it")
    return Path(found.origin).parent


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
