import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import optimum_memopt
from tests.rotation import in_turn

HEAVY = ("onnxruntime", "onnx", "deepspeed", "datasets")


def imported(statements):
    """Returns the heavy packages that a new process has imported after these statements."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{statements}\nprint(*[name for name in {HEAVY} if name in sys.modules])"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(done.stdout.split())


def typed_imports():
    """Returns the modules of the names that a type checker sees as imports, by name."""
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


MODULES = sorted({f"optimum_memopt.{module}" for module in optimum_memopt._MODULES.values()})
PLAIN = "transformers, as a script imports it"
# Modules that a process imports in order, and modules that must not be imported by that, unless by transformers
# itself: PEFT imports bitsandbytes if it is installed, which compiles functions.
STEPS = {
    PLAIN: (["transformers.trainer", "transformers.training_args"], {"onnxruntime"}),
    "engines": (
        ["optimum_memopt.engines.shared.registry"],
        {"onnxruntime", "torch._inductor.compile_fx", "torch._functorch.partitioners"},
    ),
    "optimizers": (["optimum_memopt.engines.shared.optimizers"], {"onnxruntime", "deepspeed"}),
    "callbacks": (
        ["optimum_memopt.callbacks.memory_phases", "optimum_memopt.callbacks.input_density"],
        {"onnxruntime", "deepspeed"},
    ),
    "all": ([*MODULES, "optimum_memopt.engines.ort", "optimum_memopt.engines.ort.compat.ortmodule"], {"onnxruntime"}),
}


@pytest.fixture(scope="module")
def imported_so_far():
    lines = ["import json, sys", "found = {}"]
    for step, (modules, _) in STEPS.items():
        lines += [*(f"import {module}" for module in modules), f"found[{step!r}] = sorted(sys.modules)"]
    script = "\n".join([*lines, "print(json.dumps(found))"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    return {step: set(names) for step, names in json.loads(done.stdout.splitlines()[-1]).items()}


@in_turn
@pytest.mark.parametrize("step", STEPS)
def test_what_a_part_of_the_package_does_not_import(imported_so_far, step):
    modules, others = STEPS[step]
    assert set(modules) <= imported_so_far[step]
    by_transformers = set() if step == PLAIN else imported_so_far[PLAIN]
    assert not others & (imported_so_far[step] - by_transformers)


def test_no_module_imports_what_transformers_does_not(imported_so_far):
    assert set(HEAVY) & imported_so_far["all"] <= imported_so_far[PLAIN]


def test_plans_need_neither_torch_nor_transformers():
    statements = "import optimum_memopt.plans.grammar, optimum_memopt.plans.table"
    assert imported(f"{statements}\nassert not {{'torch', 'transformers'}} & set(sys.modules)") == set()


@in_turn
def test_a_prediction_needs_no_trainer():
    statements = "import optimum_memopt.commands.plan, optimum_memopt.engines.compile.predict.estimate"
    assert imported(f"{statements}\nassert not {{'transformers.trainer', 'peft'}} & set(sys.modules)") == set()
