import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import optimum_memopt

HEAVY = ("onnxruntime", "onnx", "deepspeed", "datasets")


def imported(statements):
    """Which of the heavy packages a fresh process has imported after these statements."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{statements}\nprint(*[name for name in {HEAVY} if name in sys.modules])"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(done.stdout.split())


def typed_imports():
    """Name to module, of the imports that a type checker sees."""
    tree = ast.parse(Path(optimum_memopt.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names}


def test_a_type_checker_sees_the_names_that_a_running_interpreter_finds():
    assert typed_imports() == {name: f"optimum_memopt.{module}" for name, module in optimum_memopt._MODULES.items()}
    assert sorted(typed_imports()) == optimum_memopt.__all__


def test_the_version_is_the_installed_one():
    assert optimum_memopt.__version__ == importlib.metadata.version("optimum-memopt")
    assert re.match(r"\d+\.\d+", optimum_memopt.__version__)
    assert "__version__" in dir(optimum_memopt)


@pytest.mark.parametrize("name", optimum_memopt.__all__)
def test_every_public_name_is_there(name):
    value = getattr(optimum_memopt, name)
    assert value.__name__ == name
    assert value.__module__.startswith("optimum_memopt.")
    assert value.__doc__
    assert name in dir(optimum_memopt)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        optimum_memopt.no_such_name  # noqa: B018
    with pytest.raises(ImportError):
        exec("from optimum_memopt import no_such_name")


def test_importing_the_package_imports_next_to_nothing():
    packages = "[name for name in ('torch', 'transformers', 'sympy') if name in sys.modules]"
    assert imported(f"import optimum_memopt\nassert not {packages}") == set()


@pytest.mark.end_to_end
def test_no_module_imports_what_transformers_does_not():
    modules = ["optimum_memopt", *(f"optimum_memopt.{module}" for module in set(optimum_memopt._MODULES.values()))]
    modules += ["optimum_memopt.engines.ort", "optimum_memopt.engines.ort.compat"]
    plain = imported("import transformers; from transformers import Trainer, TrainingArguments")
    assert "onnxruntime" not in plain
    assert imported("\n".join(f"import {module}" for module in sorted(modules))) <= plain


def test_plans_need_neither_torch_nor_transformers():
    statements = "import optimum_memopt.plans.grammar, optimum_memopt.plans.table"
    assert imported(f"{statements}\nassert not {{'torch', 'transformers'}} & set(sys.modules)") == set()


def test_modules_of_the_names_exist():
    for module in set(optimum_memopt._MODULES.values()):
        importlib.import_module(f"optimum_memopt.{module}")
