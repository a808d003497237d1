"""Plans that a budget was solved for, kept for the next start of the same run: from a checkpoint, for another seed.

An entry is a plan file. Nothing rests on its key: a plan for another graph is told by its signatures, and where its
step is over the budget in this process, another one is solved for.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from optimum_memopt.compat import software
from optimum_memopt.engines.compile.costs.times import cache_folder, cache_path, written_whole
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger
from optimum_memopt.plans.plan_file import PlanFile

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
        # Not `Path.exists`, which raises where the folder cannot be entered.
        if not os.path.exists(path):
            return None
        try:
            file = PlanFile.load(path)
        except MemOptError as error:
            get_logger().debug(f"replaced: {error}")
            return None
        constant = file.solved_for.get(_CONSTANT)
        return cls(file, constant) if type(constant) is int else None

    def write(self, path: Path) -> None:
        """Keep it for the next start, where the folder can be written to."""
        kept = replace(self.file, solved_for={**self.file.solved_for, _CONSTANT: self.constant})
        written_whole(path, kept.to_json())


def entry_path(model: torch.nn.Module, inputs: Mapping[str, object], options: str) -> Path | None:
    """The path of a model's run on this machine; None where the cache is switched off.

    Args:
        inputs: of the first batch.
        options: all that the plan depends on beside the model.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    facts = [
        options,
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
