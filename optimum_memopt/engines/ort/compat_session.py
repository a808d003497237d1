"""Private names of ORT's running session: what the engine reads and patches on one ORTModule.

All of onnxruntime-training 1.19.2 (the last release), onnxruntime/training/ortmodule/: `_graph_execution_manager.py`,
`_training_manager.py`, `_graph_transition_manager.py`, `_runtime_inspector.py`. Patches are applied to the instances
of one ORTModule, or to a class for the time of one call, so other ORTModules in the process are not affected.
"""

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from optimum_memopt.engines.ort import compat_export
from optimum_memopt.engines.ort.compat import ORTMODULE, patched

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
        transition._export_extra_kwargs = {**transition._export_extra_kwargs, **compat_export.export_arguments()}
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
        self,
        choose: Callable[[Any, Any], None],
        phase: Callable[[Any], None],
        built: Callable[[], None],
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
def preserve_training_modes(module: torch.nn.Module) -> Iterator[None]:
    """ORTModule() and torch.onnx.export set every submodule to the root's training mode; restore their own."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextlib.contextmanager
def _accept_buffers_and_numbers(transition_manager: type) -> Iterator[None]:
    """With the skip checks off, ORT asserts at the second forward that every graph input is a parameter or a tensor
    from the user; inputs can also be buffers (BART) and numbers (num_items_in_batch)."""
    original = transition_manager.__dict__["_reprocess_check"]

    def reprocess_check(flatten_module: Any, args: Any, kwargs: Mapping[str, Any], **others: Any) -> Any:
        tensors = [*flatten_module.named_parameters(), *flatten_module.named_buffers()]
        return original.__func__(
            flatten_module=types.SimpleNamespace(named_parameters=lambda: tensors),
            args=[_as_tensor(value) for value in args],
            kwargs={name: _as_tensor(value) for name, value in kwargs.items()},
            **others,
        )

    with patched(transition_manager, "_reprocess_check", staticmethod(reprocess_check)):
        yield


def _as_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, bool | int | float) else value
