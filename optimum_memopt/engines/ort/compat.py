"""Imports ONNX Runtime's ORTModule on a torch that it was not made for, and touches nobody else's torch for it.

onnxruntime-training 1.19.2 is the last release and was made for torch 2.4. Each mend below is applied where its break
is found (never by version), says what breaks without it, and is limited to ORT's own modules or undone afterwards.
The names of torch and of ORT's import that are private live here; those of ORT's running session in `session.py`.
"""

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.utils.checkpoint

from optimum_memopt.engines.ort import extensions
from optimum_memopt.installed import installed_version

ORTMODULE = "onnxruntime.training.ortmodule"
EXTENSIONS_PACKAGE = f"{ORTMODULE}.torch_cpp_extensions"
_TORCHSCRIPT = "torch.onnx._internal.torchscript_exporter"

# torch 2.9 moved the TorchScript exporter's modules (pytorch PR 161323) and ORT imports them from their old places:
# without these, `import onnxruntime.training.ortmodule` fails with ModuleNotFoundError.
MOVED_MODULES = {
    "torch.onnx._internal.jit_utils": f"{_TORCHSCRIPT}.jit_utils",
    "torch.onnx._type_utils": f"{_TORCHSCRIPT}._type_utils",
    "torch.onnx._globals": f"{_TORCHSCRIPT}._globals",
}
# The same move dropped private names from the public module, which ORT's symbolic for convolutions reads (ViT).
MOVED_NAMES = {"torch.onnx.symbolic_opset9": ("_convolution", "_convolution_mode")}

# What importing ortmodule replaces for the whole process (ortmodule/__init__.py, lines 120 and 215).
_REPLACED_BY_IMPORT = (
    ("torch", "manual_seed"),
    ("torch.cuda", "manual_seed"),
    ("torch.utils.checkpoint", "checkpoint"),
    ("deepspeed.runtime.activation_checkpointing.checkpointing", "checkpoint"),
)


@dataclass(frozen=True)
class Imported:
    """ORT's package as mended; `has_extensions` tells whether its C++ extensions for torch are loaded."""

    ortmodule: types.ModuleType
    has_extensions: bool


_imported: Imported | None = None
# One thread at a time changes what is the whole process': environment, ORT's classes, torch.onnx' registry, warnings.
_lock = threading.RLock()


def load() -> Imported:
    """Import `onnxruntime.training.ortmodule` with every mend it needs here; later calls return the first's.

    Raises:
        ImportError: onnxruntime-training is not installed.
    """
    global _imported
    with _lock:
        if _imported is None:
            _imported = _load()
        return _imported


def runs_on_gpus() -> bool:
    """Whether the installed ONNX Runtime has a provider for GPUs."""
    # The CPU build says so in its name, and needs no import for it.
    if installed_version(("onnxruntime-training-cpu",)) is not None:
        return False
    load()
    providers = importlib.import_module("onnxruntime").get_available_providers()
    return bool({"CUDAExecutionProvider", "ROCMExecutionProvider"} & set(providers))


