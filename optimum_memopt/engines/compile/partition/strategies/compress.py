"""Strategy 4: saved activations wait for the backward in fp8, which is inexact.

An activation is saved as float8_e4m3fn with a float32 scale for each row of its last dimension, and is converted
back to its dtype right before its first use in the backward. Scales are per row and not per block of the flattened
storage: a reduction over the last dimension and elementwise operators work with any strides and any symbolic sizes,
while blocks need a reshape, which copies non-contiguous tensors, and a padded last block. In a transformer a row holds
one token's features.

The scale is the row's largest magnitude over 448, the largest number of e4m3. So an element keeps three bits of
mantissa, a relative error of 2^-4 at most, down to 2^-15 of its row's largest; smaller elements have an absolute error
of 2^-10 of the scale at most. A row of zeros stays zeros. A row with an infinity or NaN becomes NaN as a whole, since
its scale is infinite or NaN.

torch has a pass for this (`activation_quantization_aten_pass` in `torch/_functorch/partitioners.py`, 2.13), which is
for inductor alone, converts every large tensor, and clamps, so that an infinity becomes a finite number. This module
also uses plain ATen operators, so that inductor fuses them with the activation's producer and readers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from optimum_memopt.engines.compile.costs.fusion import readers
from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate, RecomputeChain, compressions
from optimum_memopt.engines.compile.graph.joint import Inlined, is_barrier, root, storage_bytes, tensor_value
from optimum_memopt.engines.compile.graph.saved_activations import SavedActivation, operator_name
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.partition.strategies import MemoryStrategy, register_strategy
from optimum_memopt.engines.compile.partition.strategies.offload import last_uses
from optimum_memopt.engines.torch_compat import fx_graph
from optimum_memopt.engines.torch_compat.traced_sizes import elements, symbolic
from optimum_memopt.plans.grammar import Strategy

FP8 = torch.float8_e4m3fn
# Name of the fp8 node that is saved instead of an activation.
IN_FP8 = "{}_fp8"
_SCALE, _BACK = "{}_fp8_scale", "{}_from_fp8"
# A scale is a float32, which does not cover the range of float64.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Operators that turn an error into a factor: an error of 2^-4 in a log-probability of -16 is a factor of e.
_EXPONENTIALS = ("exp", "log_softmax_backward_data")
_LARGEST = torch.finfo(FP8).max
# Rounded down, so that restored elements do not exceed the row's largest, which may be the dtype's largest.
_PER_LARGEST = (1 - 2**-22) / _LARGEST
# The smallest scale: that of a row of zeros.
_SMALLEST = torch.finfo(torch.float32).tiny
_aten, _convert = torch.ops.aten, torch.ops.prims.convert_element_type.default


class Compress(MemoryStrategy):
    numbers = (Strategy.COMPRESS,)

    def candidate(
        self, activation: SavedActivation, chain: RecomputeChain | None, cluster_id: str, size_hints: SymbolValues
    ) -> Candidate | None:
        """Returns the candidate, or None for activations that stay exact: integers, masks and others without a
        gradient, float64, exponents, storages with gaps, and rows so short that their scales take what fp8 saves."""
        tensor = tensor_value(activation.root)
        if not activation.is_differentiated or tensor.dtype not in _DTYPES or tensor.dim() == 0:
            return None
        if _is_exponent(activation.root):
            return None
        count, rows = elements(tensor), sympy.Mul(*map(symbolic, tensor.shape[:-1]))
        has_gaps = sympy.expand(count * tensor.dtype.itemsize) != storage_bytes(activation.root)
        saving = sympy.expand(activation.bytes - count * FP8.itemsize - rows * torch.float32.itemsize)
        if has_gaps or saving.subs(size_hints) <= 0:
            return None
        return Candidate(activation, Strategy.COMPRESS, cluster_id, saving)

    def rewrite(self, modules: Modules, candidates: tuple[Candidate, ...]) -> None:
        if candidates:
            insert(*modules, {candidate.activation.root.name for candidate in candidates})

    def note(self, device_type: str) -> str:
        return "fp8, inexact"

    def is_listed(self, device_type: str, is_recomputable: bool) -> bool:
        """False: the row is listed only if it is on."""
        return False


register_strategy(Compress())


# Intermediate nodes of the conversions, which a compiler computes in the kernels that read them.
_INLINED = ("{}_fp8_scaled", "{}_from_fp8_cast", "{}_from_fp8_product")


def with_conversions(inlined: Inlined, candidates: Iterable[Candidate]) -> Inlined:
    """Adds the conversions of compressed candidates to the operators that a compiler inlines; returns `inlined` itself
    if it is empty, since then there is no compiler."""
    if not inlined.operands:
        return inlined
    names = (candidate.activation.root.name for candidate in compressions(candidates))
    # Their first operand is held in their place.
    return Inlined({**inlined.operands, **{pattern.format(name): 0 for name in names for pattern in _INLINED}})


def saved_names(activation: str) -> tuple[str, str]:
    """Returns the names of the fp8 tensor and the scales that are saved instead of an activation."""
    return IN_FP8.format(activation), _SCALE.format(activation)


def _is_exponent(storage: fx.Node) -> bool:
    """True for log-probabilities, and for queries and keys of fused attention, whose backward recomputes probabilities
    from them and from an exact sum."""
    for reader in readers(storage):
        name = operator_name(reader).strip("_")
        if name in _EXPONENTIALS:
            return True
        if "attention" in name and name.endswith("backward"):
            named = fx_graph.arguments_by_name(reader.target, reader.args, reader.kwargs)
            # Flex attention has no schema.
            operands = (named["query"], named["key"]) if named else reader.args[:2]
            if storage in map(root, operands):
                return True
    return False


def insert(forward: fx.GraphModule, backward: fx.GraphModule, activations: Collection[str]) -> None:
    """Save activations in fp8 with their scales, and convert them back in the backward.

    Args:
        activations: names of roots that the forward saves and does not return.
    """
    _restore(backward.graph, _compress(forward.graph, activations))
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _compress(graph: fx.Graph, activations: Collection[str]) -> dict[str, tuple[fx.Node, fx.Node]]:
    """Adds the conversions to fp8; returns the fp8 tensor and the scales by the name of their activation."""
    saved = {}
    last = last_uses(graph)
    for activation in [node for node in last if node.name in activations]:
        with graph.inserting_before(last[activation].next):
            in_fp8, scale = to_fp8(graph, activation)
        fx_graph.replace_saved(graph, activation, (in_fp8, scale))
        saved[activation.name] = in_fp8, scale
    return saved


def _restore(graph: fx.Graph, saved: Mapping[str, tuple[fx.Node, fx.Node]]) -> None:
    order = {node: index for index, node in enumerate(graph.nodes)}
    for activation in [node for node in graph.find_nodes(op="placeholder") if node.name in saved]:
        with graph.inserting_before(activation):
            in_fp8, scale = (placeholder(graph, node) for node in saved[activation.name])
        first = min(_readers(activation), key=order.__getitem__)
        barriers = [user for user in activation.users if is_barrier(user) and order[user] < order[first]]
        if barriers:
            # A barrier of recompute, see `recompute.py`: the conversion back waits for it, too.
            earliest = min(barriers, key=order.__getitem__)
            with graph.inserting_before(earliest):
                scale = _Adding(graph, activation)("{}_fp8_scale_after", earliest.target, scale, earliest.args[1])
            for barrier in barriers:
                barrier.replace_all_uses_with(activation)
                graph.erase_node(barrier)
        users = dict(activation.users)
        with graph.inserting_before(first):
            back = from_fp8(graph, activation, in_fp8, scale)
        for user in users:
            user.replace_input_with(activation, back)
        graph.erase_node(activation)


def _readers(activation: fx.Node) -> Iterator[fx.Node]:
    """Yields the operators that read an activation in the backward, also through barriers."""
    for user in activation.users:
        yield from user.users if is_barrier(user) else (user,)


def to_fp8(graph: fx.Graph, activation: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Add the operators that convert an activation; returns the fp8 tensor and the scales."""
    add = _Adding(graph, activation)
    # The largest magnitude, without materializing a tensor of magnitudes.
    high = add("{}_fp8_high", _aten.amax.default, activation, [-1], True)
    low = add("{}_fp8_low", _aten.amin.default, activation, [-1], True)
    negated = add("{}_fp8_negated", _aten.neg.default, low)
    most = add("{}_fp8_most", _aten.maximum.default, high, negated)
    if tensor_value(most).dtype != torch.float32:
        most = add("{}_fp8_most_float32", _convert, most, torch.float32)
    per_largest = add("{}_fp8_per_largest", _aten.mul.Tensor, most, _PER_LARGEST)
    scale = add(_SCALE, _aten.clamp_min.default, per_largest, _SMALLEST)
    # In float32, also for half precision.
    scaled = add("{}_fp8_scaled", _aten.div.Tensor, activation, scale)
    return add(IN_FP8, _convert, scaled, FP8), scale


