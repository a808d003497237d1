"""Decides for a run, and then for each loss of a graph, how losses over a vocabulary are computed, and rewrites them.
Also changes a forward's outputs other than the loss."""

import operator
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.nn import functional

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.loss.find import LossChain, find_losses, node_name, traced_tensor, writers
from optimum_memopt.engines.compile.loss.operator import CHUNKED_LOSS, LABELS_IGNORED, LossShape
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, PLAIN
from optimum_memopt.engines.torch_compat.fx_graph import written_in_trace
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import ALL, ConfigError, PlanConfig, Strategy

CLUSTER_ID = "Loss+"
ROW = f"{CLUSTER_ID}:{int(Strategy.RECOMPUTE)}:{ALL}"
_RANDOM = re.compile("bernoulli|binomial|dropout|exponential|gumbel|multinomial|normal|poisson|rand|uniform")


@dataclass(frozen=True)
class LossMode:
    """How a run computes its losses over a vocabulary.

    Attributes:
        is_row: chunks are requested by the config's row.
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
        """Returns a name for the code that may read the forward's outputs other than the loss; empty: there is none.

        Args:
            outputs_read_by: asks the Trainer; None: in a training loop without one, outputs count as read unless the
                loss must be chunked.
        """
        if outputs_read_by is not None:
            return outputs_read_by()
        return "" if self.must_chunk else "the training loop"

    def drops_logits(self, reader: str) -> bool:
        """True if the forward returns no logits; `reader` is the result of `LossMode.reader`."""
        return self.may_chunk and not reader


def loss_mode(selection: Selection, flag: str) -> tuple[PlanConfig | None, LossMode]:
    """Returns the selection's config without the loss's row, and the requested mode.

    Args:
        flag: the value of `--memory_opt_loss`.

    Raises:
        ConfigError: the flag contradicts the row or the plan file.
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
    """True if a model may compute logits over a vocabulary; classifiers of transformers have no output embeddings."""
    output_embeddings = getattr(model, "get_output_embeddings", None)
    return output_embeddings is None or output_embeddings() is not None


@dataclass(frozen=True)
class LossDecision:
    """The decision on a loss whose logits need not be saved.

    Attributes:
        first: its shape in the first batch.
        is_requested: the mode requires chunks.
        reason: why it is not chunked; empty: it is.
    """

    shape: LossShape
    first: LossShape
    is_requested: bool
    reason: str = ""

    @property
    def is_chunked(self) -> bool:
        return not self.reason

    @property
    def saving(self) -> sympy.Expr:
        """Returns the bytes that it saves, in the symbols of the graph."""
        return sympy.sympify(self.shape.saving)

    @property
    def pays(self) -> bool:
        """True if it saves memory in the first batch; a classifier's logits are smaller than its hidden states."""
        return self.shape.vocabulary > self.shape.hidden_size and self.first.saving > 0

    @property
    def note(self) -> str:
        """Returns the note for the loss's row of the plan table."""
        if not self.is_chunked:
            return f"loss not chunked: {self.reason}"
        chunks = f"loss in chunks of {self.first.rows_per_chunk} tokens"
        return chunks if self.pays else f"{chunks}, which saves nothing here"


def decide(chain: LossChain, mode: LossMode, reader: str) -> LossDecision:
    """Decides on one loss; `reader` names the code that may read the forward's logits, see `LossMode.reader`."""
    loss = LossDecision(chain.shape, replace(chain.shape, rows=chain.first_rows), is_requested=mode.must_chunk)
    if not mode.may_chunk:
        return replace(loss, reason="--memory_opt_loss plain")
    if chain.is_returned:
        return replace(loss, reason=f"{reader or 'what is outside of its graph'} may read the logits")
    if not mode.must_chunk and not loss.pays:
        reason = "the logits of so few tokens are smaller than the gradients that would be saved in their place"
        return replace(loss, reason=reason)
    return loss


