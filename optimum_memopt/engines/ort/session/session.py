"""Builds an ORTModule and runs training forwards through it."""

import contextlib
import functools
import importlib
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from optimum_memopt.compat.installed import installed_version
from optimum_memopt.compat.transformers import is_encoder_decoder
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.checks import check_operators, refuse_side_effects
from optimum_memopt.engines.ort.compat import internals, ortmodule
from optimum_memopt.engines.ort.compat.installation import DISTRIBUTIONS
from optimum_memopt.engines.ort.graph_fixes import IndexCheck, as_index_error, mend
from optimum_memopt.engines.ort.options import OrtOptions, ignored_options, variables
from optimum_memopt.engines.ort.session import graph_plans, module_with_loss
from optimum_memopt.engines.ort.session.export_cache import cached_exports
from optimum_memopt.engines.ort.traced_values import refuse_wrong_values
from optimum_memopt.errors import MemOptError, excerpt, says_out_of_memory
from optimum_memopt.logs import announced, get_logger
from optimum_memopt.plans.table import PlanTable

# A failed check in ORT's C++ code: path, line, signature, condition or status, and usually a reason.
_FAILED_CHECK = re.compile(
    r"/onnxruntime_src/\S*?(?P<place>[^/\s]+:\d+) .*\)>? (?:const )?"
    r"(?P<condition>\S.*was false\.|\[ONNXRuntimeError\][^:]*:[^:]*:[^:]*:) ?(?P<reason>.*)"
)
# A failed assertion in torch's C++ code, such as its exporter.
_FAILED_ASSERT = re.compile(
    r"(?P<condition>\S.*?) ?INTERNAL ASSERT FAILED at \"\S*?(?P<place>[^/\s\"]+)\":\d+, "
    r"please report a bug to PyTorch\. ?(?P<reason>.*)"
)
_LONGEST_REASON = 300


