"""One ORTModule, seen from outside: every private name of ORT's running session is touched here and nowhere else.

All of onnxruntime-training 1.19.2 (the last release), onnxruntime/training/ortmodule/: `_graph_execution_manager.py`,
`_training_manager.py`, `_graph_transition_manager.py`, `_runtime_inspector.py`. Whatever is replaced is replaced on
the instances of one ORTModule, so another ORTModule in the same process is left alone.
"""

import contextlib
import importlib
import json
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimum_memopt.engines.ort import (
    allocator,
    compat,
    env_option_patches,
    env_options,
    module_with_loss,
)
from optimum_memopt.engines.ort.backward_once import refuse_more
from optimum_memopt.engines.ort.conv_gradients import flatten_grouped_gradients
from optimum_memopt.engines.ort.empty_losses import mean_of_no_labels
from optimum_memopt.engines.ort.export_cache import ExportCache
from optimum_memopt.engines.ort.export_watch import side_effects_refused
from optimum_memopt.engines.ort.failures import out_of_memory_as_torch_says_it
from optimum_memopt.engines.ort.gather_indices import expand_indices_again
from optimum_memopt.engines.ort.index_checks import IndexCheck, as_index_error, check_indices
from optimum_memopt.engines.ort.installed import DISTRIBUTIONS
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.engines.ort.padding import keep_padding_rows
from optimum_memopt.errors import MemOptError
from optimum_memopt.installed import installed_version
from optimum_memopt.progress import Progress, announced

# Beginning of every forward, end of its backward: the two ends of a pair (`Phase` in _runtime_inspector.py).
PRE_FORWARD = 0
POST_BACKWARD = 3


@dataclass(frozen=True)
class Hooks:
    """What the engine does at the moments that ORT has no public hook for.

    Attributes:
        choose: training graph built, session not yet: gets the insight text and ORT's rows with their frequency,
            returns the `cluster_id:strategy:-1` to apply.
        report: configs chosen: gets the insight text with the counts that ORT applies.
        phase: gets PRE_FORWARD, POST_BACKWARD or a number between.
    """

    choose: Callable[[str, Mapping[str, int]], tuple[str, ...]]
    report: Callable[[str], None]
    phase: Callable[[int], None]


