"""A subprocess leaves out each patch, and must then fail with the error that the patch prevents."""

import os

import pytest
import torch

from optimum_memopt.engines.ort.compat import internals, ortmodule
from tests import fresh_process
from tests.ort.compat_models import Twice
from tests.ort.helpers import needs_ort
from tests.rotation import nightly

pytestmark = needs_ort

SETUP = """
import contextlib, importlib, os, sys, types
import torch
from optimum_memopt.engines.ort.compat import internals, ortmodule
from optimum_memopt.errors import UnsupportedModelError
from tests.ort.compat_models import Words, custom, image, train, words
"""

WITHOUT_SWITCH = """
environment = ortmodule.environment
ortmodule.environment = lambda variables: environment(
    {name: value for name, value in variables.items() if name != "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD"}
)
"""
# Applies the patch and then restores one of its changes.
WITHOUT_ATEN = """
run = ortmodule._run_without_extensions
def run_but_load_aten():
    session = importlib.import_module(ortmodule.ORTMODULE + "._graph_execution_manager")
    load = session.load_aten_op_executor_cpp_extension
    run()
    session.load_aten_op_executor_cpp_extension = load
ortmodule._run_without_extensions = run_but_load_aten
"""
WITHOUT_GATHER = """
run = ortmodule._run_without_extensions
def run_but_keep_symbolics():
    registry = importlib.import_module(ortmodule.ORTMODULE + "._custom_op_symbolic_registry").CustomOpSymbolicRegistry
    symbolics = dict(registry._SYMBOLICS)
    run()
    registry._SYMBOLICS.update(symbolics)
ortmodule._run_without_extensions = run_but_keep_symbolics
"""
WITHOUT_RESET = """
class Keeping(types.ModuleType):
    def __setattr__(self, name, value):
        if name != "_FALLBACK_INIT_EXCEPTION" or value is not None:
            super().__setattr__(name, value)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == ortmodule.ORTMODULE + ".ortmodule":  # the last import of the package
            sys.modules[ortmodule.ORTMODULE].__class__ = Keeping

sys.meta_path.insert(0, Finder())
"""

BREAKS = {
    "jit_utils": (
        "del ortmodule.MOVED_MODULES['torch.onnx._internal.jit_utils']; words()",
        "ImportError: cannot import name 'jit_utils' from 'torch.onnx._internal'",
    ),
    "nvtx": ("ortmodule._silence_missing_nvtx = lambda: None; words()", "RuntimeError: NVTX functions not installed"),
    "export": (
        "internals.EXPORT_ARGUMENTS = {}; words()",
        f"torch{os.sep}onnx{os.sep}_internal{os.sep}exporter{os.sep}",
    ),
    "type_utils": (
        "del ortmodule.MOVED_MODULES['torch.onnx._type_utils']; words()",
        "ImportError: cannot import name '_type_utils' from 'torch.onnx'",
    ),
    "globals": (
        f"{WITHOUT_SWITCH}del ortmodule.MOVED_MODULES['torch.onnx._globals']; custom()",
        "cannot import name '_globals' from 'torch.onnx'",
    ),
    "convolution": (
        "ortmodule.MOVED_NAMES = {'torch.onnx.symbolic_opset9': ('_convolution_mode',)}; image()",
        "ImportError: cannot import name '_convolution' from 'torch.onnx.symbolic_opset9'",
    ),
    "convolution_mode": (
        "ortmodule.MOVED_NAMES = {'torch.onnx.symbolic_opset9': ('_convolution',)}; image()",
        "ImportError: cannot import name '_convolution_mode' from 'torch.onnx.symbolic_opset9'",
    ),
    "stub": (
        "ortmodule._provide_extensions = lambda: False; words()",
        "ImportError: cannot import name 'torch_interop_utils'",
    ),
    "autograd_switch": (f"{WITHOUT_SWITCH}custom()", "forward_runner_ was false"),
    "aten": (f"{WITHOUT_ATEN}words()", "ImportError: cannot import name 'aten_op_executor'"),
    "embedding": (f"{WITHOUT_GATHER}words()", "ONNX Runtime can only run with the torch extensions"),
    "init_exception": (f"{WITHOUT_RESET}words()", "ORTModule's extensions were not detected"),
}