class OrtSession:
    """Builds an ORTModule around `module` and runs training forwards through it.

    Attributes:
        internals: the ORTModule's private objects.
        plans: plans of the current training graph.
        table: plan table of the current training graph, a new object for each graph; None before the first.
        insight: ONNX Runtime's own per-node text of the current training graph.
        is_building: whether the last forward has not finished building the session.
        backward_is_due: whether the backward of the last forward has not run yet.

    Raises:
        MemOptError: ORT ignored one of the options.
    """

    def __init__(self, module: torch.nn.Module, options: OrtOptions, selection: Selection) -> None:
        ort, self._has_extensions = ortmodule.load()
        self.plans, self.insight = graph_plans.GraphTable(), ""
        self.table: PlanTable | None = None
        self.is_building, self.backward_is_due = True, False
        self._options, self._selection = options, selection
        self._environment = variables(options)
        self._config_file = ""
        self._inlined_functions: list[str] = []
        self._index_checks: dict[str, IndexCheck] = {}
        with (
            ortmodule.environment(self._environment),
            internals.register_symbolics(options.ort_opset or ort.ONNX_OPSET_VERSION),
            internals.without_torch_gpu_allocator(),
            self._quiet(),
            internals.preserve_training_modes(module),
        ):
            levels = {"devinfo": ort.LogLevel.DEVINFO, "verbose": ort.LogLevel.VERBOSE}
            level, folder = levels.get(options.memory_opt_log_level, ort.LogLevel.ERROR), options.ort_save_onnx or ""
            name = type(module).__name__
            debug_options = ort.DebugOptions(level, save_onnx=bool(folder), onnx_prefix=name, save_path=folder)
            self._ort = ort.ORTModule(module, debug_options)
            self.internals = internals.SessionInternals(self._ort)
            if ignored := ignored_options(options, self.internals.options):
                raise MemOptError(f"this build of ONNX Runtime does not support {', '.join(ignored)}; leave it out")
            self._patch_instance()
        # ORT's import replaces torch.manual_seed to forward every seed; compat undoes that, so forward it here.
        importlib.import_module("onnxruntime").set_seed(torch.initial_seed() % (2**63 - 1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training forward; the outputs have a grad_fn whose backward runs in ORT.

        Raises:
            MemOptError: the graph lacks a requested plan, ORT did not apply one, or operators need the extensions.
            IndexError: a label or an id is out of range, as in PyTorch.
            torch.OutOfMemoryError: also from the backward of the outputs.
            Exception: any error of ORT for a graph that it cannot build or run.
        """
        with translate_out_of_memory(), contextlib.ExitStack() as self._announcement:
            try:
                return self._ort(*args, **kwargs)
            except Exception as error:
                self.backward_is_due = False
                if (index_error := as_index_error(error, self._index_checks)) is not None:
                    raise index_error from None
                raise

    def close(self) -> None:
        """Delete the temporary config file, which still exists if building the session failed before ORT read it."""
        if self._config_file:
            Path(self._config_file).unlink(missing_ok=True)
            self._config_file = ""

    def _patch_instance(self) -> None:
        options = self.internals.options
        options.use_external_gpu_allocator = False
        if self._options.ort_custom_autograd is False:
            options.enable_custom_autograd_function = False
        options.recompute_probe_config = "1:1" if self._selection.level else "1:0"
        self.internals.patch_export(self._during_forward, self._during_export, self._during_trace)
        self.internals.patch_run(
            build_graph=lambda original: functools.partial(self._build_graph, original),
            session_config=lambda original: functools.partial(self._session_config, original),
            create_session=ortmodule.environment(self._environment),
            backward=lambda original: single_backward(translate_out_of_memory()(original)),
        )
        self.internals.set_callbacks(self._choose, self._phase, self._built)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Returns a context that hides the exporter's warnings about traced branches, and warnings of deprecated
        properties, which ORTModule reads when it lists the model's members."""
        with warnings.catch_warnings():
            if self._options.memory_opt_log_level != "verbose":
                warnings.simplefilter("ignore")
            yield

    @contextlib.contextmanager
    def _during_forward(self) -> Iterator[None]:
        with ortmodule.environment(self._environment), self.internals.fix_gradient_management_device():
            yield

    @contextlib.contextmanager
    def _during_export(self) -> Iterator[None]:
        self.is_building = True
        session = f"the ONNX Runtime session of {type(self.internals.module).__name__}"
        note = "exports the model and differentiates its graph; once for each kind of batch"
        self._progress = self._announcement.enter_context(announced(f"building {session}", f"built {session}", note))
        self._progress.stage = "exporting the model"
        options = self.internals.options
        # With the loss in the graph, labelled rows are selected already; ORT's marker would remain and print.
        marks_labels = options.enable_label_sparse_optimizer and not self._options.ort_module_with_loss
        with contextlib.ExitStack() as stack:
            stack.enter_context(internals.keep_output_visible())
            if self._options.memory_opt_log_level != "verbose":
                stack.enter_context(internals.without_exporter_log())
            opset, functions = options.onnx_opset_version, options.enable_custom_autograd_function
            stack.enter_context(internals.register_symbolics(opset, functions))
            stack.enter_context(module_with_loss.exportable(opset))
            stack.enter_context(self._quiet())
            stack.enter_context(internals.preserve_training_modes(self.internals.module))
            if self._options.ort_allow_autograd_checkpoint:
                stack.enter_context(internals.check_checkpointed_functions())
            stack.enter_context(self.internals.fix_label_sparsity_switch(marks_labels))
            if not functions:
                self._inlined_functions = stack.enter_context(internals.record_autograd_functions())
            if folder := self._options.ort_cache_dir:
                versions = torch.__version__, installed_version(DISTRIBUTIONS), installed_version(("optimum-memopt",))
                dependencies = (*versions, *internals.symbolic_names(), *sorted(self._environment.items()))
                stack.enter_context(cached_exports(Path(folder), tuple(map(str, dependencies))))
            yield

    @contextlib.contextmanager
    def _during_trace(self) -> Iterator[None]:
        module = self.internals.module
        with refuse_wrong_values(module), refuse_side_effects(module):
            yield

    def _build_graph(self, original: Callable[[Any], None], configuration: Any) -> None:
        self._progress.stage = "building the training graph"
        given = self._options
        rewrites = (given.ort_efficient_attention, given.ort_flash_attention, given.ort_triton)
        with ortmodule.environment(self._environment), internals.select_graph_optimizers(*rewrites):
            original(configuration)
        self._index_checks = mend(self.internals.graph, self.internals.module)

    def _session_config(self, original: Callable[[], Any]) -> Any:
        session_options, providers, provider_options = original()
        # The arena never shrinks: memory that a plan saves would not be available to the rest of the process.
        session_options.enable_cpu_mem_arena = self._options.ort_arena
        if self._options.ort_arena:
            register_arena()
            session_options.add_session_config_entry("session.use_env_allocators", "1")
        # Use as many threads as torch, so that a launcher's OMP_NUM_THREADS applies to both.
        session_options.intra_op_num_threads = torch.get_num_threads()
        if self._selection.level or self._selection.config is not None:
            # ORT's default order recomputes tensors early and keeps them alive, which saves nothing.
            order = importlib.import_module("onnxruntime").ExecutionOrder
            session_options.execution_order = order.MEMORY_EFFICIENT
        return session_options, providers, provider_options

    def _choose(self, agent: Any, options: Any) -> None:
        """Choose plans, using ORT's session without plans; ORT creates the final session next.

        The applied counts come from the session without plans too: in the final one, recomputed tensors are no longer
        stashed, so ORT does not list them.
        """
        self.close()
        self._progress.stage = "creating the session"
        module, graph, selection = self.internals.module, self.internals.graph, self._selection
        check_operators(type(module).__name__, self._inlined_functions, graph, self._has_extensions)
        probe = options.recompute_probe_config
        options.memory_optimizer_config_file_path = ""
        text, symbolics = agent.get_serialized_ortmodule_memory_stat("", probe, True)
        frequencies = {config: int(saving[1]) for config, saving in symbolics.items()}
        dimensions, kind = self.internals.dimensions, is_encoder_decoder(module)
        self.plans = graph_plans.choose_plans(text, frequencies, dimensions, kind, selection, graph)
        for remark in self.plans.choice.remarks:
            get_logger().warning(remark)
        if self.plans.choice.configs:
            options.memory_optimizer_config_file_path = self._write_config(self.plans.choice.configs)
            text, _ = agent.get_serialized_ortmodule_memory_stat(self._config_file, probe, True)
        counts = graph_plans.applied_counts(graph_plans.parse_insight(text))
        if idle := graph_plans.check_applied(self.plans.choice, counts, selection.strict and not selection.level):
            get_logger().warning(idle)
        if self.table is not None:
            get_logger().info("the inputs changed: ONNX Runtime built a new training graph")
        provider = "CUDAExecutionProvider" if self.internals.device.type == "cuda" else "CPUExecutionProvider"
        header = f"{type(module).__name__} on {provider}, {selection.name or 'no plan'}"
        self.insight, self.table = text, self.plans.to_table(counts, header)

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

    def _phase(self, phase: Any) -> None:
        # The first phase of a forward and the last of its backward (`Phase` in _runtime_inspector.py).
        if int(phase) in (0, 3):
            self.backward_is_due = int(phase) == 0

    def _built(self) -> None:
        self.is_building = False
        self.close()
        self._announcement.close()


@contextlib.contextmanager
def translate_out_of_memory() -> Iterator[None]:
    """Returns a context that raises torch.OutOfMemoryError if ORT reports out of memory as a failed node.

    Code that retries with a smaller batch, such as Trainer's auto_find_batch_size, looks for torch's error and for the
    words "out of memory" (accelerate, `should_reduce_batch_size`).
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or not says_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(f"ONNX Runtime is out of memory. {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Returns the last meaningful line of an error; ORT's messages contain tracebacks and C++ signatures."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if failed := _FAILED_CHECK.search(lines[-1]) or _FAILED_ASSERT.search(lines[-1]):
        lines[-1] = f"{failed['place']}: {failed['reason'] or failed['condition']}"
    return f"{type(error).__name__}: {excerpt(lines[-1], longest=_LONGEST_REASON)}"


def single_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the backward of ORT's autograd function, wrapped to raise MemOptError if gradients would silently be
    lost: with `create_graph=True` (a gradient penalty would have no effect), and in a second backward of one
    forward."""

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        # Autograd enables gradients during a backward only for create_graph.
        if torch.is_grad_enabled():
            raise MemOptError(
                "backward with create_graph=True through ONNX Runtime, whose gradients have no graph; train "
                "without the engine if the loss depends on gradients"
            )
        # ORT's backward deletes `state` (onnxruntime-training 1.19.2, `_training_manager.py`).
        if not hasattr(ctx.run_info, "state"):
            raise MemOptError(
                "a second backward of one forward (retain_graph=True) through ONNX Runtime, which frees its "
                "activations in the first; add up the losses and call backward() once, or use --memory_opt_engine "
                "compile"
            )
        return backward(ctx, *gradients)

    return checked


@functools.cache
def register_arena() -> None:
    """Register an arena for the sessions of this process that set `session.use_env_allocators`.

    ORT's default arena grows by powers of two and returns blocks with up to 128 MiB of unused space. This one grows by
    the requested size and leaves at most 1 MiB unused: the same speed at a lower peak (docs/ort.md). An arena
    registered by the user is kept.
    """
    import onnxruntime

    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    info = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    sizes = {"max_mem": 0, "initial_chunk_size_bytes": -1, "max_dead_bytes_per_chunk": 1 << 20}
    try:
        config = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1, **sizes})
        onnxruntime.create_and_register_allocator(info, config)
    except RuntimeError as error:
        if "already been registered" not in str(error):
            raise