class OrtSession:
    """Builds an ORTModule around `module` and runs training forwards through it.

    Args:
        module: fp32 on the CPU, or any dtype that the CUDA provider knows.
        options: checked by `check_ort`.
        log_level: a key of `LOG_LEVELS`.
        layerwise: look for plans inside each transformer layer only (ORT's probe "1:1").
        recompute: plans will be applied, so ORT needs the execution order in which they save.

    Raises:
        MemOptError: ORT did not take one of the options.
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
        self._imported = compat.load()
        self._options = options
        self._log_level = log_level
        self._environment = env_options.variables(options)
        self._hooks = hooks
        self._recompute = recompute
        self._config_file: str = ""
        self._seen_functions: list[str] = []
        self._building = True
        self._index_checks: dict[str, IndexCheck] = {}
        self._progress = Progress()
        opset = options.ort_opset or self._imported.ortmodule.ONNX_OPSET_VERSION
        base = importlib.import_module(f"{compat.ORTMODULE}._graph_execution_manager").GraphExecutionManager
        # Wherever torch sees a GPU this imports a third extension, torch_gpu_allocator, which is not built here.
        without_torch_allocator = compat.replaced(base, "_get_torch_gpu_allocator_function_addresses", lambda _: None)
        with (
            compat.environment(self._environment),
            compat.symbolics(opset),
            without_torch_allocator,
            self._quiet(),
            _modes_kept(module),
        ):
            ort = importlib.import_module(f"{compat.ORTMODULE}.ortmodule")
            self._ort = ort.ORTModule(module, self._debug_options(type(module).__name__))
        self._training = self._ort._torch_module._execution_manager(True)
        if refused := env_options.not_taken(options, self._training._runtime_options):
            raise MemOptError(f"this build of ONNX Runtime does not do {', '.join(refused)}; leave it out")
        self._observer = self._training._runtime_inspector.memory_ob
        self._mend_instance(layerwise)
        # ORT's import made torch.manual_seed pass every seed on; that replacement is undone, so pass it on here.
        importlib.import_module("onnxruntime").set_seed(torch.initial_seed() % (2**63 - 1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A training forward; the outputs carry a grad_fn whose backward runs in ORT.

        Raises:
            MemOptError: from the hooks.
            IndexError: a label or an id is out of range, as in PyTorch.
            torch.OutOfMemoryError: also from the backward of the outputs.
            Exception: whatever ORT raises for a graph that it cannot build or run.
        """
        with out_of_memory_as_torch_says_it(), contextlib.ExitStack() as self._announcement:
            try:
                return self._ort(*args, **kwargs)
            except Exception as error:
                if (index_error := as_index_error(error, self._index_checks)) is not None:
                    raise index_error from None
                raise

    @property
    def is_building(self) -> bool:
        """Whether the last forward was still on the way from the model to a session, or ended there."""
        return self._building

    @property
    def graph(self) -> Any:
        """The training graph (`onnx.GraphProto`), forward and backward divided by a YieldOp."""
        return self._training._onnx_models.optimized_model.graph

    @property
    def dimensions(self) -> dict[str, int]:
        """Names of the inputs' dynamic dimensions to their values in the first batch."""
        return {str(name): int(value) for name, value in self._observer.symbolic_dim_name_to_value_map.items()}

    @property
    def device(self) -> torch.device:
        return self._training._device

    @property
    def has_extensions(self) -> bool:
        return self._imported.has_extensions

    @property
    def inlined_functions(self) -> tuple[str, ...]:
        """`torch.autograd.Function`s of the model that the export inlined for want of the extensions."""
        return tuple(self._seen_functions)

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
        """Leave nothing behind: a session that was given up while it was built has not read its config."""
        self._drop_config_file()

    def _debug_options(self, name: str) -> Any:
        module = importlib.import_module(compat.ORTMODULE)
        levels = {"devinfo": module.LogLevel.DEVINFO, "verbose": module.LogLevel.VERBOSE}
        level = levels.get(self._log_level, module.LogLevel.ERROR)
        folder = self._options.ort_save_onnx
        return module.DebugOptions(level, save_onnx=bool(folder), onnx_prefix=name, save_path=folder or "")

    def _mend_instance(self, layerwise: bool) -> None:
        options = self._training._runtime_options
        options.use_external_gpu_allocator = False
        if self._options.ort_custom_autograd is False:
            options.enable_custom_autograd_function = False
        options.recompute_probe_config = "1:1" if layerwise else "1:0"
        transition = self._training._graph_transition_manager
        transition._export_extra_kwargs = {**transition._export_extra_kwargs, **compat.export_arguments()}
        transition.get_post_processed_model = self._exporting(transition)
        self._training._get_session_config = self._session_config(self._training._get_session_config)
        self._training._build_graph = self._graph_builder(self._training._build_graph)
        create_session = self._training._create_execution_agent
        self._training._create_execution_agent = compat.environment(self._environment)(create_session)
        # The autograd.Function that carries the session; this ORTModule's own class.
        backward = refuse_more(out_of_memory_as_torch_says_it()(self._training._forward_class.backward))
        self._training._forward_class.backward = staticmethod(backward)
        self._observer.find_memory_optimization_opportunity = self._choose
        self._observer.inspect_memory = lambda phase: self._hooks.phase(int(phase))
        # Runs when the session is built and has read its config; it would print ORT's own table at warning level.
        self._training._log_feature_stats = self._built

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Without the exporter's warnings about traced branches, and those of every deprecated property that ORTModule
        reads when it looks through the model's members."""
        with warnings.catch_warnings():
            if self._log_level != "verbose":
                warnings.simplefilter("ignore")
            yield

    def _exporting(self, transition: Any) -> Callable[..., Any]:
        original, owner = transition.get_post_processed_model, type(transition)
        export = owner._export_model
        options = self._training._runtime_options

        def export_model(*args: Any, **kwargs: Any) -> Any:
            self._building = True
            self._announce()
            with contextlib.ExitStack() as stack:
                stack.enter_context(compat.output_not_captured())
                stack.enter_context(
                    compat.symbolics(options.onnx_opset_version, options.enable_custom_autograd_function)
                )
                stack.enter_context(module_with_loss.exportable(options.onnx_opset_version))
                stack.enter_context(self._quiet())
                stack.enter_context(_modes_kept(self._training._original_module))
                # With the loss inside, the rows are chosen already; ORT's mark would stay in the graph and print.
                marks_labels = options.enable_label_sparse_optimizer and not self._options.ort_module_with_loss
                if self._options.ort_allow_autograd_checkpoint:
                    stack.enter_context(env_option_patches.checkpointed_layers_checked())
                stack.enter_context(env_option_patches.label_sparsity(owner, marks_labels))
                if not options.enable_custom_autograd_function:
                    self._seen_functions = stack.enter_context(compat.recorded_autograd_functions())
                stack.enter_context(self._export_cache())
                stack.enter_context(
                    compat.replaced(
                        owner, "_get_exported_model", staticmethod(self._watched(owner._get_exported_model))
                    )
                )
                self._observer.symbolic_dim_collecting_completed = False
                exported = export(*args, **kwargs)
            return exported

        def get_post_processed_model(inputs: Any, kwargs: Any) -> Any:
            with (
                compat.environment(self._environment),
                compat.replaced(owner, "_export_model", staticmethod(export_model)),
                env_option_patches.gradient_management(lambda: transition._device),
                _all_kinds_of_inputs(owner),
            ):
                return original(inputs, kwargs)

        return get_post_processed_model

    def _announce(self) -> None:
        session = f"the ONNX Runtime session of {type(self._training._original_module).__name__}"
        note = "exports the model and differentiates its graph; once for each kind of batch"
        self._progress = self._announcement.enter_context(announced(f"building {session}", f"built {session}", note))
        self._progress.stage = "exporting the model"

    def _export_cache(self) -> contextlib.AbstractContextManager[None]:
        if not self._options.ort_cache_dir:
            return contextlib.nullcontext()
        versions = (torch.__version__, installed_version(DISTRIBUTIONS), installed_version(("optimum-memopt",)))
        others = (*map(str, versions), *compat.symbolic_names(), *map(str, sorted(self._environment.items())))
        return ExportCache(self._options.ort_cache_dir, others).used()

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Runs within ORT's export, at the end of which it sets all random generators back."""

        def get_exported_model(*args: Any, **kwargs: Any) -> Any:
            with side_effects_refused(self._training._original_module):
                return original(*args, **kwargs)

        return get_exported_model

    def _graph_builder(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def build_graph(configuration: Any) -> None:
            self._progress.stage = "building the training graph"
            with compat.environment(self._environment), env_option_patches.graph_optimizers(self._options):
                original(configuration)
            module = self._training._original_module
            self._index_checks = check_indices(self.graph, module)
            mean_of_no_labels(self.graph)
            keep_padding_rows(self.graph, module)
            expand_indices_again(self.graph)
            flatten_grouped_gradients(self.graph)

        return build_graph

    def _session_config(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def get_session_config() -> Any:
            session_options, providers, provider_options = original()
            # The arena keeps the most it ever held: what a plan saves would not come to the rest of the process.
            session_options.enable_cpu_mem_arena = self._options.ort_arena
            if self._options.ort_arena:
                allocator.register_arena()
                session_options.add_session_config_entry("session.use_env_allocators", "1")
            # As many threads as torch has: a launcher's OMP_NUM_THREADS is for both.
            session_options.intra_op_num_threads = torch.get_num_threads()
            if self._recompute:
                # In the default order recomputed tensors are made early and live on, which saves nothing.
                order = importlib.import_module("onnxruntime").ExecutionOrder
                session_options.execution_order = order.MEMORY_EFFICIENT
            return session_options, providers, provider_options

        return get_session_config

    def _choose(self, agent: Any, options: Any) -> None:
        """Replaces `find_memory_optimization_opportunity`: the session without plans is there, the real one is next.

        The applied counts come from this session too: in the real one the recomputed tensors are no longer stashed, so
        that ORT lists nothing about them any more.
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


@contextlib.contextmanager
def _modes_kept(module: torch.nn.Module) -> Iterator[None]:
    """ORTModule() and torch.onnx.export put every submodule into the mode of the root."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextlib.contextmanager
def _all_kinds_of_inputs(transition_manager: type) -> Iterator[None]:
    """With the skip checks off, ORT asserts at the second forward that every input of the graph is a parameter or a
    tensor from the user; there are also buffers (BART) and numbers (num_items_in_batch)."""
    original = transition_manager.__dict__["_reprocess_check"]

    def reprocess_check(flatten_module: Any, args: Any, kwargs: Mapping[str, Any], **others: Any) -> Any:
        tensors = [*flatten_module.named_parameters(), *flatten_module.named_buffers()]
        return original.__func__(
            flatten_module=types.SimpleNamespace(named_parameters=lambda: tensors),
            args=[_as_tensor(value) for value in args],
            kwargs={name: _as_tensor(value) for name, value in kwargs.items()},
            **others,
        )

    with compat.replaced(transition_manager, "_reprocess_check", staticmethod(reprocess_check)):
        yield


def _as_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, bool | int | float) else value