def decide_losses(graph: fx.Graph, mode: LossMode, reader: str) -> tuple[tuple[LossDecision, ...], list[str]]:
    """Decide on each loss of a graph that dynamo traced, and rewrite the chunked ones.

    Returns:
        The decisions, and for the log the reasons why losses are not chunked that were requested or would save memory.
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
        would_pay = mode.may_chunk and chain.is_returned and loss.pays
        reasons.append(loss.reason if mode.must_chunk or would_pay else "")
    return tuple(losses), [reason for reason in reasons if reason]


def check_row(losses: Sequence[LossDecision], mode: LossMode, strict: bool) -> list[str]:
    """Returns a log line if a config has the loss's row, and the model has no such loss.

    Raises:
        ConfigError: the config is `strict`, so that this is an error.
    """
    if losses or not mode.is_row:
        return []
    line = f'no plan "{CLUSTER_ID}" in this model, which has no loss over a vocabulary that can be chunked'
    if strict:
        raise ConfigError(line)
    return [f"{line}; left out"]


def rewrite(graph: fx.Graph, chain: LossChain) -> None:
    """Rewrite a loss to compute it without its logits; changes the graph in place."""
    loss, projection, adapter = chain.cross_entropy, chain.projection, chain.adapter
    bias, adapter_hidden, adapter_weight = projection.bias, None, None

    def rows_with_logits(hidden: fx.Node) -> fx.Node:
        for taken in chain.slices:
            hidden = graph.call_function(operator.getitem, (hidden, taken.args[1]))
        return hidden

    ignored = _labels_ignored(graph, chain)
    with graph.inserting_before(loss):
        hidden = rows_with_logits(projection.hidden)
        if chain.offset is not None:
            # Everything that is added to each row of the projection's output, as one bias.
            offset = graph.call_method("reshape", (chain.offset, (-1,)))
            bias = offset if bias is None else graph.call_function(operator.add, (bias, offset))
        if adapter is not None:
            adapter_weight = adapter.projection.weight
            adapter_rows = rows_with_logits(adapter.projection.hidden)
            adapter_hidden = graph.call_function(operator.mul, (adapter_rows, adapter.scale))
        tensors = hidden, projection.weight, bias, adapter_hidden, adapter_weight, chain.labels, ignored
        numbers = chain.scale, chain.softcap, chain.ignore_index, chain.mean, chain.label_smoothing
        dtypes = chain.shape.compute, traced_tensor(loss).dtype
        outputs = graph.call_function(CHUNKED_LOSS, (*tensors, *numbers, *dtypes, _needs(chain)))
        result = graph.call_function(operator.getitem, (outputs, 0))
    # The loss's call site, which naming and levels read from the nodes of the joint graph.
    origin = ("nn_module_stack", "source_fn_stack", "stack_trace")
    for node in (ignored, outputs, result):
        node.meta.update({key: loss.meta[key] for key in origin if key in loss.meta})
    loss.replace_all_uses_with(result)
    _erase(graph, loss, {projection.node, *([adapter.projection.node] if adapter else [])})


def _labels_ignored(graph: fx.Graph, chain: LossChain) -> fx.Node:
    """Adds the count of ignored labels: at the beginning of the graph, after the inputs, with the nodes that compute
    the labels; at the loss if these cannot be moved, since they draw numbers or something writes to them."""
    before = {node for node in (chain.labels, chain.ignore_index) if isinstance(node, fx.Node)}
    for node in reversed(graph.nodes):
        if node in before:
            before.update(node.all_input_nodes)
    last = chain.cross_entropy.prev
    are_pure = all(node.op in ("placeholder", "get_attr") or (_is_pure(node) and not _draws(node)) for node in before)
    if are_pure and not writers(graph, before):
        *_, last = graph.find_nodes(op="placeholder")
        # In the graph's order, which keeps each node after its operands.
        for node in [node for node in graph.nodes if node in before and node.op != "placeholder"]:
            last.append(node)
            last = node
    with graph.inserting_after(last):
        ignored = graph.call_function(LABELS_IGNORED, (chain.labels, chain.ignore_index))
    # The count may pass from the operators before the layers to those after them.
    ignored.meta["example_value"] = traced_tensor(chain.labels).new_empty(1, dtype=torch.int64, device="cpu")
    return ignored


def _needs(chain: LossChain) -> list[bool]:
    """Returns for each of the operator's first arguments whether its gradient is needed."""
    hidden, weight, bias = chain.projection.hidden, chain.projection.weight, chain.projection.bias
    adapter = (chain.adapter.projection.hidden, chain.adapter.projection.weight) if chain.adapter else (None, None)
    arguments = ((hidden,), (weight,), (bias, chain.offset), *((node,) for node in adapter))
    return [any(node is not None and traced_tensor(node).requires_grad for node in nodes) for nodes in arguments]


