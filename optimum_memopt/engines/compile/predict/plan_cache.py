"""Plans of budgets, kept for the next start of the same run: from a checkpoint, for another seed.

An entry is a plan file. Nothing rests on its key: a plan for another graph is told by its signatures, and where its
step is over the budget in this process, another one is solved for.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from optimum_memopt.cache_files import entry_bytes, written_whole
from optimum_memopt.compat.installed import software
from optimum_memopt.engines.api.run import LargestBatch, Run
from optimum_memopt.engines.compile.costs.times import cache_folder, cache_path
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.partition.choice import Choice, SavedNodes
from optimum_memopt.engines.compile.partition.producers.producer import SolvedForward
from optimum_memopt.engines.compile.partition.producers.stated import FromPlanFile
from optimum_memopt.errors import MemOptError, path_excerpt
from optimum_memopt.logs import get_logger
from optimum_memopt.plans.plan_file import LARGEST_FILE, PlanFile
from optimum_memopt.sizes import AUTO, Budget

# The environment variable that switches the cache off.
SWITCH = "OPTIMUM_MEMOPT_PLAN_CACHE"
# The field of `PlanFile.solved_for` with the bytes that the process held beside the step, by the plan's prediction.
_CONSTANT = "constant_bytes"


@dataclass(frozen=True)
class CachedPlan:
    """A plan of an earlier start.

    Attributes:
        constant: bytes that the process held beside the step then.
    """

    file: PlanFile
    constant: int

    @classmethod
    def read(cls, path: Path) -> "CachedPlan | None":
        """The entry at a path; None where there is none, or a damaged one."""
        if (content := entry_bytes(path, LARGEST_FILE)) is None:
            return None
        try:
            file = PlanFile.parse(content, path_excerpt(path))
        except MemOptError as error:
            get_logger().debug(f"replaced: {error}")
            return None
        constant = file.solved_for.get(_CONSTANT)
        return cls(file, constant) if type(constant) is int else None

    def write(self, path: Path) -> None:
        """Keep it for the next start, where the folder can be written to."""
        kept = replace(self.file, solved_for={**self.file.solved_for, _CONSTANT: self.constant})
        written_whole(path, kept.to_json())


@dataclass(eq=False)
class EarlierPlan:
    """The plan of an earlier start, and its choices for the graphs of this one so far."""

    cached: CachedPlan
    _nodes: dict[tuple[str, str, int], SavedNodes] = field(default_factory=dict)

    @property
    def has_choices(self) -> bool:
        return bool(self._nodes)

    @property
    def solved(self) -> SolvedForward:
        """The plan, by this start's graphs."""
        return SolvedForward(self.cached.file.why, self._nodes)

    def choice(self, graph: AnalyzedGraph, choices: Sequence[Choice]) -> Choice | None:
        """The choice for a graph, after those for earlier runs; None: the plan was made for another graph."""
        choice = FromPlanFile(self.cached.file).choose(graph, choices)
        if choice.mismatch:
            return None
        self._nodes[graph.digest, graph.layer, graph.call_index] = SavedNodes.of(graph, choice)
        return replace(choice, why=self.cached.file.why)


def entry_path(
    model: torch.nn.Module,
    inputs: Mapping[str, object],
    budget: Budget,
    largest: LargestBatch | None,
    run: Run,
    options: str,
) -> Path | None:
    """The path of a run's plan; None where the cache is switched off, or the budget is what is free at its start,
    which changes.

    Args:
        inputs: of the forward.
        options: all others that a plan depends on.
    """
    if budget.text == AUTO or os.environ.get(SWITCH) == "0":
        return None
    optimizer = f"{type(run.optimizer).__name__} {run.releases_gradients} {run.held_outputs} {run.others}"
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    facts = [
        f"{budget} {largest} {optimizer} {run.gradient_accumulation} {options}",
        cache_path(next(model.parameters()).device).name,
        *map(str, software().items()),
        f"{model!r} {getattr(model, 'config', None)}",
        *(
            f"{name} {each.dtype} {each.device} {list(each.shape)} {each.requires_grad}"
            for name, each in tensors.items()
        ),
        *(
            f"{name} {value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{name} {value!r}"
            for name, value in sorted(inputs.items())
        ),
    ]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return cache_folder() / "plans" / f"{digest}.json"
