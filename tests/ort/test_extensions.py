"""Finding, building and loading the extensions; the last tests really build them and train a model with them."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from optimum_memopt import cache_files
from optimum_memopt.engines.ort.compat import extensions, installation
from optimum_memopt.errors import MemOptError
from tests import fresh_process
from tests.ort.helpers import SCRIPTS, run_script

needs_wheel = pytest.mark.skipif(installation.onnxruntime_dir() is None, reason="no onnxruntime-training")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def put_built_files() -> dict[str, Path]:
    paths = extensions.expected_paths(extensions.cache_dir())
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


def test_importing_the_module_imports_nothing_of_onnxruntime():
    script = """
        import sys
        from optimum_memopt.engines.ort.compat import extensions
        extensions.find()
        assert not [name for name in sys.modules if name.startswith("onnxruntime")]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_files.cache_folder() == tmp_path / "own"
    monkeypatch.delenv(cache_files.CACHE_VARIABLE)
    assert cache_files.cache_folder() == tmp_path / "xdg" / "optimum_memopt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_files.cache_folder() == tmp_path / ".cache" / "optimum_memopt"


def test_a_user_without_a_home_has_no_extensions(monkeypatch):
    for name in (cache_files.CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    assert extensions.find() is None
    with pytest.raises(MemOptError, match="no home folder for the torch extensions; set OPTIMUM_MEMOPT_CACHE"):
        extensions.build()


def test_what_was_built_for_another_torch_is_not_found(cache, monkeypatch):
    assert extensions.find() is None
    paths = put_built_files()
    assert extensions.find() == paths
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "2.99.0")
        assert extensions.find() is None
    with monkeypatch.context() as other:
        other.setattr(torch.version, "cuda", "13.0")
        assert extensions.find() is None
    paths["torch_interop_utils"].unlink()
    assert extensions.find() is None


def test_a_file_that_cannot_be_loaded_is_named_with_a_suggestion(cache):
    put_built_files()
    with pytest.raises(MemOptError, match=f"aten_op_executor.*; delete .* and run: {extensions.BUILD_COMMAND}"):
        extensions.load(extensions.find())


@needs_wheel
def test_without_a_compiler_the_message_says_what_to_install(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MemOptError, match="`no-such-compiler` is not on PATH; install one .*apt-get install g"):
        extensions.build()
    assert not cache.exists()


@needs_wheel
def test_a_failed_build_says_the_first_error_and_leaves_nothing_half_built(cache, monkeypatch, tmp_path):
    failing = compiler(
        tmp_path,
        'case "$*" in *version) exec c++ "$@";; esac\n'
        'echo "a.cc:1:2: warning: odd"; echo "a.cc:3:4: error: made to fail"; exit 1',
    )
    monkeypatch.setenv("CXX", failing)
    monkeypatch.setenv("CC", failing)
    with pytest.raises(MemOptError, match="building aten_op_executor failed: .*error: made to fail") as raised:
        extensions.build()
    assert "\n" not in str(raised.value)
    left = {path.name for path in extensions.cache_dir().iterdir()}
    assert left == {"build.log", "lock"}
    assert "warning: odd" in (extensions.cache_dir() / "build.log").read_text()


@needs_wheel
def test_a_second_process_waits_for_the_first_and_takes_its_result(cache, monkeypatch, tmp_path):
    called = tmp_path / "called"
    monkeypatch.setenv("CXX", compiler(tmp_path, f"touch {called}; exit 1"))
    extensions.cache_dir().mkdir(parents=True)
    results = []
    second = threading.Thread(target=lambda: results.append(extensions.build()))
    with FileLock(extensions.cache_dir() / "lock"):
        second.start()
        second.join(timeout=1)
        assert second.is_alive()
        paths = put_built_files()
    second.join(timeout=300)
    assert results == [paths]
    assert not called.exists()


@pytest.mark.parametrize(
    "output, line",
    [
        (
            "[1/2] c++\nx.cc:1:2: warning: w\nx.cc:5:6: error: no type\nninja: build stopped",
            "x.cc:5:6: error: no type",
        ),
        ("x.h:1:10: fatal error: Python.h: No such file\n", "x.h:1:10: fatal error: Python.h: No such file"),
        ("Traceback:\nModuleNotFoundError: No module named 'setuptools'\n", "ModuleNotFoundError: No module named 's"),
        ("Traceback:\nImportError: t.so: undefined symbol: _ZTIN\n\n", "ImportError: t.so: undefined symbol: _ZTIN"),
        ("", "no output"),
    ],
)
def test_the_line_that_says_what_went_wrong(output, line):
    assert extensions.first_error(output).startswith(line)


@pytest.mark.extensions
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("function", ["two_outputs", "in_place", "unused_output"])
def test_custom_functions_train_with_their_own_backward(function, environment_with_extensions, tmp_path):
    run_script("train_custom_functions.py", function, environment=environment_with_extensions, cwd=tmp_path)


@pytest.mark.extensions
@pytest.mark.timeout(1800)
def test_a_process_ends_with_a_forward_whose_backward_never_came(environment_with_extensions, tmp_path):
    arguments = ("two_outputs", "pending")
    run_script("train_custom_functions.py", *arguments, environment=environment_with_extensions, cwd=tmp_path)


@needs_wheel
def test_without_the_extensions_such_a_model_is_refused_with_the_command(cache, tmp_path):
    done = fresh_process.run(SCRIPTS / "train_custom_functions.py", "two_outputs", cwd=tmp_path)
    assert done.returncode == 1
    last_line = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedModelError" in last_line and extensions.BUILD_COMMAND in last_line
