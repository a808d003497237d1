"""A new engine is a folder that registers itself: it has flags and a place in `auto`, and no other code names it."""

import os
import shutil
from pathlib import Path

import pytest

import optimum_memopt
from optimum_memopt.engines.compile.options import CompileOptions
from optimum_memopt.engines.shared.registry import Registration, engine_names, factory, register_engine, registrations
from optimum_memopt.errors import MemOptError
from tests import fresh_process

SOURCE = Path(optimum_memopt.__file__).parent
HERE = Path(__file__).parent


def test_the_engines_and_their_order():
    assert engine_names() == ("ort", "compile")
    with pytest.raises(MemOptError, match="memory_opt_engine 'tvm': allowed: auto, ort, compile"):
        factory("tvm")


@pytest.mark.parametrize("name", ["auto", "compile"])
def test_a_name_is_given_once(name):
    with pytest.raises(ValueError, match=f"engine {name} is already registered"):
        register_engine(Registration(name, options=CompileOptions, load=lambda: None, summary=""))


def test_registered_flags_exist():
    for registration in registrations():
        names = set(registration.options.__dataclass_fields__)
        assert registration.for_any_engine | registration.need_trainer | registration.per_rank <= names


def test_a_folder_is_an_engine(tmp_path):
    package = tmp_path / "optimum_memopt"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(HERE / "toy_engine", package / "engines" / "toy")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = fresh_process.run(HERE / "train_with_toy_engine.py", environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "toy trained 2 forwards; auto selects toy"


WITHOUT_ONNX = """
import sys
sys.modules["onnx"] = sys.modules["onnxruntime"] = None
from optimum_memopt import MemOptOptions
from optimum_memopt.distributed import facts
from optimum_memopt.engines.shared.registry import create
from optimum_memopt.engines.shared.registry import engine_names, factory
from optimum_memopt.options import resolve

MemOptOptions(memory_opt_config="Gelu+:1:-1").check()
resolved = resolve(MemOptOptions(memory_opt_engine="compile", memory_opt_config="Gelu+:1:-1"))
print(create(resolved).name, facts("compile", resolved.options)["engine"])
print(*[ability.what for name in engine_names() for ability in factory(name).environment_report().abilities[:1]])
"""


def test_the_compile_engine_needs_neither_onnx_nor_onnxruntime():
    done = fresh_process.run("-c", WITHOUT_ONNX)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["compile compile", "ort engine compile engine"]
