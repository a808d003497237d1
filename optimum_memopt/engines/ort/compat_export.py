"""Private names of torch's TorchScript exporter and of ORT's export, patched for the time of one export."""

import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator

import torch

from optimum_memopt.engines.ort.compat import ORTMODULE, TORCHSCRIPT, moved_torch_names, patched


def export_arguments() -> dict[str, bool]:
    """Arguments that ORT has to pass to `torch.onnx.export`: dynamo=True is the default since torch 2.9, and its
    graphs lack the names and dynamic axes that ORTModule relies on (pytorch PR 162726)."""
    return {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}


@contextlib.contextmanager
def record_autograd_functions() -> Iterator[list[str]]:
    """Record which `torch.autograd.Function`s are applied, except ORT's own, which wrap every model.

    Without the extensions an export inlines them and silently drops a backward that is not the derivative of the
    forward.
    """
    seen: list[str] = []
    original = torch.autograd.Function.__dict__["apply"]
    thread = threading.get_ident()

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        if (
            threading.get_ident() == thread
            and not cls.__module__.startswith("onnxruntime.")
            and cls.__qualname__ not in seen
        ):
            seen.append(cls.__qualname__)
        return original.__get__(None, cls)(*args, **kwargs)

    with patched(torch.autograd.Function, "apply", classmethod(apply)):
        yield seen


@contextlib.contextmanager
def register_symbolics(opset: int, custom_functions: bool = True) -> Iterator[None]:
    """Register ORT's ONNX symbolics inside the context only.

    Every ORTModule() registers them for the whole process, which would leave ATen and com.microsoft operators in a
    user's own `torch.onnx.export`.

    Args:
        opset: of the export.
        custom_functions: also the symbolic for a torch.autograd.Function, which is inlined otherwise.
    """
    contrib = importlib.import_module("onnxruntime.tools.pytorch_export_contrib_ops")
    registry = importlib.import_module(f"{ORTMODULE}._custom_op_symbolic_registry").CustomOpSymbolicRegistry
    functions = importlib.import_module(f"{ORTMODULE}._custom_autograd_function")
    exporter = importlib.import_module(f"{ORTMODULE}._custom_autograd_function_exporter")
    with moved_torch_names():
        try:
            contrib.register()
            registry.register_all(opset)
            if custom_functions and functions.custom_autograd_function_enabler.state:
                torch.onnx.register_custom_op_symbolic("prim::PythonOp", exporter._export, 1)
            yield
        finally:
            contrib.unregister()
            for name in registry._SYMBOLICS:
                torch.onnx.unregister_custom_op_symbolic(name, opset)
            torch.onnx.unregister_custom_op_symbolic("prim::PythonOp", 1)


def symbolic_names() -> tuple[str, ...]:
    """Operators with a symbolic of ORT's; they depend on the extensions and on variables read at ORT's import."""
    registry = importlib.import_module(f"{ORTMODULE}._custom_op_symbolic_registry").CustomOpSymbolicRegistry
    return tuple(sorted(registry._SYMBOLICS))


@contextlib.contextmanager
def keep_output_visible() -> Iterator[None]:
    """Keep stdout and stderr visible during an export.

    To hide messages of the exporter, ORT redirects both to a temporary file for the whole process (_logger.py,
    `SuppressLogs`): progress bars, output of other threads and every log line are lost. The exporter's messages are
    Python warnings today.
    """
    logger = importlib.import_module(f"{ORTMODULE}._logger")
    with patched(logger, "_suppress_os_stream_output", lambda **_: contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def observe_traced_graphs(observe: Callable[[object], None]) -> Iterator[None]:
    """Call `observe` with each graph (`torch.Graph`) that `torch.onnx.export` has traced, before it converts the graph
    (torch 2.9 to 2.13, torchscript_exporter/utils.py, `_create_jit_graph`)."""
    utils = importlib.import_module(f"{TORCHSCRIPT}.utils")
    original = utils._trace_and_get_graph_from_model

    def trace(*args: object, **kwargs: object) -> object:
        graph, outputs = original(*args, **kwargs)
        observe(graph)
        return graph, outputs

    with patched(utils, "_trace_and_get_graph_from_model", trace):
        yield
