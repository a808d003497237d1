"""How losses over a vocabulary are computed: decided once for a run, then for each loss of a graph, and rewritten."""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx
from torch.nn import functional

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.loss.chunks import LossShape
from optimum_memopt.engines.compile.loss.find import LossChain, find_losses, traced_tensor
from optimum_memopt.engines.compile.loss.operator import CHUNKED_LOSS
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, PLAIN
from optimum_memopt.plans.grammar import ALL, ConfigError, PlanConfig, Strategy

CLUSTER_ID = "Loss+"
ROW = f"{CLUSTER_ID}:{int(Strategy.RECOMPUTE)}:{ALL}"


@dataclass(frozen=True)
class LossMode:
    """How a run computes its losses over a vocabulary.

    Attributes:
        name: one of `LOSSES`.
        is_row: the config's row asks for chunks.
    """

    name: str = AUTO
    is_row: bool = False

    @property
    def may_chunk(self) -> bool:
        return self.name != PLAIN

    @property
    def must_chunk(self) -> bool:
        return self.name == CHUNKED

    def reader(self, outputs_read_by: Callable[[], str] | None) -> str:
        """Who may read more of a forward's outputs than the loss, empty when nobody does.

        Args:
            outputs_read_by: asks the Trainer; None: a training loop of one's own, which says so by this mode.
        """
        if outputs_read_by is not None:
            return outputs_read_by()
        return "" if self.must_chunk else "the training loop"

    def drops_logits(self, reader: str) -> bool:
        """Whether the forward returns no logits; `reader` as above."""
        return self.may_chunk and not reader


def loss_mode(selection: Selection, flag: str) -> tuple[PlanConfig | None, LossMode]:
    """The selection's config without the loss's row, and the mode that is asked for.

    Args:
        selection: which plans.
        flag: `--memory_opt_loss`, one of `LOSSES`.

    Raises:
        ConfigError: the flag says one thing, and the row or the plan file another.
    """
    config, plan = selection.config, selection.plan
    if plan is not None:
        if selection.strict and flag not in (AUTO, plan.loss):
            raise ConfigError(
                f"--memory_opt_loss {flag} with --memory_opt_plan: the file was made with the loss {plan.loss}, which "
                "has another graph; leave --memory_opt_loss out"
            )
        return config, LossMode(plan.loss if flag == AUTO else flag)
    requests = config.requests if config is not None else ()
    of_loss = [request for request in requests if request.cluster_id == CLUSTER_ID]
    if not of_loss:
        return config, LossMode(flag)
    asked = CHUNKED if of_loss[0].is_on else PLAIN
    if flag not in (AUTO, asked):
        raise ConfigError(f"--memory_opt_loss {flag} together with {of_loss[0]} in the config: leave one of them out")
    rest = tuple(request for request in requests if request not in of_loss)
    return (PlanConfig(rest) if rest else None), LossMode(asked, is_row=asked == CHUNKED != flag)


def may_have_vocabulary(model: torch.nn.Module) -> bool:
    """True where there may be logits of a vocabulary; classifiers of transformers have no output embeddings."""
    output_embeddings = getattr(model, "get_output_embeddings", None)
    return output_embeddings is None or output_embeddings() is not None


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


def decide(chain: LossChain, mode: LossMode, reader: str) -> LossDecision:
    """What to do with a loss.

    Args:
        chain: the loss.
        mode: of the run.
        reader: who may read the logits that the forward returns.
    """
    loss = LossDecision(chain.shape, chain.first_rows, is_chunked=True, is_requested=mode.must_chunk)
    reason = ""
    if not mode.may_chunk:
        reason = "--memory_opt_loss plain"
    elif chain.is_returned:
        reason = f"{reader} may read the logits"
    elif not mode.must_chunk and not loss.pays:
        reason = "the logits of so few tokens are smaller than the gradients that would be saved in their place"
    is_read = chain.is_returned and mode.may_chunk and loss.pays
    return replace(loss, is_chunked=not reason, is_read_by_caller=is_read, reason=reason)


def decide_losses(graph: fx.Graph, mode: LossMode, reader: str) -> tuple[tuple[LossDecision, ...], list[str]]:
    """Decide on each loss of a graph that dynamo traced, and rewrite those that are chunked.

    Args:
        graph: changed in place.
        mode: of the run.
        reader: who may read the logits that the forward returns.

    Returns:
        The losses, and for the log why what was asked for, or would pay, is not chunked.
    """
    remove_unread_losses(graph)
    losses, reasons = [], []
    for chain in list(find_losses(graph)):
        if isinstance(chain, str):
            reasons.append(chain if mode.must_chunk else "")
            continue
        loss = decide(chain, mode, reader)
        if loss.is_chunked:
            rewrite(graph, chain)
        losses.append(loss)
        reasons.append(loss.reason if loss.is_requested or loss.is_read_by_caller else "")
    return tuple(losses), [reason for reason in reasons if reason]


def check_row(losses: Sequence[LossDecision], mode: LossMode, strict: bool) -> list[str]:
    """A line where a config names the row of a model that has none.

    Args:
        losses: of the model's graphs.
        mode: of the run.
        strict: that is a mistake.

    Raises:
        ConfigError: it is.
    """
    if losses or not mode.is_row:
        return []
    line = f'no plan "{CLUSTER_ID}" in this model, which has no loss over a vocabulary that can be chunked'
    if strict:
        raise ConfigError(line)
    return [f"{line}; left out"]


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