def from_fp8(graph: fx.Graph, activation: fx.Node, in_fp8: fx.Node, scale: fx.Node) -> fx.Node:
    """Add the operators that convert an activation back; returns the node that replaces it."""
    add, dtype = _Adding(graph, activation), tensor_value(activation).dtype
    # Exact: all of these dtypes represent every e4m3 number.
    cast = add("{}_from_fp8_cast", _convert, in_fp8, dtype)
    if dtype == torch.float32:
        return add(_BACK, _aten.mul.Tensor, cast, scale)
    product = add("{}_from_fp8_product", _aten.mul.Tensor, cast, scale)
    return add(_BACK, _convert, product, dtype)


def placeholder(graph: fx.Graph, saved: fx.Node) -> fx.Node:
    """Add an input to a backward graph for a node that its forward saves."""
    given = graph.placeholder(saved.name)
    given.meta.update(saved.meta)
    return given


# Metadata of the operator itself, its result and arguments, which inductor compares with the operator's schema.
_OF_OPERATOR = frozenset({"val", "tensor_meta", "eager_input_vals"})


class _Adding:
    """Adds operators to a graph with the layer and module of an activation, and names derived from it."""

    def __init__(self, graph: fx.Graph, activation: fx.Node) -> None:
        self._graph, self._activation = graph, activation
        self._fake_mode = tensor_value(activation).fake_mode

    def __call__(self, name: str, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = self._graph.create_node("call_function", target, args, name=name.format(self._activation.name))
        values = fx.map_arg(args, tensor_value)
        meta = {key: value for key, value in self._activation.meta.items() if key not in _OF_OPERATOR}
        with self._fake_mode:
            node.meta.update(meta, val=target(*values))
        return node
