"""Runs Python code on fake tensors as on real ones (`torch/_subclasses/fake_tensor.py`, 2.13).

Code may branch on known values: those of tensors with a `constant`, of tensors that are drawn or made from numbers
alone, and of small results that operators compute from these.
"""

import contextlib
import copy
import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from optimum_memopt.compat.torch import class_forward, tensors_in
from optimum_memopt.engines.shared.forward_patch import Attribute
from optimum_memopt.engines.shared.function_state import variables_around
from optimum_memopt.engines.torch_compat.function_caches import clean_caches
from optimum_memopt.engines.torch_compat.patches import Name, Patch
from optimum_memopt.logs import get_logger

# Errors for a value, or a shape that depends on values, that is not known.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
# The largest number of elements whose values are tracked, for integers and booleans: ids and masks of a batch.
_MOST_VALUES = 2**20
# The same for floating-point numbers: weights of losses, step counts.
_FEW_VALUES = 64
_MOST_CONSTANTS = "CONSTANT_NUMEL_LIMIT"
_FOREACH_TYPES = "_foreach_supported_types"
_aten = torch.ops.aten
SIMULATED = Patch(
    "plain PyTorch on tensors without data",
    "predictions of plain PyTorch have the attention masks of a traced forward",
    "transformers",
    since="5.0",
    tested="5.0 to 5.24",
    names=(Name("transformers.utils.import_utils", "is_fake_tensor"),),
)
VALUES = Patch(
    "values of tensors without data",
    "predictions of plain PyTorch fail if a model reads values of its batch",
    "torch",
    since="2.9",
    tested="2.9 to 2.15",
    names=(
        Name("torch._subclasses.fake_tensor", _MOST_CONSTANTS),
        Name("torch.utils._foreach_utils", "_get_foreach_kernels_supported_devices"),
    ),
)
# The gradient scaler's in-place operators, run as if all gradients were finite: the loss scale, and whether a step is
# skipped, stay known.
_SCALER = (_aten._amp_foreach_non_finite_check_and_unscale_.default, _aten._amp_update_scale_.default)
_RESIZED_LOSSES = (_aten.mse_loss.default, _aten.smooth_l1_loss.default)
# Types that `copy.deepcopy` returns as they are.
_NOT_COPIED = (
    type,
    str,
    bytes,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.ModuleType,
    types.FrameType,
    types.TracebackType,
    BaseException,
)
_T = TypeVar("_T")


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Keep torch from logging a traceback for each error that an operator raises on fake tensors."""
    with mock.patch.object(fake_tensor.log, "exception"):
        yield


@dataclass(frozen=True)
class HeldStorage:
    """The storage of a tensor, real or fake.

    Attributes:
        address: a number unique among the live storages.
    """

    storage: torch.UntypedStorage

    @property
    def address(self) -> int:
        return self.storage._cdata

    @property
    def bytes(self) -> int:
        return self.storage.nbytes()

    def on_release(self, call: Callable[[int], None]) -> None:
        """Call a function with the address when the storage is freed."""
        weakref.finalize(self.storage, call, self.address).atexit = False


def storages(tensor: torch.Tensor) -> list[HeldStorage]:
    """Returns a tensor's storages: several for a wrapper subclass, one otherwise."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [storage for name in names for storage in storages(getattr(tensor, name))]
    return [HeldStorage(tensor.untyped_storage())]


_WITHOUT_KERNEL = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten._unsafe_view)