def run(tmp_path, body, first_on_path=""):
    """Returns the exit code and the output of a process without the built extensions."""
    environment = {**os.environ, "OPTIMUM_MEMOPT_CACHE": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(first_on_path), os.environ.get("PYTHONPATH"))))
    done = fresh_process.run("-c", SETUP + body, environment=environment, cwd=tmp_path, timeout=120)
    return done.returncode, done.stdout + done.stderr


def succeed(tmp_path, body, **options):
    code, output = run(tmp_path, body, **options)
    assert code == 0, output
    return output


# Each patch is still needed; the tests below check that the patches work.
@pytest.mark.parametrize("without, message", nightly(BREAKS.values(), but=[BREAKS["jit_utils"]]), ids=BREAKS)
def test_what_breaks_without_the_patch(tmp_path, without, message):
    if "NVTX" in message and torch.cuda.is_available():
        pytest.skip("this torch has NVTX")
    code, output = run(tmp_path, without)
    assert code == 1, output
    assert message in output


SCRIPTS = {
    "with all patches models train and nothing outside is changed": """
import torch.onnx.symbolic_opset9, torch.utils.checkpoint
owners = (
    (torch, "manual_seed"),
    (torch.cuda, "manual_seed"),
    (torch.utils.checkpoint, "checkpoint"),
    (torch.onnx, "export"),
    (torch.autograd.Function, "apply"),
)
seen = [vars(owner)[name] for owner, name in owners]
variables = dict(os.environ)
names = set(vars(torch.onnx)), set(vars(torch.onnx._internal)), set(vars(torch.onnx.symbolic_opset9))

words(), image()
try:
    custom()
except UnsupportedModelError as error:
    assert "uses torch.autograd.Function (Twice)" in str(error)
else:
    raise AssertionError("not refused")
loaded = ortmodule.load()
assert loaded is ortmodule.load()
assert not loaded[1]

assert [vars(owner)[name] for owner, name in owners] == seen
assert dict(os.environ) == variables
assert not {"torch.onnx._internal.jit_utils", "torch.onnx._type_utils", "torch.onnx._globals"} & set(sys.modules)
assert not {"_type_utils", "_globals"} & (set(vars(torch.onnx)) - names[0])
assert "jit_utils" not in vars(torch.onnx._internal)
assert set(vars(torch.onnx.symbolic_opset9)) == names[2]
assert "deepspeed" not in sys.modules
""",
    "what the import replaces when it is not undone": """
import torch.utils.checkpoint
ortmodule._undo_replacements = contextlib.nullcontext
before = torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint
ortmodule.load()
now = torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint
assert not any(old is new for old, new in zip(before, now))
""",
    "names that torch has itself are left alone": """
import torch.onnx.symbolic_opset9 as symbolics
theirs = types.ModuleType("torch.onnx._globals")
sys.modules["torch.onnx._globals"] = torch.onnx._globals = theirs
symbolics._convolution = mine = object()
with ortmodule.moved_torch_names():
    assert sys.modules["torch.onnx._globals"] is torch.onnx._globals is theirs
    assert symbolics._convolution is mine
    from torch.onnx import _type_utils
    from torch.onnx.symbolic_opset9 import _convolution_mode
assert sys.modules["torch.onnx._globals"] is torch.onnx._globals is theirs
assert symbolics._convolution is mine and not hasattr(symbolics, "_convolution_mode")

pushed = []
torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = pushed.append, lambda: None
words()
assert "optimum_memopt" in pushed and len(pushed) > 1, "ORT's own calls reach an NVTX that works"
""",
    "a user's own export stays plain ONNX": """
import io, onnx

class Largest(torch.nn.Module):
    def forward(self, x):
        return x.argmax(-1)

def domains():
    file = io.BytesIO()
    torch.onnx.export(Largest(), (torch.rand(2, 3),), file, dynamo=False, opset_version=17)
    return {node.domain for node in onnx.load_from_string(file.getvalue()).graph.node}

before = domains()
words()
assert domains() == before
with internals.register_symbolics(17):
    assert domains() - before == {"org.pytorch.aten"}, "or there is nothing to undo"
assert domains() == before
""",
    "checkpointing of a deepspeed in use is restored": """
import deepspeed
module, before = sys.modules["deepspeed"], deepspeed.checkpointing.checkpoint
ortmodule.load()
assert deepspeed.checkpointing.checkpoint is before
assert sys.modules["deepspeed"] is module
""",
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_the_patches_one_by_one(tmp_path, what):
    if "deepspeed" in what:
        pytest.importorskip("deepspeed")
    succeed(tmp_path, SCRIPTS[what])


each_way = pytest.mark.parametrize("with_patch", nightly([True, False], but=[True]))


@each_way
def test_deepspeed_is_imported_only_without_the_patch(tmp_path, with_patch):
    (tmp_path / "deepspeed.py").write_text("import sys; print('deepspeed was imported', file=sys.__stdout__)")
    without = "" if with_patch else "ortmodule._block_deepspeed_import = contextlib.nullcontext\n"
    output = succeed(tmp_path, without + "words(); print('trained'); import deepspeed", first_on_path=tmp_path)
    before, after = output.split("trained")
    assert ("deepspeed was imported" in before) is not with_patch
    assert ("deepspeed was imported" in after) is with_patch, "a user's own import must still work"


@each_way
def test_logging_and_the_path_are_the_user_s_with_the_patch(tmp_path, with_patch):
    without = "" if with_patch else "ortmodule._preserve_logging_and_path = contextlib.nullcontext\n"
    output = succeed(
        tmp_path,
        f"""
{without}
import logging
ortmodule.load()
print("path", [entry for entry in sys.path if "onnxruntime" in entry] == [])
logging.basicConfig(level=logging.INFO, format="mine: %(message)s", stream=sys.stdout)
logging.getLogger("mine").info("said")
""",
    )
    assert ("mine: said" in output) is with_patch
    assert (f"path {True}" in output) is with_patch


@each_way
def test_output_during_an_export_is_seen_with_the_patch(tmp_path, with_patch):
    without = "" if with_patch else "internals.keep_output_visible = contextlib.nullcontext\n"
    output = succeed(
        tmp_path,
        f"""
{without}
class Speaking(Words):
    def forward(self, ids):
        if torch.onnx.is_in_onnx_export():
            os.write(1, b"exporting")
        return super().forward(ids)

train(Speaking(), torch.arange(10).reshape(2, 5))
""",
    )
    assert ("exporting" in output) is with_patch


def test_environment_is_restored_even_after_an_error(monkeypatch):
    monkeypatch.setenv("MEMOPT_SET", "mine")
    monkeypatch.delenv("MEMOPT_UNSET", raising=False)
    with pytest.raises(KeyError), ortmodule.environment({"MEMOPT_SET": "theirs", "MEMOPT_UNSET": "1"}):
        assert (os.environ["MEMOPT_SET"], os.environ["MEMOPT_UNSET"]) == ("theirs", "1")
        raise KeyError
    assert os.environ["MEMOPT_SET"] == "mine"
    assert "MEMOPT_UNSET" not in os.environ


def test_autograd_functions_are_recorded_once_each_and_still_run():
    original = torch.autograd.Function.__dict__["apply"]
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(KeyError), internals.record_autograd_functions() as seen:
        Twice.apply(Twice.apply(x)).sum().backward()
        raise KeyError
    assert seen == ["Twice"]
    assert x.grad.tolist() == [9.0, 9.0]
    assert torch.autograd.Function.__dict__["apply"] is original
