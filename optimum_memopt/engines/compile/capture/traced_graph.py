"""A graph that dynamo has traced, compiled once for each choice."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.loss.decide import LossDecision
from optimum_memopt.engines.compile.memory.inductor_programs import InductorPrograms
from optimum_memopt.engines.compile.partition.choice import InputsPlan
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.torch_compat import dynamo


@dataclass(frozen=True, eq=False)
class Variant:
    """A graph as it was compiled for one choice.

    Attributes:
        partitioned: None where nothing of it is trained, as `analyzed`.
        analyzed: the joint graph that the choice is for, which is traced again for each.
        inputs: of the choice.
    """

    run: Callable[..., Any]
    programs: InductorPrograms
    partitioned: PartitionedGraph | None
    analyzed: AnalyzedGraph | None
    inputs: InputsPlan = field(default_factory=InputsPlan)


@dataclass(eq=False)
class TracedGraph:
    """A graph that dynamo has traced, or a part of one.

    Attributes:
        inputs: fake ones, that it was traced with.
        parameters: the name of each input that is a parameter, empty for the others.
        losses: that were decided for it.
        layer: path of the layer that it was traced for; empty: of none.
        is_all: nothing of the forward that was traced runs outside of it and others that were traced with it.
        is_whole: it is all that was traced, and no layer.
        module: whose forward, or a part of it, it is.
        trace: None where it is compiled while dynamo traces it.
        analyzed: its joint graph; None where nothing of it is trained.
        variants: by the keys of their choices.
        asked: with which choices the latest was chosen, for which run of the forward and which layer.
    """

    graph: fx.GraphModule
    inputs: Sequence[Any]
    parameters: tuple[str, ...]
    losses: tuple[LossDecision, ...]
    layer: str
    is_all: bool
    is_whole: bool
    module: "weakref.ref[torch.nn.Module] | None"
    trace: dynamo.Trace | None
    analyzed: AnalyzedGraph | None = None
    variants: dict[str, Variant] = field(default_factory=dict)
    asked: tuple[object, int, str] | None = None
