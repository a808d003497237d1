"""What one joint graph saves, recomputes and offloads. A producer makes it, everything downstream reads only it."""

from dataclasses import dataclass, field

from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate
from optimum_memopt.plans.matching import Matched


@dataclass(frozen=True, eq=False)
class Choice:
    """For one joint graph.

    Attributes:
        nodes_to_save: what the forward saves for the backward beside inputs and sizes, in graph order. An offloaded
            activation is one of them: its strategy rewrites the two graphs afterwards.
        why: `level 1`, as the table's header has it.
        candidates: those that are on, in the order of the graph's candidates.
        auto_recomputed: candidates that torch's own partition recomputes by itself.
        matched: the rows that were asked for.
        mismatch: how this graph differs from the one that a plan file was made for; empty where it does not.
        torchs_graphs: forward and backward where torch has partitioned the graph; None: this engine does.
    """

    nodes_to_save: tuple[fx.Node, ...]
    why: str
    candidates: tuple[Candidate, ...] = ()
    auto_recomputed: frozenset[Candidate] = frozenset()
    matched: Matched = field(default_factory=Matched)
    mismatch: str = ""
    torchs_graphs: Modules | None = None

    @property
    def recomputed(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if candidate.chain is not None)

    @property
    def key(self) -> str:
        """The same text for the same choice in every process, whatever text asked for it."""
        saved = (node.name for node in self.nodes_to_save)
        chosen = (f"{int(candidate.strategy)}:{candidate.activation.root.name}" for candidate in self.candidates)
        return f"saved {','.join(saved)}; chosen {','.join(chosen)}; by torch {self.torchs_graphs is not None}"