def _load() -> Imported:
    has_extensions = _provide_extensions()
    # Each model has its own levers; these two would decide for the whole process.
    switches = {
        **dict.fromkeys(("ORTMODULE_USE_EFFICIENT_ATTENTION", "ORTMODULE_USE_FLASH_ATTENTION")),
        "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": str(int(has_extensions)),
    }
    # The package onnxruntime.training imports ortmodule too, and swallows its ImportError: nothing of it comes before.
    with (
        torch_names(),
        environment(switches),
        _replacements_undone(),
        _logging_and_path_left_alone(),
        _deepspeed_not_imported(),
    ):
        ortmodule = importlib.import_module(ORTMODULE)
        # ORT imports these later: the first reads the switch then, the second imports deepspeed and warns without it.
        importlib.import_module(f"{ORTMODULE}._custom_autograd_function")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("onnxruntime.training.utils.hooks")
    _silence_missing_nvtx()
    # Set by the import because no compiled file lies in ORT's own folder; every ORTModule() would raise it again.
    ortmodule._FALLBACK_INIT_EXCEPTION = None
    if not has_extensions:
        _run_without_extensions()
    return Imported(ortmodule, has_extensions)


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables, None for one that is not set, for the time of a call into ORT, which reads its options
    nowhere else.

    Every call into ORT that changes something global is made within this, and it lets in one thread at a time: a
    thread that trains waits while another builds its session.
    """
    with _lock:
        before = {name: os.environ.get(name) for name in variables}
        try:
            _set_environment(variables)
            yield
        finally:
            _set_environment(before)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def torch_names() -> Iterator[None]:
    """torch's moved names at their old places, for the time that ORT imports or exports; only the missing ones."""
    added: list[tuple[types.ModuleType, str]] = []
    aliased: list[str] = []
    for old, new in MOVED_MODULES.items():
        if old in sys.modules or importlib.util.find_spec(new.rpartition(".")[0]) is None:
            continue
        sys.modules[old] = importlib.import_module(new)
        aliased.append(old)
        parent, _, leaf = old.rpartition(".")
        added.extend(_add(importlib.import_module(parent), leaf, sys.modules[old]))
    for module, names in MOVED_NAMES.items():
        source = f"{_TORCHSCRIPT}.{module.rpartition('.')[2]}"
        if importlib.util.find_spec(_TORCHSCRIPT) is not None:
            for name in names:
                added.extend(
                    _add(importlib.import_module(module), name, getattr(importlib.import_module(source), name))
                )
    try:
        yield
    finally:
        for owner, name in added:
            delattr(owner, name)
        for old in aliased:
            del sys.modules[old]


def _add(owner: types.ModuleType, name: str, value: object) -> list[tuple[types.ModuleType, str]]:
    if hasattr(owner, name):
        return []
    setattr(owner, name, value)
    return [(owner, name)]


def export_arguments() -> dict[str, bool]:
    """Arguments that ORT has to add to `torch.onnx.export`: since torch 2.9 dynamo=True is the default, and its graphs
    lack the names and dynamic axes that ORTModule relies on (pytorch PR 162726)."""
    return {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}


def _silence_missing_nvtx() -> None:
    """torch's NVTX stub raises ("NVTX functions not installed") on builds without CUDA; ORT calls it unasked."""
    try:
        torch.cuda.nvtx.range_push("optimum_memopt")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        profile = importlib.import_module("onnxruntime.training.utils.torch_profile_utils")
        profile.torch_nvtx_range_push = lambda message: None
        profile.torch_nvtx_range_pop = lambda: None


def _provide_extensions() -> bool:
    """Load the built extensions; where there are none, put a stand-in in the place that ORT imports from."""
    built = extensions.find()
    if built is not None:
        extensions.load(built)
        return True
    stand_in = types.ModuleType(f"{EXTENSIONS_PACKAGE}.torch_interop_utils")
    stand_in.clear_all_grad_fns = lambda: None
    stand_in.get_custom_function_forward_runner = stand_in.get_custom_function_backward_runner = lambda: 0
    sys.modules[stand_in.__name__] = stand_in
    return False


def _run_without_extensions() -> None:
    """ORT refuses to start without its extensions, although ordinary models ask nothing of them."""
    session = importlib.import_module(f"{ORTMODULE}._graph_execution_manager")
    session.load_aten_op_executor_cpp_extension = lambda: None
    # This symbolic makes embeddings an ATen call, which the extension would run; without it they export as Gather.
    registry = importlib.import_module(f"{ORTMODULE}._custom_op_symbolic_registry").CustomOpSymbolicRegistry
    registry._SYMBOLICS.pop("::embedding", None)


