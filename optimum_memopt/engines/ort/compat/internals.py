"""Private names of ORT's export and running session, patched on one ORTModule or for the time of one call.

All of onnxruntime-training 1.19.2 (the last release), onnxruntime/training/ortmodule/: `_graph_execution_manager.py`,
`_training_manager.py`, `_graph_transition_manager.py`, `_runtime_inspector.py`. Other ORTModules in the process are
not affected.
"""

import contextlib
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint

from optimum_memopt.engines.ort.compat.ortmodule import ORTMODULE, TORCHSCRIPT, moved_torch_names, patched

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class SessionInternals:
    """The training session inside an ORTModule.

    Args:
        ort_module: an ORTModule that has not run yet.
    """

    def __init__(self, ort_module: Any) -> None:
        self._manager = ort_module._torch_module._execution_manager(True)
        self._transition = self._manager._graph_transition_manager
        self._observer = self._manager._runtime_inspector.memory_ob

    @property
    def options(self) -> Any:
        """ORT's `_RuntimeOptions`."""
        return self._manager._runtime_options

    @property
    def module(self) -> torch.nn.Module:
        """The module that ORT exports."""
        return self._manager._original_module

    @property
    def graph(self) -> Any:
        """The training graph (`onnx.GraphProto`), forward and backward separated by a YieldOp."""
        return self._manager._onnx_models.optimized_model.graph

    @property
    def dimensions(self) -> dict[str, int]:
        """Names of the inputs' dynamic dimensions to their values in the first batch."""
        return {str(name): int(value) for name, value in self._observer.symbolic_dim_name_to_value_map.items()}

    @property
    def device(self) -> torch.device:
        return self._manager._device

    @property
    def transition_manager(self) -> type:
        """The class that exports the model and decides when to export again."""
        return type(self._transition)

    def transition_device(self) -> torch.device:
        """The device that the transition manager has found out from the latest inputs."""
        return self._transition._device

    def patch_export(
        self,
        during_forward: Callable[[], contextlib.AbstractContextManager[Any]],
        during_export: Callable[[], contextlib.AbstractContextManager[Any]],
        during_trace: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Run ORT's export inside the caller's contexts.

        Args:
            during_forward: around each check whether the exported graph fits the inputs.
            during_export: around each export, inside `during_forward`.
            during_trace: around the call of the exporter, inside `during_export`; ORT restores torch's random state
                when that call returns.
        """
        transition, owner = self._transition, type(self._transition)
        transition._export_extra_kwargs = {**transition._export_extra_kwargs, **export_arguments()}
        original, export = transition.get_post_processed_model, owner._export_model

        def export_model(*args: Any, **kwargs: Any) -> Any:
            call_exporter = owner._get_exported_model

            def get_exported_model(*args: Any, **kwargs: Any) -> Any:
                with during_trace():
                    return call_exporter(*args, **kwargs)

            with during_export(), patched(owner, "_get_exported_model", staticmethod(get_exported_model)):
                self._observer.symbolic_dim_collecting_completed = False
                return export(*args, **kwargs)

        def get_post_processed_model(inputs: Any, kwargs: Any) -> Any:
            with (
                during_forward(),
                patched(owner, "_export_model", staticmethod(export_model)),
                _accept_buffers_and_numbers(owner),
            ):
                return original(inputs, kwargs)

        transition.get_post_processed_model = get_post_processed_model

    def patch_build_graph(self, decorate: Decorator) -> None:
        """Wrap the step that builds the training graph."""
        self._manager._build_graph = decorate(self._manager._build_graph)

    def patch_create_session(self, decorate: Decorator) -> None:
        """Wrap the step that creates the C++ session."""
        self._manager._create_execution_agent = decorate(self._manager._create_execution_agent)

    def patch_session_config(self, decorate: Decorator) -> None:
        """Wrap the function that returns session options, providers and provider options."""
        self._manager._get_session_config = decorate(self._manager._get_session_config)

    def patch_backward(self, decorate: Decorator) -> None:
        """Wrap the backward of the `autograd.Function` that runs the session; the class belongs to this ORTModule."""
        function = self._manager._forward_class
        function.backward = staticmethod(decorate(function.backward))

    def set_callbacks(
        self, choose: Callable[[Any, Any], None], phase: Callable[[Any], None], built: Callable[[], None]
    ) -> None:
        """Replace what ORT calls at three moments.

        Args:
            choose: gets the C++ agent and the runtime options before the final session is created.
            phase: gets a `Phase` of _runtime_inspector.py.
            built: called when the session is created and has read its config; ORT prints its own table there.
        """
        self._observer.find_memory_optimization_opportunity = choose
        self._observer.inspect_memory = phase
        self._manager._log_feature_stats = built


def without_torch_gpu_allocator() -> contextlib.AbstractContextManager[None]:
    """Where torch sees a GPU, ORTModule() imports a third extension, torch_gpu_allocator, which is not built here."""
    base = importlib.import_module(f"{ORTMODULE}._graph_execution_manager").GraphExecutionManager
    return patched(base, "_get_torch_gpu_allocator_function_addresses", lambda _: None)


@contextlib.contextmanager
def _accept_buffers_and_numbers(transition_manager: type) -> Iterator[None]:
    """With the skip checks off, ORT asserts at the second forward that every graph input is a parameter or a tensor
    from the user; inputs can also be buffers (BART) and numbers (num_items_in_batch)."""
    original = transition_manager.__dict__["_reprocess_check"]

    def reprocess_check(flatten_module: Any, args: Any, kwargs: Mapping[str, Any], **rest: Any) -> Any:
        tensors = [*flatten_module.named_parameters(), *flatten_module.named_buffers()]
        return original.__func__(
            flatten_module=types.SimpleNamespace(named_parameters=lambda: tensors),
            args=[_as_tensor(value) for value in args],
            kwargs={name: _as_tensor(value) for name, value in kwargs.items()},
            **rest,
        )

    with patched(transition_manager, "_reprocess_check", staticmethod(reprocess_check)):
        yield


def _as_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, bool | int | float) else value


def export_arguments() -> dict[str, bool]:
    """Arguments that ORT has to pass to `torch.onnx.export`: dynamo=True is the default since torch 2.9, and its
    graphs lack the names and dynamic axes that ORTModule relies on (pytorch PR 162726)."""
    return {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}


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


@contextlib.contextmanager
def fix_label_sparsity_switch(transition_manager: type, enabled: bool) -> Iterator[None]:
    """ORT reads the switch for embedding sparsity where it means label sparsity, and then iterates over the None that
    "off" returns (_graph_transition_manager.py, `_export_model`: `'NoneType' object is not iterable`)."""
    original = transition_manager.__dict__["_add_check_label_sparsity_hook"].__func__

    def add_hooks(_: bool, *rest: Any) -> list[Any]:
        return original(enabled, *rest) or []

    with patched(transition_manager, "_add_check_label_sparsity_hook", staticmethod(add_hooks)):
        yield


@contextlib.contextmanager
def fix_gradient_management_device(device: Callable[[], torch.device]) -> Iterator[None]:
    """ORT passes the parameters in place of the device (_graph_transition_manager.py, `_post_export_process`:
    `zeros(): argument 'device' must be torch.device, not dict`)."""
    module = importlib.import_module(f"{ORTMODULE}._mem_efficient_grad_mgmt")
    original = module.post_processing_enable_mem_efficient_training

    def with_device(model: Any, named_parameters: Any, _: Any) -> Any:
        return original(model, named_parameters, device())

    with patched(module, original.__name__, with_device):
        yield


@contextlib.contextmanager
def select_graph_optimizers(efficient_attention: bool, flash_attention: bool, triton: bool) -> Iterator[None]:
    """Apply only the graph rewrites that the options of this model name, and those that other code registered: ORT
    registers a rewrite when its module is imported, for every model of the process."""
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
    with patched(registry, "_OPTIMIZER_FUNCS", chosen):
        yield
