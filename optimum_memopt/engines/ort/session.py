"""Builds an ORTModule and runs training forwards through it."""

import contextlib
import importlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimum_memopt.engines.ort import (
    allocator,
    compat,
    compat_export,
    compat_options,
    compat_session,
    env_options,
    module_with_loss,
)
from optimum_memopt.engines.ort.backward_once import single_backward
from optimum_memopt.engines.ort.conv_gradients import unsqueeze_grouped_conv1d_gradients
from optimum_memopt.engines.ort.empty_losses import nan_mean_without_labels
from optimum_memopt.engines.ort.export_cache import ExportCache
from optimum_memopt.engines.ort.export_watch import refuse_side_effects
from optimum_memopt.engines.ort.failures import translate_out_of_memory
from optimum_memopt.engines.ort.gather_indices import expand_indices_in_backward
from optimum_memopt.engines.ort.index_checks import IndexCheck, as_index_error, check_indices
from optimum_memopt.engines.ort.installed import DISTRIBUTIONS
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.engines.ort.padding import mask_padding_gradients
from optimum_memopt.errors import MemOptError
from optimum_memopt.installed import installed_version
from optimum_memopt.progress import Progress, announced

# First phase of a forward and last of its backward (`Phase` in _runtime_inspector.py).
PRE_FORWARD = 0
POST_BACKWARD = 3


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the engine, at moments for which ORT has no public hook.

    Attributes:
        choose: called between building the training graph and creating the session, with the insight text and ORT's
            rows with their frequency; returns the `cluster_id:strategy:-1` to apply.
        report: called after `choose`, with the insight text that holds the applied counts.
        phase: called with PRE_FORWARD, POST_BACKWARD or a number between.
    """

    choose: Callable[[str, Mapping[str, int]], tuple[str, ...]]
    report: Callable[[str], None]
    phase: Callable[[int], None]


class OrtSession:
    """Builds an ORTModule around `module` and runs training forwards through it.

    Args:
        module: float32 on the CPU, or any dtype that the CUDA provider knows.
        options: checked by `check_ort`.
        log_level: a key of `LOG_LEVELS`.
        layerwise: look for plans inside each transformer layer only (ORT's probe "1:1").
        recompute: plans will be applied, which only save memory in ORT's memory-efficient execution order.

    Raises:
        MemOptError: ORT ignored one of the options.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: OrtOptions,
        layerwise: bool,
        recompute: bool,
        hooks: Hooks,
        log_level: str = "info",
    ) -> None:
        imported = compat.load()
        self._has_extensions = imported.has_extensions
        self._options = options
        self._log_level = log_level
        self._environment = env_options.variables(options)
        self._hooks = hooks
        self._recompute = recompute
        self._config_file: str = ""
        self._inlined_functions: list[str] = []
        self._building = True
        self._index_checks: dict[str, IndexCheck] = {}
        self._progress = Progress()
        with (
            compat.environment(self._environment),
            compat_export.register_symbolics(options.ort_opset or imported.ortmodule.ONNX_OPSET_VERSION),
            compat_session.without_torch_gpu_allocator(),
            self._quiet(),
            compat_session.preserve_training_modes(module),
        ):
            ort = importlib.import_module(f"{compat.ORTMODULE}.ortmodule")
            self._ort = ort.ORTModule(module, self._debug_options(type(module).__name__))
            self._internals = compat_session.SessionInternals(self._ort)
            if ignored := env_options.ignored_options(options, self._internals.options):
                raise MemOptError(f"this build of ONNX Runtime does not do {', '.join(ignored)}; leave it out")
            self._patch_instance(layerwise)
        # ORT's import replaces torch.manual_seed to forward every seed; compat undoes that, so forward it here.
        importlib.import_module("onnxruntime").set_seed(torch.initial_seed() % (2**63 - 1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training forward; the outputs carry a grad_fn whose backward runs in ORT.

        Raises:
            MemOptError: from the hooks.
            IndexError: a label or an id is out of range, as in PyTorch.
            torch.OutOfMemoryError: also from the backward of the outputs.
            Exception: whatever ORT raises for a graph that it cannot build or run.
        """
        with translate_out_of_memory(), contextlib.ExitStack() as self._announcement:
            try:
                return self._ort(*args, **kwargs)
            except Exception as error:
                if (index_error := as_index_error(error, self._index_checks)) is not None:
                    raise index_error from None
                raise

    @property
    def is_building(self) -> bool:
        """Whether the last forward did not get past building the session."""
        return self._building

    @property
    def graph(self) -> Any:
        """The training graph (`onnx.GraphProto`), forward and backward separated by a YieldOp."""
        return self._internals.graph

    @property
    def dimensions(self) -> dict[str, int]:
        """Names of the inputs' dynamic dimensions to their values in the first batch."""
        return self._internals.dimensions

    @property
    def device(self) -> torch.device:
        return self._internals.device

    @property
    def has_extensions(self) -> bool:
        return self._has_extensions

    @property
    def inlined_functions(self) -> tuple[str, ...]:
        """`torch.autograd.Function`s that the export inlined because the extensions are missing or off."""
        return tuple(self._inlined_functions)

    @property
    def aten_operators(self) -> tuple[str, ...]:
        """Operators of the graph that only the extensions can run."""
        names = (
            next((a.s.decode() for a in node.attribute if a.name == "operator"), node.op_type)
            for node in self.graph.node
            if node.op_type == "ATen"
        )
        return tuple(sorted(set(names)))

    def close(self) -> None:
        """Delete the temporary config file; a session that was dropped while it was built has not read it yet."""
        self._drop_config_file()

    def _debug_options(self, name: str) -> Any:
        module = importlib.import_module(compat.ORTMODULE)
        levels = {"devinfo": module.LogLevel.DEVINFO, "verbose": module.LogLevel.VERBOSE}
        level = levels.get(self._log_level, module.LogLevel.ERROR)
        folder = self._options.ort_save_onnx
        return module.DebugOptions(level, save_onnx=bool(folder), onnx_prefix=name, save_path=folder or "")

    def _patch_instance(self, layerwise: bool) -> None:
        options = self._internals.options
        options.use_external_gpu_allocator = False
        if self._options.ort_custom_autograd is False:
            options.enable_custom_autograd_function = False
        options.recompute_probe_config = "1:1" if layerwise else "1:0"
        self._internals.patch_export(self._during_forward, self._during_export, self._during_trace)
        self._internals.patch_session_config(self._session_config)
        self._internals.patch_build_graph(self._graph_builder)
        self._internals.patch_create_session(compat.environment(self._environment))
        self._internals.patch_backward(lambda backward: single_backward(translate_out_of_memory()(backward)))
        self._internals.set_callbacks(self._choose, lambda phase: self._hooks.phase(int(phase)), self._built)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Hide the exporter's warnings about traced branches, and those of deprecated properties, all of which
        ORTModule reads when it looks through the model's members."""
        with warnings.catch_warnings():
            if self._log_level != "verbose":
                warnings.simplefilter("ignore")
            yield

    @contextlib.contextmanager
    def _during_forward(self) -> Iterator[None]:
        with (
            compat.environment(self._environment),
            compat_options.fix_gradient_management_device(self._internals.transition_device),
        ):
            yield

    @contextlib.contextmanager
    def _during_export(self) -> Iterator[None]:
        self._building = True
        self._announce()
        options = self._internals.options
        # With the loss inside, the labelled rows are selected already; ORT's marker would stay in the graph and print.
        marks_labels = options.enable_label_sparse_optimizer and not self._options.ort_module_with_loss
        with contextlib.ExitStack() as stack:
            stack.enter_context(compat_export.keep_output_visible())
            stack.enter_context(
                compat_export.register_symbolics(options.onnx_opset_version, options.enable_custom_autograd_function)
            )
            stack.enter_context(module_with_loss.exportable(options.onnx_opset_version))
            stack.enter_context(self._quiet())
            stack.enter_context(compat_session.preserve_training_modes(self._internals.module))
            if self._options.ort_allow_autograd_checkpoint:
                stack.enter_context(compat_options.check_checkpointed_functions())
            stack.enter_context(
                compat_options.fix_label_sparsity_switch(self._internals.transition_manager, marks_labels)
            )
            if not options.enable_custom_autograd_function:
                self._inlined_functions = stack.enter_context(compat_export.record_autograd_functions())
            stack.enter_context(self._export_cache())
            yield

    def _during_trace(self) -> contextlib.AbstractContextManager[None]:
        return refuse_side_effects(self._internals.module)

    def _announce(self) -> None:
        session = f"the ONNX Runtime session of {type(self._internals.module).__name__}"
        note = "exports the model and differentiates its graph; once for each kind of batch"
        self._progress = self._announcement.enter_context(announced(f"building {session}", f"built {session}", note))
        self._progress.stage = "exporting the model"

    def _export_cache(self) -> contextlib.AbstractContextManager[None]:
        if not self._options.ort_cache_dir:
            return contextlib.nullcontext()
        versions = (torch.__version__, installed_version(DISTRIBUTIONS), installed_version(("optimum-memopt",)))
        others = (*map(str, versions), *compat_export.symbolic_names(), *map(str, sorted(self._environment.items())))
        return ExportCache(os.fspath(self._options.ort_cache_dir), others).enabled()

    def _graph_builder(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def build_graph(configuration: Any) -> None:
            self._progress.stage = "building the training graph"
            with compat.environment(self._environment), compat_options.select_graph_optimizers(self._options):
                original(configuration)
            module = self._internals.module
            self._index_checks = check_indices(self.graph, module)
            nan_mean_without_labels(self.graph)
            mask_padding_gradients(self.graph, module)
            expand_indices_in_backward(self.graph)
            unsqueeze_grouped_conv1d_gradients(self.graph)

        return build_graph

    def _session_config(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def get_session_config() -> Any:
            session_options, providers, provider_options = original()
            # The arena never shrinks: memory that a plan saves would not be available to the rest of the process.
            session_options.enable_cpu_mem_arena = self._options.ort_arena
            if self._options.ort_arena:
                allocator.register_arena()
                session_options.add_session_config_entry("session.use_env_allocators", "1")
            # Same number of threads as torch: a launcher's OMP_NUM_THREADS applies to both.
            session_options.intra_op_num_threads = torch.get_num_threads()
            if self._recompute:
                # The default order recomputes tensors early and keeps them alive, which saves nothing.
                order = importlib.import_module("onnxruntime").ExecutionOrder
                session_options.execution_order = order.MEMORY_EFFICIENT
            return session_options, providers, provider_options

        return get_session_config

    def _choose(self, agent: Any, options: Any) -> None:
        """Choose plans with ORT's session without plans; ORT creates the final session next.

        The applied counts come from the session without plans too: in the final one the recomputed tensors are no
        longer stashed, so ORT does not list them.
        """
        self._drop_config_file()
        self._progress.stage = "creating the session"
        probe = options.recompute_probe_config
        options.memory_optimizer_config_file_path = ""
        text, symbolics = agent.get_serialized_ortmodule_memory_stat("", probe, True)
        configs = self._hooks.choose(text, {config: int(saving[1]) for config, saving in symbolics.items()})
        if configs:
            options.memory_optimizer_config_file_path = self._write_config(configs)
            text, _ = agent.get_serialized_ortmodule_memory_stat(self._config_file, probe, True)
        self._hooks.report(text)

    def _write_config(self, configs: Sequence[str]) -> str:
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="memopt-", delete=False) as file:
                self._config_file = file.name
                json.dump(configs, file)
        except OSError as error:
            raise MemOptError(
                f"cannot write the plan for ONNX Runtime into {tempfile.gettempdir()}: {error.strerror}; free some "
                "space there or set TMPDIR to another folder"
            ) from error
        return self._config_file

    def _built(self) -> None:
        self._building = False
        self._drop_config_file()
        self._announcement.close()

    def _drop_config_file(self) -> None:
        if self._config_file:
            Path(self._config_file).unlink(missing_ok=True)
            self._config_file = ""
