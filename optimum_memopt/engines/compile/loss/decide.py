"""Replaces the losses of a graph that dynamo traced by the chunked loss."""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import sympy
from torch import fx
from torch.nn import functional

from optimum_memopt.engines.compile.loss.chunks import LossShape
from optimum_memopt.engines.compile.loss.find import LossChain, find_losses, traced_tensor
from optimum_memopt.engines.compile.loss.mode import CLUSTER_ID
from optimum_memopt.engines.compile.loss.operator import CHUNKED_LOSS
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, PLAIN
from optimum_memopt.plans.grammar import ConfigError

# Where an operator was called; naming and levels read it from the nodes of the joint graph.
_ORIGIN = ("nn_module_stack", "source_fn_stack", "stack_trace")


def rewrite(graph: fx.Graph, chain: LossChain) -> None:
    """Compute a loss without its logits; graph changed in place."""
    loss = chain.cross_entropy
    with graph.inserting_before(loss):
        tensors = (
            _sliced(graph, chain, chain.projection.hidden),
            chain.projection.weight,
            _bias(graph, chain),
            *_adapter(graph, chain),
        )
        outputs = graph.call_function(
            CHUNKED_LOSS,
            (
                *tensors,
                chain.labels,
                chain.scaling.scale,
                chain.scaling.softcap,
                chain.ignore_index,
                chain.mean,
                chain.label_smoothing,
                chain.shape.compute,
                traced_tensor(loss).dtype,
                _needs(chain),
            ),
        )
        result = graph.call_function(operator.getitem, (outputs, 0))
    for node in (outputs, result):
        node.meta.update({key: loss.meta[key] for key in _ORIGIN if key in loss.meta})
    loss.replace_all_uses_with(result)
    adapters = [chain.adapter.projection.node] if chain.adapter else []
    _erase(graph, loss, {chain.projection.node, *adapters})


def _needs(chain: LossChain) -> list[bool]:
    """Of which of the operator's first arguments the gradient is wanted."""
    in_adapter = (chain.adapter.projection.hidden, chain.adapter.projection.weight) if chain.adapter else (None, None)
    arguments = (
        (chain.projection.hidden,),
        (chain.projection.weight,),
        (chain.projection.bias, chain.offset),
        *((node,) for node in in_adapter),
    )
    return [any(node is not None and traced_tensor(node).requires_grad for node in nodes) for nodes in arguments]


def _sliced(graph: fx.Graph, chain: LossChain, hidden: fx.Node) -> fx.Node:
    """The rows of hidden states whose logits the loss reads."""
    for taken in chain.slices:
        hidden = graph.call_function(operator.getitem, (hidden, taken.args[1]))
    return hidden


def _bias(graph: fx.Graph, chain: LossChain) -> fx.Node | None:
    """One bias for all that is added to each row of the projection's output."""
    bias = chain.projection.bias
    if chain.offset is None:
        return bias
    offset = graph.call_method("reshape", (chain.offset, (-1,)))
    return offset if bias is None else graph.call_function(operator.add, (bias, offset))


def _adapter(graph: fx.Graph, chain: LossChain) -> tuple[fx.Node | None, fx.Node | None]:
    """Hidden states of the adapter, scaled, and its matrix."""
    if chain.adapter is None:
        return None, None
    hidden = _sliced(graph, chain, chain.adapter.projection.hidden)
    return graph.call_function(operator.mul, (hidden, chain.adapter.scale)), chain.adapter.projection.weight


def remove_unread_losses(graph: fx.Graph) -> None:
    """Remove each cross entropy that the graph does not return, such as the model's own beside a smoothed one."""
    for loss in list(graph.nodes):
        if loss.target is functional.cross_entropy:
            readers = _all_readers(loss)
            if all(_is_pure(node) for node in readers):
                for node in reversed(readers):
                    graph.erase_node(node)
                _erase(graph, loss, ())


def _all_readers(node: fx.Node) -> list[fx.Node]:
    """What depends on a node, in graph order."""
    found = {node}
    for later in node.graph.nodes:
        if any(read in found for read in later.all_input_nodes):
            found.add(later)
    return [later for later in node.graph.nodes if later in found and later is not node]


