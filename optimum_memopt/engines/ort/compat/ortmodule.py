"""Imports ONNX Runtime's ORTModule on a torch that it was not built for, without changing torch for other code.

onnxruntime-training 1.19.2 is the last release and was built for torch 2.4. Each patch in this folder is applied only
if it is needed (never by version), documents what breaks without it, and is limited to ORT's own modules or undone
afterwards.
"""

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping

import torch
import torch.utils.checkpoint

from optimum_memopt.compat.installed import installed_version
from optimum_memopt.engines.ort.compat import extensions

ORTMODULE = "onnxruntime.training.ortmodule"
TORCHSCRIPT = "torch.onnx._internal.torchscript_exporter"

# torch 2.9 moved the TorchScript exporter's modules (pytorch PR 161323), and ORT imports them under their old names:
# without these aliases, `import onnxruntime.training.ortmodule` fails with ModuleNotFoundError.
MOVED_MODULES = {
    "torch.onnx._internal.jit_utils": f"{TORCHSCRIPT}.jit_utils",
    "torch.onnx._type_utils": f"{TORCHSCRIPT}._type_utils",
    "torch.onnx._globals": f"{TORCHSCRIPT}._globals",
}
# The same move dropped private names from the public module that ORT's symbolic for convolutions reads (ViT).
MOVED_NAMES = {"torch.onnx.symbolic_opset9": ("_convolution", "_convolution_mode")}

# Functions that the import of ortmodule replaces for the whole process (ortmodule/__init__.py, lines 120 and 215).
_REPLACED_BY_IMPORT = (
    ("torch", "manual_seed"),
    ("torch.cuda", "manual_seed"),
    ("torch.utils.checkpoint", "checkpoint"),
    ("deepspeed.runtime.activation_checkpointing.checkpointing", "checkpoint"),
)


# Guards process-wide state: the environment, ORT's classes, the registry of torch.onnx, warnings.
_lock = threading.RLock()


def load() -> tuple[types.ModuleType, bool]:
    """Import `onnxruntime.training.ortmodule` once, with all patches that it needs here.

    Returns:
        The package, and whether its C++ extensions for torch are loaded.

    Raises:
        ImportError: onnxruntime-training is not installed.
    """
    with _lock:
        return _load()


def runs_on_gpus() -> bool:
    # The CPU build is recognized by its package name, without an import.
    if installed_version(("onnxruntime-training-cpu",)) is not None:
        return False
    load()
    providers = importlib.import_module("onnxruntime").get_available_providers()
    return bool({"CUDAExecutionProvider", "ROCMExecutionProvider"} & set(providers))


@functools.cache
def _load() -> tuple[types.ModuleType, bool]:
    has_extensions = _provide_extensions()
    # Options are per model, but ORT reads the first two variables at import, for the whole process.
    switches = {
        **dict.fromkeys(("ORTMODULE_USE_EFFICIENT_ATTENTION", "ORTMODULE_USE_FLASH_ATTENTION")),
        "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": str(int(has_extensions)),
    }
    # onnxruntime.training also imports ortmodule, and swallows its ImportError: import no part of it earlier.
    with (
        moved_torch_names(),
        environment(switches),
        _undo_replacements(),
        _preserve_logging_and_path(),
        _block_deepspeed_import(),
    ):
        ortmodule = importlib.import_module(ORTMODULE)
        # ORT would import these two modules later: the first reads the switch at import, the second imports deepspeed,
        # and warns if it is missing.
        importlib.import_module(f"{ORTMODULE}._custom_autograd_function")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("onnxruntime.training.utils.hooks")
    _silence_missing_nvtx()
    # The import sets this error because ORT's own folder has no compiled extensions; every ORTModule() would raise it.
    ortmodule._FALLBACK_INIT_EXCEPTION = None
    if not has_extensions:
        _run_without_extensions()
    return ortmodule, has_extensions


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Returns a context that sets environment variables (None: unset) for a call into ORT, which reads its options
    only from there.

    Every call into ORT that changes process-wide state runs inside this context, one thread at a time.
    """
    with _lock:
        before = {name: os.environ.pop(name, None) for name in variables}
        try:
            os.environ.update({name: value for name, value in variables.items() if value is not None})
            yield
        finally:
            for name in variables:
                os.environ.pop(name, None)
            os.environ.update({name: value for name, value in before.items() if value is not None})


@contextlib.contextmanager
def moved_torch_names() -> Iterator[None]:
    """Returns a context in which torch's moved names are also available under their old names if missing there, for
    ORT's imports and exports."""
    with contextlib.ExitStack() as undo:
        for old, new in MOVED_MODULES.items():
            if old not in sys.modules:
                sys.modules[old] = importlib.import_module(new)
                undo.callback(sys.modules.pop, old)
                parent, _, leaf = old.rpartition(".")
                _add(importlib.import_module(parent), leaf, sys.modules[old], undo)
        for module, names in MOVED_NAMES.items():
            source = importlib.import_module(f"{TORCHSCRIPT}.{module.rpartition('.')[2]}")
            for name in names:
                _add(importlib.import_module(module), name, getattr(source, name), undo)
        yield