@contextlib.contextmanager
def _replacements_undone() -> Iterator[None]:
    """Give back what the import replaces: seeds are passed on by the engine, checkpointing is refused with it."""
    before = [
        (sys.modules[module], name, getattr(sys.modules[module], name))
        for module, name in _REPLACED_BY_IMPORT
        if module in sys.modules and hasattr(sys.modules[module], name)
    ]
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextlib.contextmanager
def _logging_and_path_left_alone() -> Iterator[None]:
    """The import calls `logging.basicConfig` (onnxruntime/tools/logger.py), after which a user's own does nothing,
    and appends to `sys.path` a folder with modules like `utils` (tools/ort_format_model/__init__.py), where an import
    that should fail would find them.
    """
    root = logging.getLogger()
    handlers, level, path = list(root.handlers), root.level, list(sys.path)
    try:
        yield
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)
        sys.path[:] = [entry for entry in sys.path if entry in path or f"{os.sep}onnxruntime{os.sep}" not in entry]


@contextlib.contextmanager
def _deepspeed_not_imported() -> Iterator[None]:
    """ORT imports deepspeed only to replace its checkpoint function, and is prepared for its absence; the import takes
    seconds and starts DeepSpeed's accelerator detection in runs that do not use it."""
    if "deepspeed" in sys.modules:
        yield
        return
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["deepspeed"]


@contextlib.contextmanager
def recorded_autograd_functions() -> Iterator[list[str]]:
    """The `torch.autograd.Function`s applied meanwhile, but for ORT's own, which it puts around every model: an export
    without the extensions inlines them, and a backward that is not the derivative of its forward would be lost without
    a word."""
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

    with replaced(torch.autograd.Function, "apply", classmethod(apply)):
        yield seen


@contextlib.contextmanager
def symbolics(opset: int, custom_functions: bool = True) -> Iterator[None]:
    """ORT's ONNX symbolics, for the time of an export, with `custom_functions` also that of a torch.autograd.Function,
    which otherwise is inlined. Every ORTModule() registers them for the whole process, which
    would leave a user's own `torch.onnx.export` with ATen and com.microsoft operators in it."""
    contrib = importlib.import_module("onnxruntime.tools.pytorch_export_contrib_ops")
    registry = importlib.import_module(f"{ORTMODULE}._custom_op_symbolic_registry").CustomOpSymbolicRegistry
    functions = importlib.import_module(f"{ORTMODULE}._custom_autograd_function")
    exporter = importlib.import_module(f"{ORTMODULE}._custom_autograd_function_exporter")
    with torch_names():
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
    """Operators that ORT exports in its own way; they depend on the extensions and on variables read at its import."""
    registry = importlib.import_module(f"{ORTMODULE}._custom_op_symbolic_registry").CustomOpSymbolicRegistry
    return tuple(sorted(registry._SYMBOLICS))


@contextlib.contextmanager
def output_not_captured() -> Iterator[None]:
    """For the time of an export ORT sends the process' stdout and stderr to a temporary file, against messages of the
    exporter (_logger.py, `SuppressLogs`); lost with them are a progress bar, other threads' output and every line that
    is logged meanwhile. The exporter's messages are Python warnings since."""
    logger = importlib.import_module(f"{ORTMODULE}._logger")
    with replaced(logger, "_suppress_os_stream_output", lambda **_: contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def traced_graphs_shown(show: Callable[[object], None]) -> Iterator[None]:
    """Calls `show` with each graph (`torch.Graph`) that `torch.onnx.export` has traced, before it goes on with it
    (torch 2.9 to 2.13, torchscript_exporter/utils.py, `_create_jit_graph`)."""
    utils = importlib.import_module(f"{_TORCHSCRIPT}.utils")
    original = utils._trace_and_get_graph_from_model

    def trace(*args: object, **kwargs: object) -> object:
        graph, outputs = original(*args, **kwargs)
        show(graph)
        return graph, outputs

    with replaced(utils, "_trace_and_get_graph_from_model", trace):
        yield


@contextlib.contextmanager
def replaced(owner: type | types.ModuleType, name: str, value: object) -> Iterator[None]:
    """An attribute of a class or module for the time of a call, given back as it was (also a staticmethod)."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
