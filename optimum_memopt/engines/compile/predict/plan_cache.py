"""Caches plans of budgets for the next start of the same run: from a checkpoint, or with another seed.

An entry is a plan file. Correctness does not depend on its key: signatures identify a plan for another graph, and a
plan whose step is over the budget in this process is solved again.
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
from optimum_memopt.engines.compile.costs.times import cache_path, data_folder
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.memory.footprint import state_sizes
from optimum_memopt.engines.compile.partition.choice import Choice, SavedNodes
from optimum_memopt.engines.compile.partition.producers.producer import SolvedForward
from optimum_memopt.engines.compile.partition.producers.stated import FromPlanFile
from optimum_memopt.errors import MemOptError, path_excerpt
from optimum_memopt.logs import get_logger
from optimum_memopt.memory.optimizers import planned_like
from optimum_memopt.plans.plan_file import LARGEST_FILE, PlanFile
from optimum_memopt.sizes import AUTO, Budget

# The environment variable that switches the cache off.
SWITCH = "OPTIMUM_MEMOPT_PLAN_CACHE"
# The field of `PlanFile.solved_for` with the bytes that the plan's prediction assumed the process to hold beside the
# step.
_CONSTANT = "constant_bytes"


@dataclass(frozen=True)
class CachedPlan:
    """A plan of an earlier start.

    Attributes:
        constant: bytes that the earlier process held beside the step.
    """

    file: PlanFile
    constant: int

    @classmethod
    def read(cls, path: Path) -> "CachedPlan | None":
        """Returns the entry at a path; None if it is missing or damaged."""
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
        """Write the entry for the next start, if the folder is writable."""
        kept = replace(self.file, solved_for={**self.file.solved_for, _CONSTANT: self.constant})
        written_whole(path, kept.to_json())


@dataclass(eq=False)
class EarlierPlan:
    """The plan of an earlier start, and its choices for this start's graphs so far."""

    cached: CachedPlan
    _nodes: dict[tuple[str, str, int], SavedNodes] = field(default_factory=dict)

    @property
    def has_choices(self) -> bool:
        return bool(self._nodes)

    @property
    def solved(self) -> SolvedForward:
        """Returns the plan, keyed by this start's graphs."""
        return SolvedForward(self.cached.file.why, self._nodes)

    def choice(self, graph: AnalyzedGraph, choices: Sequence[Choice]) -> Choice | None:
        """Returns the choice for a graph, given the choices for earlier runs; None if the plan is for another
        graph."""
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
    """Returns the path of a run's plan; None if the cache is switched off, or the budget is `auto`: the free memory at
    the start, which changes.

    Args:
        inputs: keyword arguments of the forward.
        options: all other options that a plan depends on.
    """
    if budget.text == AUTO or os.environ.get(SWITCH) == "0":
        return None
    states = sum(state_sizes(run.optimizer, [each for each in model.parameters() if each.requires_grad]))
    optimizer = f"{planned_like(run.optimizer).name} {states} {run.releases_gradients} {run.micro_batches}"
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    facts = [
        f"{budget} {largest} {optimizer} {run.held_outputs} {run.others} {run.gradient_accumulation} {options}",
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
    return data_folder() / "plans" / f"{digest}.json"
