"""Trains models under the compile engine and keeps the resulting partitions and plan table."""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.capture import variants
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.memory import footprint
from optimum_memopt.engines.compile.options import MODEL
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.predict import step_predictor
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.plans.grammar import ALL, Strategy, parse
from optimum_memopt.plans.table import PlanTable
from tests.gradients import Batch, Gradients, accumulate

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
IN_FP8 = " fp8"
GPT2_DROPOUT = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}


def hold_still(patch: pytest.MonkeyPatch) -> None:
    """Keep the process's own memory constant: it varies by more than small models take."""
    for module in (footprint, step_predictor):
        patch.setattr(module, "constant_of", lambda *held: 2**29)


def below_recompute(less: int = 1) -> contextlib.AbstractContextManager[Any]:
    """Set every budget to `less` bytes below the smallest peak that recompute within layers reaches."""
    return mock.patch.object(ForwardSolver, "cheapest", lambda solver, _: solver._in_segments(solver.lowest - less))


@dataclass(frozen=True)
class Split:
    """A partitioned joint graph, before a compiler changes its forward and backward."""

    graph: PartitionedGraph
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int

    @property
    def saved_for_backward(self) -> set[str]:
        """Returns the names of the operators whose results are saved for the backward."""
        (output,) = self.forward.graph.find_nodes(op="output")
        rest = output.args[0][self.num_fwd_outputs :]
        return {node.name for node in rest if isinstance(node, fx.Node) and node.op == "call_function"}

    @property
    def run_in_backward(self) -> set[str]:
        return {node.name for node in self.backward.graph.nodes if node.op == "call_function"}

    def request(self, root: str, strategy: Strategy, count: int = ALL) -> str:
        """Returns the config of the row that has this operator's result as a candidate."""
        for candidate in self.graph.candidates:
            if candidate.strategy is strategy and candidate.activation.root.name == root:
                return f"{candidate.cluster_id}:{int(strategy)}:{count}"
        raise LookupError(f"no row with strategy {strategy} has {root}")

    def check(self, table: PlanTable) -> None:
        """Check that exactly the enabled rows are recomputed, offloaded or compressed, and all else is saved."""
        applied = Counter()
        for candidate in self.graph.candidates:
            name = candidate.activation.root.name
            saved = self.saved_for_backward
            is_recomputed = name in self.run_in_backward
            elsewhere = {
                Strategy.OFFLOAD: f"{name}_on_host" in saved,
                Strategy.COMPRESS: {f"{name}_fp8", f"{name}_fp8_scale"} <= saved,
            }
            assert is_recomputed + sum(elsewhere.values()) + (name in saved) == 1, name
            applied[candidate.row] += elsewhere.get(candidate.strategy, is_recomputed)
        assert +applied == {row.config: row.applied_count for row in table.enabled}


@dataclass(frozen=True)
class Run:
    step: tuple[torch.Tensor, Gradients]
    splits: tuple[Split, ...]
    table: PlanTable

    @property
    def split(self) -> Split:
        (split,) = self.splits
        return split


@contextlib.contextmanager
def recorded() -> Iterator[list[Split]]:
    """Collect the graphs that the engine partitions within the context."""
    found: list[Split] = []

    def partitioned(graph: AnalyzedGraph, *args: Any, **kwargs: Any) -> Any:
        known, modules = original(graph, *args, **kwargs)
        copies = (fx.GraphModule(one, copy.deepcopy(one.graph)) for one in modules)
        found.append(Split(known, *copies, graph.joint.num_fwd_outputs))
        return known, modules

    original = variants.partitioned
    with mock.patch.object(variants, "partitioned", partitioned):
        yield found


def selection(asked: str) -> Selection:
    """Returns the selection for a config, `level 1` or nothing, with fp8 compression if it ends in ` fp8`."""
    plan, is_compressed = asked.removesuffix(IN_FP8), asked.endswith(IN_FP8)
    compress = "fp8" if is_compressed else None
    if plan.startswith("level "):
        return Selection(level=int(plan.removeprefix("level ")), compress=compress)
    return Selection(config=parse(plan) if plan else None, compress=compress)


def run(
    model: torch.nn.Module,
    asked: str,
    *batches: Batch,
    compiler: str = "aot_eager",
    seed: int = 0,
    dynamic: bool = False,
) -> Run:
    """Run one accumulated step of a model from this seed; the model is left unchanged."""
    engine = CompileEngine(selection(asked), compiler, dynamic, unit=MODEL)
    with recorded() as splits:
        engine.attach(model)
        try:
            torch.manual_seed(seed)
            return Run(accumulate(model, batches), tuple(splits), engine.plans())
        finally:
            engine.detach()
