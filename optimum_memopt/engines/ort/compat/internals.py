"""Reads and patches private names of torch's modules, and of ORT's export and session, each patch on one ORTModule or
for the duration of one call.

ORT's names are those of onnxruntime-training 1.19.2 (the last release), onnxruntime/training/ortmodule/:
`_graph_execution_manager.py`, `_training_manager.py`, `_graph_transition_manager.py`, `_runtime_inspector.py`. Other
ORTModules in the process are not affected.
"""

import contextlib
import functools
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from optimum_memopt.engines.ort.compat.ortmodule import ORTMODULE, TORCHSCRIPT, moved_torch_names
from optimum_memopt.errors import UnsupportedModelError

# A module's attributes for its hooks, and for how they are called.
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
DROPOUTS = torch.nn.modules.dropout._DropoutNd
# A module's own dicts of submodules and buffers, and the names of its non-persistent buffers; cheap enough for each
# step.
children, buffers = attrgetter("_modules"), attrgetter("_buffers")
non_persistent_buffers = attrgetter("_non_persistent_buffers_set")
# `torch.onnx.export` uses dynamo by default since torch 2.9; its graphs lack the names and dynamic axes that ORTModule
# relies on (pytorch PR 162726).
EXPORT_ARGUMENTS = {"dynamo": False}

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class SessionInternals:
    """The training session inside an ORTModule that has not run yet.

    Attributes:
        options: ORT's `_RuntimeOptions`.
        module: the module that ORT exports.
    """

    def __init__(self, ort_module: Any) -> None:
        self._manager = ort_module._torch_module._execution_manager(True)
        self._transition = self._manager._graph_transition_manager
        self._observer = self._manager._runtime_inspector.memory_ob
        self.options: Any = self._manager._runtime_options
        self.module: torch.nn.Module = self._manager._original_module

    @property
    def graph(self) -> Any:
        """Returns the training graph (`onnx.GraphProto`), in which a YieldOp separates forward and backward."""
        return self._manager._onnx_models.optimized_model.graph

    @property
    def dimensions(self) -> dict[str, int]:
        """Returns the names of the inputs' dynamic dimensions, with their values in the first batch."""
        return {str(name): int(value) for name, value in self._observer.symbolic_dim_name_to_value_map.items()}

    @property
    def device(self) -> torch.device:
        return self._manager._device

    def patch_export(
        self,
        during_forward: Callable[[], AbstractContextManager[Any]],
        during_export: Callable[[], AbstractContextManager[Any]],
        during_trace: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Run ORT's export inside the caller's contexts.

        Args:
            during_forward: returns the context for each check whether the exported graph fits the inputs.
            during_export: returns the context for each export, inside `during_forward`.
            during_trace: returns the context for the call of the exporter, inside `during_export`; ORT restores
                torch's random state when that call returns.
        """
        transition, owner = self._transition, type(self._transition)
        transition._export_extra_kwargs = {**transition._export_extra_kwargs, **EXPORT_ARGUMENTS}
        original, export = transition.get_post_processed_model, owner._export_model

        def export_model(*args: Any, **kwargs: Any) -> Any:
            call_exporter = owner._get_exported_model

            def get_exported_model(*args: Any, **kwargs: Any) -> Any:
                with during_trace():
                    return call_exporter(*args, **kwargs)

            with during_export(), mock.patch.object(owner, "_get_exported_model", staticmethod(get_exported_model)):
                self._observer.symbolic_dim_collecting_completed = False
                return export(*args, **kwargs)

        def get_post_processed_model(inputs: Any, kwargs: Any) -> Any:
            with (
                during_forward(),
                mock.patch.object(owner, "_export_model", staticmethod(export_model)),
                _accept_buffers_and_numbers(owner),
            ):
                return original(inputs, kwargs)

        transition.get_post_processed_model = get_post_processed_model

    def patch_run(
        self, build_graph: Decorator, session_config: Decorator, create_session: Decorator, backward: Decorator
    ) -> None:
        """Wrap methods of this ORTModule.

        Args:
            build_graph: wraps the method that builds the training graph.
            session_config: wraps the method that returns session options, providers and provider options.
            create_session: wraps the method that creates the C++ session.
            backward: wraps the backward of its `autograd.Function`.
        """
        manager, function = self._manager, self._manager._forward_class
        manager._build_graph = build_graph(manager._build_graph)
        manager._get_session_config = session_config(manager._get_session_config)
        manager._create_execution_agent = create_session(manager._create_execution_agent)
        function.backward = staticmethod(backward(function.backward))

    def set_callbacks(
        self, choose: Callable[[Any, Any], None], phase: Callable[[Any], None], built: Callable[[], None]
    ) -> None:
        """Replace three methods that ORT calls.

        Args:
            choose: called with the C++ agent and the runtime options before the final session is created.
            phase: called with each `Phase` of _runtime_inspector.py.
            built: called after the session is created and has read its config, instead of printing ORT's own table.
        """
        self._observer.find_memory_optimization_opportunity = choose
        self._observer.inspect_memory = phase
        self._manager._log_feature_stats = built

    def fix_label_sparsity_switch(self, enabled: bool) -> AbstractContextManager[Any]:
        """Returns a context that fixes a bug of ORT: it reads the switch for embedding sparsity instead of label
        sparsity, and then iterates over the None that "off" returns (_graph_transition_manager.py, `_export_model`:
        `'NoneType' object is not iterable`)."""
        owner, name = type(self._transition), "_add_check_label_sparsity_hook"
        original = getattr(owner, name)
        return mock.patch.object(owner, name, staticmethod(lambda _, *rest: original(enabled, *rest) or []))

    def fix_gradient_management_device(self) -> AbstractContextManager[Any]:
        """Returns a context that fixes a bug of ORT: it passes the parameters instead of the device
        (_graph_transition_manager.py, `_post_export_process`: `zeros(): argument 'device' must be torch.device, not
        dict`)."""
        module = importlib.import_module(f"{ORTMODULE}._mem_efficient_grad_mgmt")
        original = module.post_processing_enable_mem_efficient_training

        def with_device(model: Any, named_parameters: Any, _: Any) -> Any:
            return original(model, named_parameters, self._transition._device)

        return mock.patch.object(module, original.__name__, with_device)


def without_torch_gpu_allocator() -> AbstractContextManager[Any]:
    """Returns a context in which ORTModule() does not import a third extension, torch_gpu_allocator, which is not
    built here; otherwise it does if torch sees a GPU."""
    base = importlib.import_module(f"{ORTMODULE}._graph_execution_manager").GraphExecutionManager
    return mock.patch.object(base, "_get_torch_gpu_allocator_function_addresses", return_value=None)


def _accept_buffers_and_numbers(transition_manager: type) -> AbstractContextManager[Any]:
    """Returns a context in which graph inputs may also be buffers (BART) and numbers (num_items_in_batch). With the
    skip checks off, ORT asserts at the second forward that every graph input is a parameter or a tensor from the
    user."""
    name = "_reprocess_check"
    original = getattr(transition_manager, name)

    def as_tensor(value: Any) -> Any:
        return torch.as_tensor(value) if isinstance(value, bool | int | float) else value

    def reprocess_check(flatten_module: Any, args: Any, kwargs: Mapping[str, Any], **rest: Any) -> Any:
        tensors = [*flatten_module.named_parameters(), *flatten_module.named_buffers()]
        return original(
            flatten_module=types.SimpleNamespace(named_parameters=lambda: tensors),
            args=list(map(as_tensor, args)),
            kwargs={name: as_tensor(value) for name, value in kwargs.items()},
            **rest,
        )

    return mock.patch.object(transition_manager, name, staticmethod(reprocess_check))


@contextlib.contextmanager
def register_symbolics(opset: int, custom_functions: bool = True) -> Iterator[None]:
    """Returns a context in which ORT's ONNX symbolics are registered. Every ORTModule() registers them for the whole
    process, which would leave ATen and com.microsoft operators in a user's own `torch.onnx.export`.

    Args:
        custom_functions: also register the symbolic for `torch.autograd.Function`s, which are inlined otherwise.
    """
    contrib = importlib.import_module("onnxruntime.tools.pytorch_export_contrib_ops")
    functions = importlib.import_module(f"{ORTMODULE}._custom_autograd_function")
    exporter = importlib.import_module(f"{ORTMODULE}._custom_autograd_function_exporter")
    with moved_torch_names():
        try:
            contrib.register()
            _symbolics().register_all(opset)
            if custom_functions and functions.custom_autograd_function_enabler.state:
                torch.onnx.register_custom_op_symbolic("prim::PythonOp", exporter._export, 1)
            yield
        finally:
            contrib.unregister()
            for name in symbolic_names():
                torch.onnx.unregister_custom_op_symbolic(name, opset)
            torch.onnx.unregister_custom_op_symbolic("prim::PythonOp", 1)


def _symbolics() -> Any:
    return importlib.import_module(f"{ORTMODULE}._custom_op_symbolic_registry").CustomOpSymbolicRegistry


def symbolic_names() -> tuple[str, ...]:
    """Returns the operators for which ORT has a symbolic; they depend on the extensions and on variables read at ORT's
    import."""
    return tuple(sorted(_symbolics()._SYMBOLICS))


def keep_output_visible() -> AbstractContextManager[Any]:
    """Returns a context that keeps stdout and stderr visible during an export.

    To hide messages of the exporter, ORT redirects both to a temporary file for the whole process (_logger.py,
    `SuppressLogs`): progress bars, output of other threads and all log lines are lost. Today the exporter's messages
    are Python warnings.
    """
    logger = importlib.import_module(f"{ORTMODULE}._logger")
    return mock.patch.object(logger, "_suppress_os_stream_output", return_value=contextlib.nullcontext())


def without_exporter_log() -> AbstractContextManager[Any]:
    """Returns a context in which the exporter does not print the graph that it fails at, hundreds of lines on stdout.
    The exporter's own switch is on during each export (`setup_onnx_logging` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/onnx/_internal/torchscript_exporter/utils.py)."""
    return mock.patch.object(torch._C, "_jit_onnx_log", return_value=None)


def observe_traced_graphs(observe: Callable[[object], None]) -> AbstractContextManager[Any]:
    """Returns a context in which `observe` is called with each graph (`torch.Graph`) that `torch.onnx.export` has
    traced, before it converts the graph (torch 2.9 to 2.13, torchscript_exporter/utils.py, `_create_jit_graph`)."""
    utils = importlib.import_module(f"{TORCHSCRIPT}.utils")
    original = utils._trace_and_get_graph_from_model

    def trace(*args: object, **kwargs: object) -> object:
        graph, outputs = original(*args, **kwargs)
        observe(graph)
        return graph, outputs

    return mock.patch.object(utils, original.__name__, trace)


def select_graph_optimizers(efficient_attention: bool, flash_attention: bool, triton: bool) -> AbstractContextManager:
    """Returns a context in which ORT applies only the graph rewrites that this model's options enable, and rewrites
    registered by other code. ORT registers a rewrite when its module is imported, for all models of the process."""
    attention = {
        f"{ORTMODULE}.graph_optimizers._aten_attn": efficient_attention,
        "onnxruntime.training.ort_triton.kernel._flash_attn": flash_attention,
    }
    wanted = {**attention, "onnxruntime.training.ort_triton.kernel._slice_scel": triton}
    for module in filter(attention.get, attention):
        importlib.import_module(module)
    registry = importlib.import_module(f"{ORTMODULE}.graph_optimizer_registry").GraphOptimizerRegistry
    chosen = {
        target: [entry for entry in entries if wanted.get(entry[0].__module__, True)]
        for target, entries in registry._OPTIMIZER_FUNCS.items()
    }
    return mock.patch.object(registry, "_OPTIMIZER_FUNCS", chosen)


@contextlib.contextmanager
def preserve_training_modes(module: torch.nn.Module) -> Iterator[None]:
    """Returns a context that restores the training mode of each submodule, which ORTModule() and torch.onnx.export set
    to the root's."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextlib.contextmanager
def record_autograd_functions() -> Iterator[list[str]]:
    """Returns a context that yields a list of the `torch.autograd.Function`s applied in it, by name, except ORT's own,
    which wrap every model.

    Without the extensions, an export inlines such functions, and silently drops a backward that is not the derivative
    of the forward.
    """
    seen: list[str] = []
    original = torch.autograd.Function.__dict__["apply"]
    thread = threading.get_ident()

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        name, is_own = cls.__qualname__, not cls.__module__.startswith("onnxruntime.")
        if is_own and name not in seen and threading.get_ident() == thread:
            seen.append(name)
        return original.__get__(None, cls)(*args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield seen


@contextlib.contextmanager
def check_checkpointed_functions() -> Iterator[None]:
    """Returns a context that refuses checkpointed functions that hold tensors.

    A checkpointed layer is exported as a PythonOp that calls the function object of the export. Its tensor arguments
    come from the graph, but tensors held by a partial or a closure remain those of the first batch, as in
    transformers' layers that get masks or position embeddings by keyword (`GradientCheckpointingLayer`).

    Raises:
        UnsupportedModelError: such a function is checkpointed.
    """
    function_class = torch.utils.checkpoint.CheckpointFunction

    def apply(cls: type, function: Callable[..., Any], *args: Any) -> Any:
        if names := _held_tensors(function):
            raise UnsupportedModelError(
                f"its checkpointed layers get {', '.join(names)} other than as positional arguments, which the export "
                "would freeze at their values of the first batch; turn activation checkpointing off"
            )
        return super(function_class, cls).apply(function, *args)  # type: ignore[misc]

    with mock.patch.object(function_class, "apply", classmethod(apply)):
        yield


def _held_tensors(function: Callable[..., Any]) -> list[str]:
    held: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        held |= {**function.keywords, **{f"argument {index}": value for index, value in enumerate(function.args)}}
        function = function.func
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return [
        name
        for name, value in {**held, **variables}.items()
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
    ]
