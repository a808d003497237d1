"""Loads the built extensions twice, without importing onnxruntime."""

import sys

from optimum_memopt.engines.ort.compat import extensions

loaded = extensions.load(extensions.find())
assert extensions.load(extensions.find()) == loaded
parent = "onnxruntime.training.ortmodule.torch_cpp_extensions"
assert loaded == {name: sys.modules[f"{parent}.{name}"] for name in extensions.NAMES}
assert "onnxruntime" not in sys.modules
assert loaded["aten_op_executor"].execute_aten_operator_address() != 0
assert loaded["torch_interop_utils"].get_custom_function_backward_runner() != 0
