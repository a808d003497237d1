"""Decides which losses of a graph are computed without their logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
from torch import fx

from optimum_memopt.engines.compile.loss.chain import LossChain, find_losses
from optimum_memopt.engines.compile.loss.chunks import LossShape
from optimum_memopt.engines.compile.loss.mode import CLUSTER_ID
from optimum_memopt.engines.compile.loss.rewrite import remove_unread_losses, rewrite
from optimum_memopt.engines.compile.options import AUTO, CHUNKED, PLAIN
from optimum_memopt.plans.grammar import ConfigError


@dataclass(frozen=True)
class LossPlan:
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


def decide(chain: LossChain, mode: str, reader: str) -> LossPlan:
    """What to do with a loss.

    Args:
        chain: the loss.
        mode: one of `LOSSES`.
        reader: who may read the logits that the forward returns.
    """
    plan = LossPlan(chain.shape, chain.first_rows, is_chunked=True, is_requested=mode == CHUNKED)
    reason = ""
    if mode == PLAIN:
        reason = "--memory_opt_loss plain"
    elif chain.is_returned:
        reason = f"{reader} may read the logits"
    elif mode == AUTO and not plan.pays:
        reason = "the logits of so few tokens are smaller than the gradients that would be saved in their place"
    is_read = chain.is_returned and mode != PLAIN and plan.pays
    return replace(plan, is_chunked=not reason, is_read_by_caller=is_read, reason=reason)


def plan_losses(graph: fx.Graph, mode: str, reader: str) -> tuple[list[LossPlan], list[str]]:
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


def check_row(losses: Sequence[LossPlan], is_in_config: bool, strict: bool) -> list[str]:
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
