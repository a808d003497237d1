"""Loading ONNX Runtime's CUDA provider, with libraries built for these tests."""

import shutil
import subprocess
from pathlib import Path

import pytest

from optimum_memopt.engines.ort import checks
from optimum_memopt.engines.ort.compat import installation, ortmodule
from optimum_memopt.errors import UnsupportedModelError
from tests import fresh_process

PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def make(path: Path, needs: Path | None = None) -> Path:
    """Build a library; its dependency is recorded by name only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-shared", "-x", "c", "/dev/null", "-o", str(path), f"-Wl,-soname,{path.name}"]
    others = ["-x", "none", "-Wl,--no-as-needed", str(needs)] if needs is not None else []
    subprocess.run(["cc", *flags, *others], check=True)
    return path


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Yields a folder of installed packages: a provider that needs cuBLAS, which needs cuBLASLt."""
    libraries = tmp_path / "nvidia/cublas/lib"
    light = make(libraries / "libcublasLt.so.11")
    make(tmp_path / PROVIDER, make(libraries / "libcublas.so.11", light))
    monkeypatch.setattr(installation.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(installation, "onnxruntime_dir", lambda: tmp_path / "onnxruntime")
    installation.missing_library.cache_clear()
    yield tmp_path
    installation.missing_library.cache_clear()


def missing_in_a_fresh_process(packages: Path) -> str:
    """Returns the missing library, found in a fresh process because a loaded library stays loaded."""
    script = f"""
import pathlib, site
from optimum_memopt.engines.ort.compat import installation
site.getsitepackages = lambda: [{str(packages)!r}]
print(installation.load_library(pathlib.Path({str(packages / PROVIDER)!r})))
"""
    done = fresh_process.run("-c", script)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_libraries_in_wheels_are_found(packages):
    assert missing_in_a_fresh_process(packages) == ""


@pytest.mark.parametrize("lost", ["libcublas.so.11", "libcublasLt.so.11"])
def test_the_library_that_is_not_there_is_named(packages, lost, monkeypatch):
    (packages / "nvidia/cublas/lib" / lost).unlink()
    assert missing_in_a_fresh_process(packages) == lost
    monkeypatch.setattr(ortmodule, "runs_on_gpus", lambda: True)
    message = rf"Model is on cuda, and onnxruntime-training\S* \S+ does not find {lost} of CUDA 11.8; give .*"
    with pytest.raises(UnsupportedModelError, match=message + "pip install 'nvidia-cublas-cu11' ") as error:
        checks.check_device("Model", "cuda")
    assert "\n" not in str(error.value) and "'nvidia-cudnn-cu11<9'" in str(error.value)


def test_other_errors_name_no_library():
    assert installation.library_in("libonnxruntime.so: undefined symbol: Provider_GetHost") == ""
    text = "libcudnn.so.8: cannot open shared object file: No such file or directory"
    assert installation.library_in(text) == "libcudnn.so.8"
    assert installation.library_command("libcudnn.so.8").startswith("pip install 'nvidia-cudnn-cu11<9'")


def test_without_a_provider_nothing_is_missing(monkeypatch):
    """The CPU build, which the tests use, misses no library."""
    installation.missing_library.cache_clear()
    assert installation.missing() == ""
