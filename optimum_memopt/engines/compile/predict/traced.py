"""One trace of a model's training forward on fake tensors, with sizes that stay symbols."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.capture.device_standin import traced_for
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.joint import is_chunked_loss
from optimum_memopt.engines.compile.graph.problem import Problem, problems_of
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, is_length, rows_of
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.level import FromLevel
from optimum_memopt.engines.compile.partition.producers.producer import InternalProducer
from optimum_memopt.engines.compile.partition.producers.torch_default import TorchDefault
from optimum_memopt.engines.compile.solver.offload import offloadable
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import MemOptError, line_of


@dataclass(frozen=True)
class TracedAs:
    """How a model is traced.

    Attributes:
        compiler: whose graphs, one of `COMPILERS`.
        target: the device that steps are predicted for; None: where the model lies.
        autocast: dtype; None: without.
    """

    compiler: str
    target: Device | None = None
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Traced:
    """A model's training graph.

    Attributes:
        graph: of the whole forward.
        problem_at: its numbers for any sizes, without seconds.
        by_torch: numbers of the nodes that torch's own partition saves.
        by_level: numbers of the nodes that level 1 saves.
        offloadable: numbers of the nodes that may wait on the host.
        chunks_loss: a loss is computed without its logits.
        untrained: parameters of the model that get no gradient, see `without_gradient`.
    """

    graph: AnalyzedGraph
    problem_at: Callable[[SymbolValues], Problem]
    by_torch: frozenset[int]
    by_level: frozenset[int]
    offloadable: frozenset[int]
    chunks_loss: bool
    untrained: frozenset[str] = frozenset()

    def sizes(self, rows: int, tokens: int) -> SymbolValues:
        """The symbols' values for a batch of rows of so many tokens; 0: as many as were traced."""
        of_rows = dict.fromkeys(self.rows, rows)
        of_tokens = {symbol: tokens for symbol, name in self.graph.names.items() if tokens and is_length(name)}
        hints = self.graph.size_hints
        return {symbol: {**of_tokens, **of_rows}.get(symbol, size) for symbol, size in hints.items()}

    @property
    def rows(self) -> dict[sympy.Symbol, int]:
        """Its sizes that are rows of the batch that was traced."""
        return rows_of(self.graph.size_hints, self.graph.names)


@dataclass(frozen=True)
class _Keeps(InternalProducer):
    """See `Producer`; applies torch's own partition and keeps each graph with what plans by rule save of it."""

    found: list[Traced] = field(default_factory=list)

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """See `Producer.choose`."""
        order = graph.joint.order
        # Torch's own partition may change the graph.
        problem_at = problems_of(graph, [0.0] * len(order))
        by_level = frozenset(order[node] for node in FromLevel(1).choose(graph, earlier).nodes_to_save)
        on_host = offloadable(graph)
        choice = TorchDefault().choose(graph, earlier)
        by_torch = frozenset(order[node] for node in choice.nodes_to_save)
        chunks = any(is_chunked_loss(node) for node in graph.joint.nodes)
        self.found.append(Traced(graph, problem_at, by_torch, by_level, on_host, chunks))
        return choice


def trace(model: torch.nn.Module, batch: Mapping[str, Any], how: TracedAs, loss: str) -> Traced:
    """Trace one training forward and its backward.

    Args:
        model: of fake tensors, in training mode; the caller is in their mode.
        batch: keyword arguments of its forward, of two rows or more.
        how: see `TracedAs`.
        loss: one of `LOSSES`.

    Raises:
        MemOptError: the model cannot be traced without data, or its forward is not one graph for all batches.
    """
    device = next(model.parameters()).device
    keeps = _Keeps()
    engine = CompileEngine(Selection(), how.compiler, loss=loss, target=how.target, producer=keeps, is_dry=True)
    # As under a Trainer.
    engine.outputs_read_by = lambda: ""
    engine.attach(model)
    name = type(model).__name__
    try:
        with traced_for(how.target, how.autocast, device.type):
            model(**batch)
        table, predictor = engine.plans(), engine.predictor
    except MemOptError:
        raise
    except Exception as error:
        raise MemOptError(
            f"{name} cannot be traced on fake tensors ({line_of(error)}), so that nothing can be predicted for other "
            "batches"
        ) from error
    finally:
        engine.detach()
    if len(keeps.found) != 1:
        why = "; ".join(table.header) if table is not None and not keeps.found else f"{len(keeps.found)} graphs"
        raise MemOptError(f"the training forward of {name} is not one graph ({why}); advice is for forwards that are")
    (traced,) = keeps.found
    if not traced.rows:
        raise MemOptError(f"the graph of {name} is for one batch size only, so that no other one can be predicted")
    return traced if predictor is None else replace(traced, untrained=predictor.untrained)