@contextlib.contextmanager
def run_as_eager() -> Iterator[None]:
    """Run code on fake tensors as in eager mode.

    Models do not see that they are traced, values of small tensors are tracked, optimizers use their foreach
    implementations, and TorchScript functions run as the Python that they were compiled from. Checks of values pass.

    transformers builds other masks while it is traced (`is_tracing`, 5.23). TorchScript's interpreter mixes real
    tensors with fake ones (DeBERTa-v2 in transformers 5.17).
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils
    from transformers.utils import import_utils

    for line in filter(None, (patch.problem() for patch in (SIMULATED, VALUES))):
        get_logger().warning(line)

    def passes(*_: Any) -> None:
        pass

    replaced = (
        (fake_tensor, _MOST_CONSTANTS, _MOST_VALUES),
        (import_utils, "is_fake_tensor", lambda _: False),
        (torch, "tensor", _tensor_of),
        (torch, "_check_tensor_all", passes),
        (torch, "_check_tensor_all_with", passes),
        *(
            (owner, _FOREACH_TYPES, [*getattr(owner, _FOREACH_TYPES), FakeTensor])
            for owner in (optimizer, _foreach_utils)
        ),
    )
    with (
        with_attributes(each for each in replaced if hasattr(*each[:2])),
        mock.patch.object(torch.jit.ScriptFunction, "__call__", _call_source),
        without_launches(),
        clean_caches(),
    ):
        yield


def said_to_compile() -> contextlib.AbstractContextManager[Any]:
    """Make `torch.compiler.is_compiling()` true within the context, as it is in traced code; before torch 2.12 it is
    not true in the Python code that dynamo calls meanwhile (`torch/_dynamo/convert_frame.py`)."""
    return with_attributes([(torch.compiler, "_is_compiling_flag", True)])


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Skip launches of Triton kernels with fake tensors, which have no addresses; the memory that a kernel writes to
    is allocated before (`triton/runtime/jit.py`, `autotuner.py`, 3.7)."""
    triton: Any = sys.modules.get("triton.runtime")
    with contextlib.ExitStack() as stack:
        for kernels in () if triton is None else (triton.JITFunction, triton.Autotuner, triton.Heuristics):
            stack.enter_context(mock.patch.object(kernels, "run", _unless_fake(kernels.run)))
        yield


def _unless_fake(run: Callable[..., Any]) -> Callable[..., Any]:
    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_fake = any(isinstance(arg, FakeTensor) for arg in pytree.tree_leaves((args, kwargs)))
        return None if is_fake else run(self, *args, **kwargs)

    return launched


_CALL_SCRIPT = torch.jit.ScriptFunction.__call__


def _call_source(function: Any, *args: Any, **kwargs: Any) -> Any:
    # Set in `torch/jit/_script.py`, 2.13; a function that was loaded from a file has no source.
    source = getattr(function, "_torchdynamo_inline", None)
    return _CALL_SCRIPT(function, *args, **kwargs) if source is None else source(*args, **kwargs)


_TENSOR = torch.tensor


