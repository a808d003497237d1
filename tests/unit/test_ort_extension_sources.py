"""Source substitutions, applied to the sources of the installed wheel."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from optimum_memopt.engines.ort.compat import extensions, installation
from optimum_memopt.engines.ort.compat.extensions import SUBSTITUTIONS, Substitution, patch_source, substitute
from optimum_memopt.errors import MemOptError

needs_wheel = pytest.mark.skipif(installation.onnxruntime_dir() is None, reason="no onnxruntime-training")
GREETING = Substitution("a.cc", "hello", "good day")


def patched_sources() -> str:
    files = [path for name in extensions.NAMES for path in (extensions.sources_dir() / name).glob("*.[ch]*")]
    texts = [patch_source(f"{path.parent.name}/{path.name}", path.read_text()) for path in files]
    return re.sub(r"//.*", "", "\n".join(texts))


@needs_wheel
def test_every_substitution_finds_its_text_in_the_wheel():
    for substitution in SUBSTITUTIONS:
        original = (extensions.sources_dir() / substitution.file).read_text()
        assert substitution.new in substitute(original, substitution)


@needs_wheel
def test_nothing_that_torch_hides_or_changed_is_left():
    left = patched_sources()
    assert "custom_function_forward_runner" in left
    for gone in ("torch::utils::tensor_fromDLPack", "autograd::PyNode", "std::shared_ptr<torch::autograd", ".lock()"):
        assert gone not in left


@pytest.mark.parametrize(
    "symbol", ["_ZN5torch5utils18tensor_fromDLPackEP7_object", "_ZTIN5torch8autograd6PyNodeE"], ids=["dlpack", "node"]
)
def test_torch_hides_what_the_original_sources_need(symbol):
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    assert hasattr(library, "THPFunctionType")
    assert not hasattr(library, symbol)


@pytest.mark.parametrize("text, found", [("", 0), ("hello hello", 2)])
def test_sources_that_are_not_as_expected_are_refused(text, found):
    with pytest.raises(MemOptError, match=f"a.cc: expected once, found {found} times: `hello`"):
        substitute(text, GREETING)


def test_a_pattern_is_replaced_whole_and_its_replacement_taken_literally():
    pattern = Substitution("a.cc", re.compile(r"int f\(.*?\n}\n", re.DOTALL), r"\1 \n")
    assert substitute("int f(\n) {\n}\nint g;\n", pattern) == "\\1 \\nint g;\n"
