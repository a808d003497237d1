"""No plan: torch's own partition, and what it recomputes by itself."""

from torch import fx

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.joint import is_tensor, root
from optimum_memopt.engines.compile.memory.events import Prediction, schedule
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.producer import GraphContext, Producer


class TorchDefault(Producer):
    @classmethod
    def of(cls, selection: Selection) -> "TorchDefault":
        return cls()

    def choose(self, graph: AnalyzedGraph, context: GraphContext) -> Choice:
        forward, backward = graph.partition_by_torch()
        (output,) = forward.graph.find_nodes(op="output")
        saved = [node for node in output.args[0][graph.joint.num_fwd_outputs :] if isinstance(node, fx.Node)]
        names = {node.name for node in saved}
        roots = {root(node).name for node in saved}
        nodes = (node for node in graph.joint.nodes if node.op == "call_function" and is_tensor(node))
        return Choice(
            # By name: torch's partitioner has copied the graph.
            nodes_to_save=tuple(node for node in nodes if node.name in names),
            why="no plan: torch's own partition",
            auto_recomputed=frozenset(c for c in graph.candidates if c.activation.root.name not in roots),
            torchs_graphs=(forward, backward),
        )


def torchs_own(graph: AnalyzedGraph) -> tuple[Choice, Prediction]:
    """torch's own partition, and what its two graphs hold with the first batch."""
    choice = TorchDefault().choose(graph, GraphContext())
    assert choice.torchs_graphs is not None
    events = schedule(*choice.torchs_graphs, graph.joint.num_fwd_outputs, cuda=graph.cuda)
    return choice, events.predict(graph.size_hints)