def remove_unread_losses(graph: fx.Graph) -> None:
    """Remove each cross entropy that the graph does not return, such as the model's own next to a smoothed one."""
    for loss in list(graph.nodes):
        if loss.target is not functional.cross_entropy:
            continue
        dependent = {loss: None}
        for node in graph.nodes:
            if any(read in dependent for read in node.all_input_nodes):
                dependent[node] = None
        _, *readers = dependent
        if all(map(_is_pure, readers)):
            for node in reversed(readers):
                graph.erase_node(node)
            _erase(graph, loss, ())


def _is_pure(node: fx.Node) -> bool:
    """True for an operator that computes a value, without side effects."""
    is_call = node.op in ("call_function", "call_method") and node.meta.get("example_value") is not None
    return is_call and not written_in_trace(node)


def _draws(node: fx.Node) -> bool:
    """True for an operator that may draw random numbers, by its name."""
    return _RANDOM.search(node_name(node)) is not None


def _erase(graph: fx.Graph, node: fx.Node, last: Collection[fx.Node]) -> None:
    """Remove an unread node, and then the nodes that only it has read, back to the `last` ones."""
    # Tensors that were detached for an output that no longer exists.
    for unread in tuple(node.users):
        graph.erase_node(unread)
    reads = node.all_input_nodes if node not in last else []
    graph.erase_node(node)
    for read in reads:
        if _is_pure(read) and all(user.op != "output" and not user.users for user in read.users):
            _erase(graph, read, last)


def with_detached_outputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward` to detach all outputs but the first, if that is the loss: a tensor without dimensions.

    AOTAutograd fills in a gradient of zeros for every output that requires grad and got none: for the logits of a
    language model two buffers of their size, which plain PyTorch does not allocate.
    """
    return _then(forward, _detached)


def without_logits(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward` to return None for the logits, if the first output is the loss."""
    return _then(forward, lambda value, name: None if name.endswith("logits") or name == "1" else value)


def _then(forward: Callable[..., Any], change: Callable[[Any, str], Any]) -> Callable[..., Any]:
    """Wraps `forward` to change its outputs other than the loss; a method stays one."""
    if isinstance(forward, types.MethodType):
        return types.MethodType(_then(forward.__func__, change), forward.__self__)

    def changing(*args: Any, **kwargs: Any) -> Any:
        return _beside_loss(forward(*args, **kwargs), change)

    return changing


def refusing_gradients(outputs: Any) -> Any:
    """Make detached outputs raise when they get a gradient.

    They require grad, like the outputs of the plain forward, but have no autograd graph: a loss computed from them
    would silently train without its gradient.
    """
    return _beside_loss(outputs, _refusing)


def _beside_loss(outputs: Any, change: Callable[[Any, str], Any]) -> Any:
    """Returns the outputs with each one but the loss changed; outputs of a tuple are named by their index."""
    if isinstance(outputs, Mapping) and _is_loss(outputs.get("loss")):
        changed = {name: value if name == "loss" else change(value, name) for name, value in outputs.items()}
        return type(outputs)(**changed)
    if isinstance(outputs, tuple) and outputs and _is_loss(outputs[0]):
        return (outputs[0], *(change(value, str(index)) for index, value in enumerate(outputs[1:], 1)))
    return outputs


def _is_loss(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _detached(value: Any, name: str) -> Any:
    if type(value) is tuple:
        return tuple(_detached(inner, name) for inner in value)
    return value.detach() if isinstance(value, torch.Tensor) else value


def _refusing(value: Any, name: str) -> Any:
    if type(value) is tuple:
        return tuple(_refusing(inner, name) for inner in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    # The output may be one of the forward's inputs.
    leaf = value.detach().requires_grad_()

    def refuse(gradient: torch.Tensor | None) -> None:
        # DDP passes outputs through its own autograd function, whose backward returns None for unread outputs.
        if gradient is not None:
            raise MemOptError(
                f"a gradient flowed back to the model's output {name!r}, which is detached because Trainer's own "
                "compute_loss reads only the loss; compute such a loss in compute_loss of a Trainer subclass or in "
                "compute_loss_func"
            )

    leaf.register_hook(refuse)
    return leaf