def _tensor_of(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call `torch.tensor` on lists with fake scalars as numbers, since it would read the memory of these."""
    return _TENSOR(_numbers_in(data), *args, **kwargs)


def _numbers_in(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_numbers_in(each) for each in data]
    return data.item() if isinstance(data, FakeTensor) and not data.dim() else data


def mode_without_pointers() -> FakeTensorMode:
    """Returns a mode whose tensors raise an error for `data_ptr`, since kernels outside of torch, such as Triton's,
    would write to that address."""
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return FakeTensorMode()


def fake_copy(value: _T, mode: FakeTensorMode, device: str | None = None, keeps_values: bool = False) -> _T:
    """Returns a deep copy of a module, an optimizer, a container or another object, with fake tensors.

    Tensors that share storage do so in the copy. Tensors of a subclass that does not wrap others, such as
    bitsandbytes' `Params4bit` (0.50), become plain tensors with its attributes.

    Args:
        value: the object; its tensors may be on any device, including `meta`.
        device: the device of the copy's tensors; None: that of the original.
        keeps_values: whether to track the values of small tensors of integers and booleans, and of tensors of a few
            other numbers.

    Raises:
        TypeError: `value` contains a module of TorchScript.
    """
    objects = list(reachable(value))
    if any(isinstance(found, torch.jit.ScriptModule) for found in objects):
        raise TypeError(
            "the tensors of a TorchScript module cannot be replaced; pass the module that it was made from"
        )
    tensors = [found for found in objects if isinstance(found, torch.Tensor)]
    bases: dict[int, torch.Tensor] = {}
    memo: dict[int, Any] = {}
    with mode:
        for tensor in tensors:
            if keeps_values and _may_be_read(tensor):
                memo[id(tensor)] = _with_its_values(tensor, mode, device)
            else:
                memo[id(tensor)] = _fake_of(tensor, mode, device, bases)
        for tensor in tensors:
            made = memo[id(tensor)]
            if tensor.grad is not None:
                made.grad = memo[id(tensor.grad)]
            for name, attribute in vars(tensor).items():
                if name not in vars(made):
                    setattr(made, name, copy.deepcopy(attribute, memo))
        return copy.deepcopy(value, memo)


def is_real(tensor: torch.Tensor) -> bool:
    """True for a tensor with data."""
    return not isinstance(tensor, FakeTensor) and not is_traceable_wrapper_subclass(tensor)


def fakes_of(tensors: Sequence[torch.Tensor], mode: FakeTensorMode) -> list[torch.Tensor]:
    """Returns fake tensors for real ones, without their gradients and hooks; see `fake_copy` on values and on tensors
    of a subclass."""
    made: dict[int, torch.Tensor] = {}
    bases: dict[int, torch.Tensor] = {}
    with mode:
        for tensor in tensors:
            if id(tensor) in made:
                continue
            is_known = _may_be_read(tensor)
            fake = _with_its_values(tensor, mode) if is_known else _fake_of(tensor, mode, None, bases)
            fake.grad = None
            for name, attribute in vars(tensor).items():
                if name not in vars(fake):
                    setattr(fake, name, attribute)
            made[id(tensor)] = fake
    return [made[id(tensor)] for tensor in tensors]


def tiled(tensor: torch.Tensor, shape: Sequence[int], mode: FakeTensorMode) -> torch.Tensor:
    """Returns a tensor of a given shape that repeats another tensor's values along each dimension, if they are
    known."""
    values = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if values is None:
        return tensor.new_empty(shape)
    with unset_fake_temporarily():
        for dim, size in enumerate(shape):
            places = torch.arange(size, device=values.device) % max(1, values.shape[dim])
            values = values.index_select(dim, places)
    return _with_its_values(values, mode)


def is_without_parts(tensor: torch.Tensor) -> bool:
    """True for a tensor of a subclass that does not wrap other tensors, which torch has no fake tensors for."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return not is_plain and not is_traceable_wrapper_subclass(tensor)


def fake_model(model: torch.nn.Module) -> tuple[FakeTensorMode, torch.nn.Module]:
    """Returns a fake mode, and a copy of a model with fake parameters and buffers to run in it.

    Tensors that the model's code holds elsewhere stay real. The copy has its class's forward, without the wrappers on
    the model: those of engines, and accelerate's autocast.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = fake_copy(model, mode)
    vars(copied).pop("forward", None)
    return mode, copied


# An object with a `__dict__`, such as a Python module, an `nn.Module` or a tensor; an attribute's name; its new value.
Replacement = tuple[Any, str, Any]
_MISSING = object()


@contextlib.contextmanager
def with_attributes(replacements: Iterable[Replacement]) -> Iterator[Sequence[Replacement]]:
    """Replace attributes, and restore them afterwards; yields replacements that restore them, the first one last. Each
    is set before the next replacement is taken from the iterable."""
    before: list[Replacement] = []
    try:
        for owner, name, value in replacements:
            before.append((owner, name, vars(owner).get(name, _MISSING)))
            _set(owner, name, value)
        yield tuple(reversed(before))
    finally:
        for owner, name, value in reversed(before):
            _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    # A class's `__dict__` is read-only, and a module's `__setattr__` would register tensors.
    held: Any = vars(owner)
    if isinstance(owner, type):
        delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
    elif value is _MISSING:
        held.pop(name, None)
    else:
        held[name] = value


@contextlib.contextmanager
def replaced(
    holders: Sequence[torch.nn.Module | torch.optim.Optimizer], copied: Callable[[Any], Any]
) -> Iterator[None]:
    """Replace the tensors of modules and optimizers, and restore them and their gradients afterwards.

    Args:
        copied: returns the replacements; called once, with a list of all tensors.
    """
    before = list(_places(holders))
    others = copied([tensor for _, _, tensor in before])
    gradients = [(tensor, tensor.grad) for _, _, tensor in before]
    try:
        for (owner, key, _), tensor in zip(before, others, strict=True):
            owner[key] = tensor
        yield
    finally:
        for owner, key, tensor in before:
            owner[key] = tensor
        for tensor, gradient in gradients:
            tensor.grad = gradient


@contextlib.contextmanager
def recorded_reads(attributes: Iterable[tuple[torch.nn.Module, Collection[str]]]) -> Iterator[set[str]]:
    """Yields a set that gets the names of those attributes that are read within the context.

    Args:
        attributes: modules, and names of their attributes.
    """
    read: set[str] = set()
    watched = {module: frozenset(names) for module, names in attributes}

    def recording(kind: type[torch.nn.Module]) -> Callable[[torch.nn.Module, str], Any]:
        get = kind.__getattribute__

        def recorded(module: torch.nn.Module, name: str) -> Any:
            names = watched.get(module, frozenset())
            # `vars` may read any of them.
            read.update(names if name == "__dict__" else names & {name})
            return get(module, name)

        return recorded

    with contextlib.ExitStack() as stack:
        for kind in {type(module) for module in watched}:
            stack.enter_context(mock.patch.object(kind, "__getattribute__", recording(kind)))
        yield read


def attribute_set_by(run: Callable[[], Any], layer: torch.nn.Module) -> tuple[Any, str]:
    """Returns the result of a layer's forward on fake tensors, and the name of state that it changes; empty if none.

    State is an attribute that is a tensor or a number, or a list or other container among the attributes of the layer
    and the variables around its functions. Changes are undone if there is such state: code that reads it outside of
    the layers is traced before their forwards really run.
    """
    containers = [container for module in layer.modules() for container in Attribute.containers_of(module)]
    around = list(_containers_around(set(filter(inspect.isfunction, map(class_forward, layer.modules())))))
    places = [held for module in layer.modules() for held in (vars(module), module._buffers)]
    before = list(map(dict, places))
    results = run()
    for container in containers:
        if container.is_other_container:
            container.restore()
            return results, container.name
    for container in around:
        # Numbers in such a container are the same in the next run.
        held = container.value.values() if isinstance(container.value, dict) else container.value
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(list(held))):
            container.restore()
            return results, container.name
    for place, values in zip(places, before, strict=True):
        for name, value in place.items():
            is_known = value is values.get(name) or not isinstance(value, torch.Tensor | int | float | torch.SymInt)
            if not is_known and (isinstance(value, torch.Tensor) or value != values.get(name)):
                for own, earlier in zip(places, before, strict=True):
                    own.clear()
                    own.update(earlier)
                return results, name
    return results, ""


def _containers_around(functions: Collection[Callable[..., Any]]) -> Iterator[Attribute]:
    """Yields the containers among the variables around functions, and around functions of the same file that they
    call."""
    todo, seen = list(functions), set(functions)
    while todo:
        function = inspect.unwrap(todo.pop())
        if not isinstance(function, types.FunctionType):
            continue
        variables = variables_around(function)
        holder: Any = types.SimpleNamespace(**variables)
        yield from Attribute.containers_of(holder)
        called = {
            each
            for each in variables.values()
            if isinstance(each, types.FunctionType) and each.__module__ == function.__module__ and each not in seen
        }
        seen |= called
        todo += called


def without_hooks(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Disable the hooks of all modules of a model (torch 2.13)."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return with_attributes((module, name, {}) for module in model.modules() for name in names)


def bytes_of(holders: Sequence[torch.nn.Module | torch.optim.Optimizer], device: torch.device) -> int:
    """Returns the bytes on a device of the tensors that `replaced` replaces."""
    tensors = {id(tensor): tensor for _, _, tensor in _places(holders)}
    there = [each for each in tensors.values() if each.device.type == device.type and not isinstance(each, FakeTensor)]
    return sum({each.address: each.bytes for tensor in there for each in storages(tensor)}.values())


def _places(holders: Sequence[torch.nn.Module | torch.optim.Optimizer]) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yields each tensor with the dictionary or list that holds it, and its key there.

    Iterates over items, since DeepSpeed's dictionaries gather a parameter that is looked up.
    """
    modules = {
        id(part): part for holder in holders if isinstance(holder, torch.nn.Module) for part in holder.modules()
    }
    for part in modules.values():
        for held in (part._parameters, part._buffers, vars(part)):
            yield from ((held, name, value) for name, value in held.items() if isinstance(value, torch.Tensor))
    for holder in holders:
        if isinstance(holder, torch.optim.Optimizer):
            for group in holder.param_groups:
                yield from ((group["params"], place, value) for place, value in enumerate(group["params"]))


def reachable(value: object) -> Iterator[object]:
    """Yields all objects that are reachable from an object, including itself, except classes and code."""
    todo, seen = [value], {id(value): value}
    while todo:
        found = todo.pop()
        yield found
        held = gc.get_referents(found)
        if isinstance(found, torch.Tensor) and found.is_leaf and found.grad is not None:
            held.append(found.grad)
        for inner in held:
            if id(inner) not in seen and not isinstance(inner, _NOT_COPIED):
                seen[id(inner)] = inner
                todo.append(inner)


def _may_be_read(tensor: torch.Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    is_small = tensor.numel() <= (_MOST_VALUES if is_integer else _FEW_VALUES)
    return is_small and not tensor.requires_grad and tensor.device.type != "meta"


def _with_its_values(tensor: torch.Tensor, mode: FakeTensorMode, device: str | None = None) -> torch.Tensor:
    with unset_fake_temporarily():
        values = tensor.detach().to(device or tensor.device, copy=True)
    # Converted by the mode, so that it knows the storage: views of the values are views of the fake tensor.
    made = mode.from_tensor(values, static_shapes=True)
    with_values(made, values)
    return made if not isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(made, requires_grad=False)


def _fake_of(
    tensor: torch.Tensor, mode: FakeTensorMode, device: str | None, bases: dict[int, torch.Tensor]
) -> torch.Tensor:
    stays = device is None and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if stays or tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return mode.from_tensor(tensor, static_shapes=True)
    storage, place = tensor.untyped_storage(), tensor.device if device is None else torch.device(device)
    base = bases.get(storage._cdata)
    if base is None:
        base = bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=place)
    made = torch.empty(0, dtype=tensor.dtype, device=place)
    made.set_(base.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def with_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a fake tensor known values, on which models may branch.

    Moves the values to its device, since torch runs operators on them and returns results on the values' device.
    """
    if isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            tensor.constant = values.to(tensor.device)


def is_known_true(tensor: torch.Tensor) -> bool:
    """True if every element is known, and none is zero."""
    values = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    with unset_fake_temporarily():
        return values is not None and bool(values.all())


@functools.cache
def runs_kernel(function: Any) -> bool:
    """False for operators that return no tensor, a view of an argument, or uninitialized memory.

    Models and torch's own Python ask for a tensor's device five times per kernel (`prim.device`).
    """
    returns = [result for result in function._schema.returns if "Tensor" in str(result.type)]
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
    return bool(returns) and not is_view and function.overloadpacket not in _WITHOUT_KERNEL


def with_mask(mask: torch.Tensor, has_padding: bool) -> None:
    """Give a mask without known values the padding of a batch: the last token of the last row, or none."""
    if isinstance(mask, FakeTensor) and mask.constant is None and mask.dim() == 2:
        with unset_fake_temporarily():
            values = torch.ones(mask.shape, dtype=mask.dtype, device=mask.device)
            values[-1:, -1:] = not has_padding
        mask.constant = values


def device_asked(function: Any, args: Sequence[Any]) -> torch.device | None:
    """Returns the device of a fake tensor if the operator asks for it, as most calls that reach a mode do; else
    None."""
    is_asked = function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
    return args[0].fake_device if is_asked and not args[0].fake_mode.in_kernel_invocation else None


def call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on fake tensors, as if a mask selected every element, which is the upper bound.

    Raises:
        DataDependentOutputException: the operator reads an unknown value.
        DynamicOutputShapeException: a shape depends on values, and has no known bound.
    """
    if function in _SCALER:
        return args[0] if function is _aten._amp_update_scale_.default else None
    tensors = list(tensors_in((*args, *kwargs.values())))
    if function.namespace == "c10d":
        # The collective would really run, and wait for other ranks.
        raise RuntimeError(f"{function} exchanges tensors with other ranks")
    if not tensors:
        return _made(function, args, kwargs)
    if any(getattr(tensor, "constant", None) is None for tensor in tensors):
        if function is _aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if function is _aten.masked_select.default:
            return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
        if function is _aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            args = (args[0], [chosen for index in args[1] for chosen in _indices(index)])
    if function is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        # Its meta function takes only bfloat16, the kernels also other dtypes.
        halves = pytree.tree_map_only(
            torch.Tensor, lambda one: one.bfloat16() if one.is_floating_point() else one, args
        )
        return torch.empty_like(function(*halves, **kwargs), dtype=args[0].dtype)
    if function in _RESIZED_LOSSES and (len(args) < 3 or args[2]):
        # The kernel resizes the unreduced loss to a scalar, which keeps its storage (`native/BinaryOps.cpp`, 2.13).
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return args[0].new_empty(shape).resize_(())
    return function(*args, **kwargs)


def _made(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    results = function(*args, **kwargs)
    if isinstance(results, FakeTensor) and results.constant is None and results.numel() <= _MOST_VALUES:
        with unset_fake_temporarily():
            results.constant = function(*args, **kwargs)
    return results


class _KnownSteps(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is _aten.linspace.default:
            return _made(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def known_steps() -> Iterator[None]:
    """Track the values of `torch.linspace` on fake tensors: models convert them to a list while they are built, the
    rates of their stochastic depth (ConvNext)."""
    with with_attributes([(fake_tensor, _MOST_CONSTANTS, _MOST_VALUES)]), _KnownSteps():
        yield


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _indices(index: Any) -> list[Any]:
    if not _is_mask(index):
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]


# Types of values for which `described` returns all that shapes of results depend on.
DESCRIBED = (torch.Tensor, bool, int, float, str, type(None))


def described(value: Any) -> tuple[Any, ...]:
    """Returns a hashable description of a value, without a tensor's data."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    sizes = str(tuple(value.shape)), str(value.stride())
    return sizes, value.dtype, value.device, value.requires_grad
