"""The private names of dynamo and AOTAutograd that the compile engine uses, and what each is for.

Checked in torch 2.13.0 and present since 2.9, unless stated otherwise.
"""

import contextlib
import copy
import functools
import inspect
import logging
import operator
import re
import shutil
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import numpy
import torch
from torch import fx
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.eval_frame import remove_from_cache, skip_code
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.misc import RandomVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.fx.passes.split_module import split_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from optimum_memopt.compat.bitsandbytes import is_quantized, states_of
from optimum_memopt.compat.torch import backward_pass, tensors_in
from optimum_memopt.engines.torch_compat import fx_graph
from optimum_memopt.engines.torch_compat.fake_tensors import fake_copy, is_without_parts, storages, with_attributes
from optimum_memopt.engines.torch_compat.recompiles import (
    MEANT,
    RUN_AHEAD,
    CodePlace,
    Recompile,
    first_line,
    is_of_the_user,
    left_to_python,
    numbers_first,
    place_text,
    source_name,
)
from optimum_memopt.errors import MemOptError, reason_of

__all__ = [
    "CodePlace",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "Recompile",
    "StorageWeakRef",
    "SymbolicNumber",
    "is_of_the_user",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

SymbolicNumber = py_sym_types
# The mode under which tensors have shapes and devices but no data (`torch/_subclasses/fake_tensor.py`).
fake_tensors = FakeTensorMode
# Tags of operators that no CUDA graph can hold.
CUDAGRAPH_UNSAFE = (torch.Tag.cudagraph_unsafe,)
_RECOMPILES = 32
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_NO_LIMIT = 2**31 - 1
# `Logger.warning_once`, which exists once transformers is imported (`transformers/utils/logging.py`).
_ONCE = tuple(filter(None, [getattr(logging.Logger, "warning_once", None)]))
_LOGS_CONFIG, _IGNORED = "_get_dynamo_config_for_logging", "ignore_logging_functions"
# `_HELD` finds an attribute or a global variable in a source name whose quoted keys (`_QUOTED`) are removed.
_QUOTED, _HELD = re.compile(r"'[^']*'"), re.compile(r"\.\w|^G\[")
# Types of values that are not containers.
_LEAVES = (torch.Tensor, bool, int, float, str)


def tree_leaves(values: Any) -> list[Any]:
    """Returns the leaves of nested containers, in order.

    As `torch.utils._pytree.tree_leaves`, with a fast path for lists, tuples and dicts: most of a model's arguments and
    results.
    """
    leaves: list[Any] = []
    for value in values if type(values) in (list, tuple) else (values,):
        if value is None or isinstance(value, _LEAVES):
            leaves.append(value)
        elif type(value) in (list, tuple):
            leaves += tree_leaves(value)
        elif type(value) is dict:
            leaves += tree_leaves(list(value.values()))
        else:
            leaves += _pytree.tree_leaves(value)
    return leaves


def storage_id(tensor: torch.Tensor) -> int:
    """Returns an id of the tensor's storage, the same for all its views; also for a fake tensor, which has no
    address."""
    return tensor.untyped_storage()._cdata


def operator_name(target: Any) -> str:
    """Returns an operator's name, `view` for `aten.view.default`; empty if the target is not an operator of torch."""
    return getattr(target, "_opname", "")


def reads_a_number(target: Any) -> bool:
    """True for the operator that `Tensor.item` calls."""
    return operator_name(target) == "_local_scalar_dense"


def of_trace(inputs: Sequence[Any]) -> list[Any]:
    """Returns a backend's inputs, with fake tensors converted to the fake mode of dynamo's trace.

    torch 2.13 does this itself (`process_inputs` in `torch/_functorch/_aot_autograd/frontend_utils.py`); torch 2.9
    raises AssertionError without it.
    """
    mode: FakeTensorMode | None = getattr(TracingContext.try_get(), "fake_mode", None)
    return [
        mode.from_tensor(value) if mode and is_fake(value) and value.fake_mode is not mode else value
        for value in inputs
    ]


def compile_without_compiler(
    module: fx.GraphModule,
    inputs: list[Any],
    partitioner: CustomPartitionerFn,
    wrap_backward: Callable[[Callable[..., Any]], Callable[..., Any]],
    decompositions: dict[Any, Callable],
) -> Callable:
    """Compile with the backend `aot_eager` (`torch/_dynamo/backends/debugging.py`) and another partitioner.

    No saved activation is donated to the backward, so the backward may run again (`retain_graph=True`); without a
    compiler none is overwritten anyway. inductor's stay donated, since level 1 of a RoBERTa peaks at 6.9 MiB without
    donation and at 5.0 with it. A second backward of inductor's graphs raises torch's error, which names the switch
    `donated_buffer`. This switch must be off while the backward runs too: if it is on, torch refuses unless the list
    of donated buffers exists and is empty (`torch/_functorch/_aot_autograd/runtime_wrappers.py`).

    Unused random numbers are still drawn, as in plain PyTorch; torch removes these draws while it traces, unless
    `fallback_random` is on (`Graph.eliminate_dead_code` in `torch/fx/graph.py`).
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import config

    backend = aot_autograd(
        fw_compiler=fx_graph.run_operators,
        bw_compiler=lambda graph, inputs: wrap_backward(fx_graph.run_backward_operators(graph, inputs)),
        partition_fn=partitioner,
        decompositions=decompositions,
        # Otherwise torch writes after the graph, with gradients on, and the tensor loses its history.
        keep_inference_input_mutations=fx_graph.writes_without_gradients(module.graph),
    )
    draws_all = config.patch(fallback_random=True)
    with draws_all, mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[]):
        return backend(module, inputs)


@contextlib.contextmanager
def configured(
    has_regions: bool, in_python: Collection[CodePlace] = (), skipped: list[types.CodeType] | None = None
) -> Iterator[None]:
    """Set torch's switches for a call of a compiled forward.

    Args:
        has_regions: whether equal layers are compiled once.
        in_python: `places` of `left_to_python`.
        skipped: as of `left_to_python`.

    - `optimize_ddp`: DDP would split the graph at each bucket, and a plan would only see the pieces.
    - `use_duck_shape`: dimensions that happen to be equal in the first batch would share a symbol and recompile.
    - `specialize_float`: torch would turn a model's numbers (`scaling` of an attention) into inputs and trace twice,
      with operators that belong to no module (`torch/fx/passes/_tensorify_python_scalars.py`). A number that
      changes from step to step must be a tensor.
    - `skip_nnmodule_hook_guards`: a hook registered on a submodule after the first step would never be called. Guards
      on hooks cost 0.6 ms of CPU time per forward for a RoBERTa of 12 layers (230 modules).
    - `recompile_limit`, `accumulated_recompile_limit`: torch counts recompiles per code object. After a graph break
      models of one class share code objects, so a fresh model would start at the count of all earlier ones. At the
      limit torch only logs a line and goes on without the plan. The engine counts by itself, see `recompile_limit`.
    - `skip_fsdp_guards`: under FSDP2, equal layers that differ in a Python number would share a graph.
    - `fake_tensor_cache_enabled`: with symbolic sizes a cache entry costs as much as the operator on fake tensors,
      which pays off if equal layers are in one graph. With the cache off for regions, a first step takes 10 to 30%
      less.
    - `use_numpy_random_stream`: torch would trace NumPy's random functions as its own, which draw other numbers from
      another generator (`torch/_numpy/random.py`). With the switch they break the graph, and NumPy draws.
    - `ignore_logger_methods`: a `warning_once` of transformers would break the graph, such as the one about a property
      of configs in Liger Kernel's forwards. Traced code does not log it.
    - `enable_autograd_cache`: a cached joint graph never reaches the partitioner, so there would be no plan table; and
      the cache key would be needed before there is a choice, see `backend`.
    - `backward_pass_autocast`: torch would trace the backward under the autocast of the forward, so that what a model
      computes in float32 within `autocast(enabled=False)` would get gradients of lower precision.

    `backed_size_oblivious`, which would avoid the recompile for a batch of one row, is unchanged: with torch 2.13,
    gradients of such a batch came out wrong (RoBERTa), and others not bitwise equal to PyTorch's (GPT-2).
    """
    limits: dict[str, Any] = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), _NO_LIMIT)
    cache: dict[str, Any] = {"fake_tensor_cache_enabled": False} if has_regions else {}
    with (
        torch._dynamo.config.patch(
            optimize_ddp=False,
            specialize_float=True,
            skip_nnmodule_hook_guards=False,
            skip_fsdp_guards=False,
            use_numpy_random_stream=True,
            ignore_logger_methods={*torch._dynamo.config.ignore_logger_methods, *_ONCE},
            **limits,
            **cache,
        ),
        symbolic_config.patch(use_duck_shape=False),
        functorch_config.patch(enable_autograd_cache=False, backward_pass_autocast="off"),
        numbers_first(),
        # torch would trace the methods of a `random.Random`, and repeat the numbers of the first call in all others.
        mock.patch.object(RandomVariable, "is_supported_random_obj", staticmethod(lambda generator: False)),
        left_to_python(in_python, [] if skipped is None else skipped),
        without_config_in_logs(),
    ):
        yield


def without_config_in_logs() -> contextlib.AbstractContextManager[Any]:
    """Leave torch's switches out of its log of each compile if they cannot be written as JSON: torch 2.11 does not
    skip `ignore_logging_functions`, of which `ignore_logger_methods` is an alias."""
    return mock.patch.object(dynamo_utils, _LOGS_CONFIG, _no_config) if _logs_functions() else contextlib.nullcontext()


def _no_config() -> None:
    """Return no text of the switches; a mock would be slower, in each step."""


@functools.cache
def _logs_functions() -> bool:
    logs = getattr(dynamo_utils, _LOGS_CONFIG, None)
    return hasattr(torch._dynamo.config, _IGNORED) and logs is not None and _IGNORED not in inspect.getsource(logs)


def global_hooks() -> tuple[int, ...]:
    """Returns the ids of global module hooks (`torch/nn/modules/module.py`), which dynamo traces without guards."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return tuple(id for kind in kinds for id in getattr(torch.nn.modules.module, f"_global_{kind}_hooks"))


def recompile_limit() -> int:
    """Returns the most recompiles that one model may have: `_RECOMPILES`, or the user's limit if that is higher.

    torch's 8 are too few if each padded length needs a new graph.
    """
    return max(_RECOMPILES, torch._dynamo.config.recompile_limit)


def compile_alone(forward: Callable[..., Any], backend: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """Apply `torch.compile` to a forward, with recompile reasons of its own.

    Before torch 2.13, which has `isolate_recompiles`, a reason may be a guard of another model with the same code.
    """
    isolated: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATES else {}
    try:
        return torch.compile(forward, backend=backend, dynamic=dynamic, **isolated)
    except OSError as error:
        raise MemOptError(
            f"torch.compile cannot make its cache folder ({reason_of(error)}); set TORCHINDUCTOR_CACHE_DIR to one "
            "that can be written to"
        ) from error


def is_compiled(model: torch.nn.Module) -> bool:
    """True for a module that `torch.compile` has returned (`OptimizedModule`, 2.13)."""
    return isinstance(model, torch._dynamo.OptimizedModule)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of a function or method with its own code object, so that `forget` frees its compiled code alone.

    torch keeps compiled code per code object, and all models of transformers share that of a decorator.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(with_own_code(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    code, names, closure = function.__code__.replace(), function.__globals__, function.__closure__
    copied = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def forward_of(module: torch.nn.Module) -> types.FunctionType | None:
    """Returns the function that is the forward of a module's class; None if it is none, as for scripted modules."""
    forward = getattr(type(module), "forward", None)
    function = None if forward is None else inspect.unwrap(forward)
    return function if isinstance(function, types.FunctionType) else None


def arguments_of(module: torch.nn.Module) -> set[str]:
    """Returns the names of the arguments of a module's forward.

    Reads the code object, since a signature for each of thousands of modules would be slow.
    """
    if (function := forward_of(module)) is None:
        return set()
    code = function.__code__
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def names_in_forward(module: torch.nn.Module) -> set[str]:
    """Returns the names of the globals and attributes that a module's forward reads."""
    function = forward_of(module)
    return set() if function is None else set(function.__code__.co_names)


def draws_with_numpy(function: Callable[..., Any]) -> bool:
    """True for a function whose own code names `numpy.random`, such as those that draw SpecAugment's masks."""
    if not isinstance(function, types.FunctionType):
        return False
    names = function.__code__.co_names
    return "random" in names and any(function.__globals__.get(name) is numpy for name in names)


def file_of(module: torch.nn.Module) -> types.ModuleType | None:
    """Returns the Python module that defines the forward; the class may be in one of torch's, under FSDP2."""
    return sys.modules.get(getattr(forward_of(module), "__module__", None) or "")


def own_forward() -> Callable[..., Any]:
    """Returns a function with its own code object that calls the forward of its first argument, a module."""

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    return with_own_code(forward)


def forget(codes: Iterable[types.CodeType]) -> None:
    """Free the compiled code of these code objects.

    torch's cache of a code object references that object (2.9 to 2.13), and stores compiled functions in the globals
    of its Python module, so neither is freed with the function.
    """
    for code in codes:
        remove_from_cache(code)


@dataclass(frozen=True)
class PendingChange:
    """A change to an object that traced code has not created; dynamo applies it after the graph has run.

    Attributes:
        module: the changed module; None for other objects, and for containers of a module.
        names: names of the attributes that are set; none if items of a container change.
        place: dynamo's name for the object.
    """

    module: torch.nn.Module | None
    names: tuple[str, ...]
    place: str

    def __str__(self) -> str:
        return f"{', '.join(self.names) or 'items'} of {self.place}"


@dataclass(frozen=True)
class Trace:
    """Dynamo's trace of a frame: its fake tensors, symbols and guards (`TracingContext`)."""

    context: TracingContext

    @classmethod
    def current(cls) -> "Trace | None":
        """Returns the trace in progress; None if nothing is traced."""
        context = TracingContext.try_get()
        return None if context is None else cls(context)

    def fakes(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Returns fake tensors for parameters and buffers, the same at each call; sharded ones are whole.

        Args:
            dtype: the dtype in which sharded ones are gathered; None: their own.
        """
        mode = self.context.fake_mode
        assert mode is not None

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if is_without_parts(tensor) or is_quantized(tensor):
                return fake_copy(tensor, mode)
            if not isinstance(tensor, DTensor):
                return mode.from_tensor(tensor, static_shapes=True)
            with mode:
                gathered = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
            return torch.nn.Parameter(gathered, tensor.requires_grad)

        return list(map(fake, tensors))

    @contextlib.contextmanager
    def with_fake_states(self, layer: torch.nn.Module) -> Iterator[None]:
        """Replace the scales and codes that modules hold beside their parameters and buffers by fake tensors.

        Other tensors stay as they are: PEFT's FourierFT has its indices in a dict.
        """
        mode = self.context.fake_mode
        assert mode is not None
        states = ((module, name, fake_copy(state, mode)) for module, name, state in states_of(layer))
        with with_attributes(states), mock.patch.object(mode, "allow_non_fake_inputs", True):
            yield

    @staticmethod
    def changes(objects: Iterable[object]) -> bool:
        """True if the traced code changes one of these objects; dynamo applies the change after the graph has run."""
        effects = _translator().output.side_effects
        variables = (effects.id_to_variable.get(id(each)) for each in objects)
        return any(variable is not None and effects.is_modified(variable) for variable in variables)

    @staticmethod
    def pending_changes(ignored: Iterable[object]) -> Iterator[PendingChange]:
        """Yields the changes that the traced code has made so far to objects that it has not created itself. Python
        creates the dict of a function's keyword arguments (`**kwargs`) for each call, so it is no such object.

        Args:
            ignored: objects that may change.
        """
        output, ids = _translator().output, set(map(id, ignored))
        effects, of_call = output.side_effects, _dict_of_arguments(output.root_tx.f_code)
        for known, variable in effects.id_to_variable.items():
            is_new = isinstance(variable.mutation_type, AttributeMutationNew | ValueMutationNew)
            if variable.mutation_type is None or is_new or known in ids or not effects.is_modified(variable):
                continue
            # Not by `getattr`: dynamo computes the value of a list, which breaks the graph if it holds a tensor.
            held, place = vars(variable).get("value"), getattr(variable.source, "name", "an object")
            # A method before torch 2.13.
            place = place() if callable(place) else place
            if place != of_call:
                is_module = isinstance(held, torch.nn.Module)
                names = tuple(effects.store_attr_mutations.get(variable, ()))
                yield PendingChange(held if is_module else None, names, place)

    @staticmethod
    def keys_set_to(held: object, name: str) -> frozenset[str] | None:
        """Returns the keys of the dict that the traced code has assigned to an attribute, empty if it assigned None.

        None: it has assigned nothing so far, and the attribute has its real value.
        """
        effects = _translator().output.side_effects
        variable = effects.id_to_variable.get(id(held))
        if variable is None or not effects.has_pending_mutation_of_attr(variable, name):
            return None
        keys = getattr(effects.load_attr(variable, name), "items", {})
        return frozenset(key.vt.as_python_constant() for key in keys)

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the trace again, to recompile its graph or a part of it.

        Uses a copy of the context: AOTAutograd stores in it what it compiles the backward with, maybe later
        (`fw_metadata`; `DDPOptimizerContext` in `torch/_dynamo/backends/distributed.py` has the same purpose).
        """
        return tracing(copy.copy(self.context))


def split(module: fx.GraphModule, number_of: Callable[[fx.Node], int]) -> fx.GraphModule:
    """Split a traced graph into submodules that return tuples: one for all nodes of a number, in order.

    Each has the sources of its inputs for AOTAutograd, as the graph that dynamo has traced (`propagate_metadata` in
    `torch/_dynamo/backends/distributed.py`).
    """
    whole = _split(module, number_of)
    sources = {node.name: node._dynamo_source for node in module.graph.find_nodes(op="placeholder")}
    for piece in whole.children():
        if not isinstance(piece, fx.GraphModule):
            continue
        piece.meta = module.meta
        piece._param_name_to_source = module._param_name_to_source
        for node in piece.graph.find_nodes(op="placeholder"):
            node._dynamo_source = sources.get(node.name)
    return whole


def generated_forward(module: fx.GraphModule) -> Callable[..., Any]:
    """Returns the forward of a graph as generated code, without the calls that generate it when it first runs
    (`torch/fx/_lazy_graph_module.py`)."""
    _LazyGraphModule.force_recompile(module)
    return module.forward


def _split(module: fx.GraphModule, number_of: Callable[[fx.Node], int]) -> fx.GraphModule:
    """Call `split_module`, and have its submodules return tuples, which it has an option for since torch 2.12
    (https://github.com/pytorch/pytorch/pull/179007)."""
    if "tuple_return" in inspect.signature(split_module).parameters:
        return split_module(module, module, number_of, keep_original_order=True, tuple_return=True)
    whole = split_module(module, module, number_of, keep_original_order=True)
    for call in whole.graph.find_nodes(op="call_module"):
        piece = cast("fx.GraphModule", whole.get_submodule(cast("str", call.target)))
        (output,) = piece.graph.find_nodes(op="output")
        if isinstance(output.args[0], tuple):
            continue
        output.args = ((output.args[0],),)
        piece.recompile()
        with whole.graph.inserting_after(call):
            result = whole.graph.call_function(operator.getitem, (call, 0))
        call.replace_all_uses_with(result, delete_user_cb=lambda user, result=result: user is not result)
    whole.recompile()
    return whole


@functools.cache
def holds_tangents() -> bool:
    """True if torch keeps the tangents of a compiled backward alive until it has finished; since 2.13 the backward
    takes ownership of them (`boxed_grads_call` in `torch/autograd/function.py`)."""
    return "boxed_grads_call" not in inspect.getsource(torch.autograd.function)


def traced_storages(node: fx.Node) -> set[int]:
    """Returns ids of the storages of a node's traced tensors, which views share."""
    return {held.address for tensor in tensors_in(node.meta.get("example_value")) for held in storages(tensor)}


def writes_to_any(node: fx.Node, held: set[int]) -> bool:
    """True if a call in a dynamo graph writes to one of these storages, see `traced_storages`."""
    return any(held & traced_storages(written) for written in fx_graph.written_in_trace(node))


def traced_value(node: fx.Node) -> Any:
    return node.meta["example_value"]


def as_operator(function: types.FunctionType) -> Callable[..., Any]:
    """Make `function` one operator of every graph that dynamo traces (`allow_in_graph` in
    `torch/_dynamo/decorators.py`).

    Dynamo calls it with fake tensors for the shapes of its results. If Python calls it, as in a loop with a graph
    break, it is not traced either; the functions that it calls may be.
    """
    skip_code(function.__code__)
    function.is_operator_of_python = True
    return cast("Callable[..., Any]", torch._dynamo.allow_in_graph(function))


def is_operator_of_python(node: fx.Node) -> bool:
    """True for a call of a function that `as_operator` returned."""
    return getattr(node.target, "is_operator_of_python", False)


def registers_hook(node: fx.Node) -> bool:
    """True for the registration of a hook on a computed tensor (torch 2.13 and later, `register_hook_op` in
    `torch/_higher_order_ops/register_hook.py`; earlier releases break the graph there)."""
    return getattr(node.target, "__name__", "") == "register_hook"


def enters_inference_mode(node: fx.Node) -> bool:
    """True for the call that enters `torch.inference_mode` (`torch/autograd/grad_mode.py`, 2.13)."""
    return getattr(node.target, "__name__", "") == "_enter_inference_mode"


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude `function`, and all that it calls, from traces; a call of it breaks the graph."""
    return cast("Callable[..., Any]", torch._dynamo.disable(function, reason=MEANT))


def is_all_of(code: types.CodeType) -> bool:
    """True if the graph that is being partitioned is the only one of a call of a function with this code.

    It is if the frame of the function itself, not only of one that it calls, was traced up to its return
    (`torch/_dynamo/symbolic_convert.py`, `GraphCompileReason` in `output_graph.py`).
    """
    translator = _translator()
    is_traced = translator is not None and translator.f_code is code
    return is_traced and not translator.output.compile_subgraph_reason.graph_break


def traced_module() -> torch.nn.Module | None:
    """Returns, while a graph is partitioned, the module whose forward, or its rest after a graph break, was traced."""
    translator = _translator()
    traced = translator.f_locals.get("self") if translator is not None else None
    return traced if isinstance(traced, torch.nn.Module) else None


def _dict_of_arguments(code: types.CodeType) -> str:
    """Returns dynamo's name for the dict of a function's further keyword arguments; empty if it takes none."""
    name = inspect.getargs(code).varkw
    return "" if name is None else f"L[{name!r}]"


def _translator() -> Any:
    # The translator is thread-local, and the attribute is missing before the first one.
    with contextlib.suppress(AttributeError):
        return InstructionTranslator.current_tx()
    return None


# Files of the functions that operators of this package compile.
_OF_OPERATORS: set[str] = set()


def compiled_in_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function without graph breaks that an operator of this package calls, for all sizes.

    Its graphs do not count among a model's.
    """
    _OF_OPERATORS.add(function.__code__.co_filename)
    # torch counts recompiles per code object, which functions that differ only in their closures share.
    return torch.compile(with_own_code(function), dynamic=True, fullgraph=True)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Dispatch operators below autograd, without view tracking, whatever the caller's state: torch has guards on
    both."""
    with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
        yield


class Watch:
    """Reasons for recompiles and graph breaks since its creation, one line each (`torch/_dynamo/utils.py`)."""

    def __init__(self) -> None:
        self._compiled = dynamo_utils.get_compilation_metrics()
        self._breaks = {kind: Counter(dynamo_utils.counters[kind]) for kind in ("graph_break", "unimplemented")}
        self._placed = len(dynamo_utils.graph_break_reasons)

    def recompiles(self) -> list[Recompile]:
        before = set(map(id, self._compiled))
        all_compiled = dynamo_utils.get_compilation_metrics()
        of_models = (metrics for metrics in all_compiled if metrics.co_filename not in _OF_OPERATORS)
        new = (metrics for metrics in of_models if id(metrics) not in before)
        return list(filter(None, map(Recompile.of, new)))

    def graph_breaks(self) -> list[str]:
        # torch counts a graph break in a loop as unimplemented only, and runs its frame in Python.
        new = {kind: dynamo_utils.counters[kind] - before for kind, before in self._breaks.items()}
        found = new["graph_break"] or new["unimplemented"]
        breaks = [first_line(text) for text in found if MEANT not in text]
        places: dict[str, dict[str, None]] = {line: {} for line in breaks}
        for reason in dynamo_utils.graph_break_reasons[self._placed :]:
            if (line := first_line(reason.reason)) in places:
                places[line][place_text(reason.user_stack)] = None
        return [f"{line}{place}" for line in places for place in places[line] or ("",)]

    def last_cause(self) -> str:
        """Returns the cause of the last graph, as `failed guard: x > 1`; empty if none is known."""
        guards = [f"failed guard: {recompile.guard}" for recompile in self.recompiles()]
        return next(reversed(guards or [f"graph break: {reason}" for reason in self.graph_breaks()]), "")


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def state_source(node: fx.Node) -> str:
    """Returns the source of an input that is an attribute or a global, as `L['self']._buffers['bias']`; empty for
    arguments of the traced function (`torch/_dynamo/source.py`)."""
    name = _source_of(node)
    return name if _HELD.search(_QUOTED.sub("", name)) and RUN_AHEAD not in name else ""


def _source_of(node: fx.Node) -> str:
    return source_name(source) if (source := getattr(node, "_dynamo_source", None)) is not None else ""


def clear_static_marks(module: fx.GraphModule) -> None:
    """Clear the marks of static inputs from the results of a module that has run ahead, which change in each step.

    torch marks every tensor that it reaches through a module (`wrap_tensor` in `torch/_dynamo/variables/builder.py`,
    2.13).
    """
    for node in module.graph.find_nodes(op="placeholder"):
        if RUN_AHEAD in _source_of(node):
            node.meta.get("tensor_dict", {}).pop("_dynamo_static_input_type", None)


def inductor_works(device_type: str) -> bool:
    """True if inductor finds its compiler: a C++ compiler for the CPU, Triton for other devices."""
    from torch._inductor import config
    from torch.utils._triton import has_triton

    if device_type != "cpu":
        return has_triton()
    compilers = config.cpp.cxx if isinstance(config.cpp.cxx, tuple | list) else (config.cpp.cxx,)
    return any(compiler and shutil.which(compiler) for compiler in compilers)


def backward_runs_once() -> bool:
    """True inside a backward after which autograd frees the saved tensors (no `retain_graph=True`).

    AOTAutograd checks the same before it overwrites saved activations (`_aot_autograd/runtime_wrappers.py`).
    """
    is_backward = backward_pass() != -1
    return is_backward and not torch._C._autograd._get_current_graph_task_keep_graph()