def _is_pure(node: fx.Node) -> bool:
    """Whether an operator only computes its result: torch's names of others end in an underscore."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    return node.op in ("call_function", "call_method") and not name.endswith("_")


def _erase(graph: fx.Graph, node: fx.Node, last: Collection[fx.Node]) -> None:
    """Remove a node that nothing of the graph reads, and then what only it has read, back to the `last` ones."""
    # A tensor that was detached for an output that is no longer there.
    for unread in tuple(node.users):
        graph.erase_node(unread)
    reads = node.all_input_nodes if node not in last else []
    graph.erase_node(node)
    for read in reads:
        if _is_pure(read) and all(user.op != "output" and not user.users for user in read.users):
            _erase(graph, read, last)


@dataclass(frozen=True)
class LossDecision:
    """A loss whose logits need not be saved.

    Attributes:
        shape: in the symbols of the graph.
        first_rows: of the first batch.
        is_chunked: it is computed without its logits.
        is_requested: the user asked for that.
        is_read_by_caller: it would be chunked, if nobody read the logits.
        reason: why it is not.
    """

    shape: LossShape
    first_rows: int
    is_chunked: bool
    is_requested: bool
    is_read_by_caller: bool = False
    reason: str = ""

    @property
    def saving(self) -> sympy.Expr:
        """Bytes, see `LossShape.saving`."""
        return sympy.sympify(self.shape.saving)

    @property
    def first_saving(self) -> int:
        """`saving` in the first batch."""
        return self.shape.with_rows(self.first_rows).saving

    @property
    def pays(self) -> bool:
        """Whether it saves memory in the first batch; a classifier's logits are smaller than its hidden states."""
        return self.shape.vocabulary > self.shape.hidden_size and self.first_saving > 0

    @property
    def note(self) -> str:
        """For the row of the table."""
        if not self.is_chunked:
            return f"loss not chunked: {self.reason}"
        chunks = f"loss in chunks of {self.shape.with_rows(self.first_rows).rows_per_chunk} tokens"
        return chunks if self.pays else f"{chunks}, which saves nothing here"


def decide(chain: LossChain, mode: str, reader: str) -> LossDecision:
    """What to do with a loss.

    Args:
        chain: the loss.
        mode: one of `LOSSES`.
        reader: who may read the logits that the forward returns.
    """
    plan = LossDecision(chain.shape, chain.first_rows, is_chunked=True, is_requested=mode == CHUNKED)
    reason = ""
    if mode == PLAIN:
        reason = "--memory_opt_loss plain"
    elif chain.is_returned:
        reason = f"{reader} may read the logits"
    elif mode == AUTO and not plan.pays:
        reason = "the logits of so few tokens are smaller than the gradients that would be saved in their place"
    is_read = chain.is_returned and mode != PLAIN and plan.pays
    return replace(plan, is_chunked=not reason, is_read_by_caller=is_read, reason=reason)


def plan_losses(graph: fx.Graph, mode: str, reader: str) -> tuple[list[LossDecision], list[str]]:
    """Decide on each loss of a graph that dynamo traced, and rewrite those that are chunked.

    Args:
        graph: changed in place.
        mode: one of `LOSSES`.
        reader: who may read the logits that the forward returns.

    Returns:
        The plans, and why other cross entropies have none.
    """
    remove_unread_losses(graph)
    found = list(find_losses(graph))
    plans = []
    for chain in found:
        if isinstance(chain, LossChain):
            plan = decide(chain, mode, reader)
            if plan.is_chunked:
                rewrite(graph, chain)
            plans.append(plan)
    return plans, [reason for reason in found if isinstance(reason, str)]


def check_row(losses: Sequence[LossDecision], is_in_config: bool, strict: bool) -> list[str]:
    """A line where a config names the row of a model that has none.

    Args:
        losses: of the model's graphs.
        is_in_config: the config has `ROW`.
        strict: that is a mistake.

    Raises:
        ConfigError: it is.
    """
    if losses or not is_in_config:
        return []
    line = f'no plan "{CLUSTER_ID}" in this model, which has no loss over a vocabulary that can be chunked'
    if strict:
        raise ConfigError(line)
    return [f"{line}; left out"]