def _add(owner: types.ModuleType, name: str, value: object, undo: contextlib.ExitStack) -> None:
    if not hasattr(owner, name):
        setattr(owner, name, value)
        undo.callback(delattr, owner, name)


def _silence_missing_nvtx() -> None:
    """Disable ORT's NVTX calls if torch has no NVTX: ORT always makes them, and torch's stub raises on builds without
    CUDA ("NVTX functions not installed")."""
    try:
        torch.cuda.nvtx.range_push("optimum_memopt")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        profile = importlib.import_module("onnxruntime.training.utils.torch_profile_utils")
        profile.torch_nvtx_range_push = lambda message: None
        profile.torch_nvtx_range_pop = lambda: None


def _provide_extensions() -> bool:
    """Load the built extensions, or register a stub under the name that ORT imports; True if they were loaded."""
    built = extensions.find()
    if built is not None:
        extensions.load(built)
        return True
    stub = types.ModuleType(f"{extensions.PACKAGE}.torch_interop_utils")
    stub.clear_all_grad_fns = lambda: None
    stub.get_custom_function_forward_runner = stub.get_custom_function_backward_runner = lambda: 0
    sys.modules[stub.__name__] = stub
    return False


def _run_without_extensions() -> None:
    """Make ORT start without its extensions, which it requires although most models do not use them."""
    session = importlib.import_module(f"{ORTMODULE}._graph_execution_manager")
    session.load_aten_op_executor_cpp_extension = lambda: None
    # This symbolic exports embeddings as an ATen call, which needs the extension; without it, they export as Gather.
    registry = importlib.import_module(f"{ORTMODULE}._custom_op_symbolic_registry").CustomOpSymbolicRegistry
    registry._SYMBOLICS.pop("::embedding", None)


@contextlib.contextmanager
def _undo_replacements() -> Iterator[None]:
    """Returns a context that restores the functions that the import replaces: the engine forwards seeds itself and
    refuses checkpointing."""
    with contextlib.ExitStack() as undo:
        for module, name in _REPLACED_BY_IMPORT:
            if hasattr(owner := sys.modules.get(module), name):
                undo.callback(setattr, owner, name, getattr(owner, name))
        yield


@contextlib.contextmanager
def _preserve_logging_and_path() -> Iterator[None]:
    """Returns a context that undoes two side effects of the import. It calls `logging.basicConfig`
    (onnxruntime/tools/logger.py), which makes a later call by the user a no-op. It also appends a folder with modules
    such as `utils` to `sys.path` (tools/ort_format_model/__init__.py), so that imports succeed that should fail.
    """
    root = logging.getLogger()
    handlers, level, path = list(root.handlers), root.level, list(sys.path)
    try:
        yield
    finally:
        root.handlers[:] = [handler for handler in root.handlers if handler in handlers]
        root.setLevel(level)
        sys.path[:] = [entry for entry in sys.path if entry in path or f"{os.sep}onnxruntime{os.sep}" not in entry]


@contextlib.contextmanager
def _block_deepspeed_import() -> Iterator[None]:
    """Returns a context in which ORT does not import deepspeed. It does so only to replace DeepSpeed's checkpoint
    function, and works without; the import takes seconds, and starts DeepSpeed's accelerator detection in runs that do
    not use it."""
    with contextlib.ExitStack() as undo:
        if "deepspeed" not in sys.modules:
            sys.modules["deepspeed"] = None  # type: ignore[assignment]
            undo.callback(sys.modules.pop, "deepspeed")
        yield
