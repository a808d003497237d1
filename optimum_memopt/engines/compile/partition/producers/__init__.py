"""Classes that make choices. A new producer is a class here and a line in `producer_for`."""

from collections.abc import Sequence

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.partition.producers.budget import FromBudget
from optimum_memopt.engines.compile.partition.producers.compressed import Compressed
from optimum_memopt.engines.compile.partition.producers.producer import Producer, TorchDefault
from optimum_memopt.engines.compile.partition.producers.stated import FromConfig, FromLevel, FromPlanFile
from optimum_memopt.plans.matching import Matched

__all__ = ["Producer", "matched_in", "producer_for"]


def matched_in(producer: Producer, runs: Sequence[PartitionedGraph], are_layers_frozen: bool = False) -> Matched:
    """Returns the requested rows that match in the graphs of a forward that has run.

    The choice of a single graph has them. With several graphs an id may be in any of them, and each graph is compiled
    and run before the next one is traced from its results: all ids are known only at the end of the forward.
    """
    if len(runs) == 1 and not are_layers_frozen:
        return runs[0].choice.matched
    return producer.match([candidate for graph in runs for candidate in graph.candidates], are_layers_frozen)


def producer_for(selection: Selection) -> Producer:
    """Returns the producer for the user's selection."""
    if selection.plan is not None:
        return FromPlanFile(selection.plan)
    if selection.budget is not None:
        return FromBudget(selection.budget, compresses=selection.compress is not None)
    producer: Producer = TorchDefault() if selection.config is None else FromConfig(selection.config)
    if selection.level:
        producer = FromLevel(selection.level)
    return Compressed(producer) if selection.compress is not None else producer
