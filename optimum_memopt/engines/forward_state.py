"""What a training forward changes, to run it a second time as if it had not run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class ForwardState:
    """The state that a failing forward may have changed: random generators, and the buffers of modules."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None
    buffers: tuple[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, model: torch.nn.Module, with_buffers: bool, others: Sequence[torch.nn.Module] = ()) -> "ForwardState":
        """Before a forward.

        Args:
            model: whose forward it is.
            with_buffers: which costs a copy of each.
            others: modules that take part, as one that computes the loss; of theirs, too.
        """
        parameter = next(model.parameters(), None)
        return cls(
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(parameter.device) if parameter is not None and parameter.is_cuda else None,
            tuple(
                (module, name, buffer, buffer.detach().clone())
                for module in (torch.nn.ModuleList([model, *others]).modules() if with_buffers else ())
                for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            ),
        )

    def restore(self, model: torch.nn.Module) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, next(model.parameters()).device)
        with torch.no_grad():
            for module, name, buffer, values in self.buffers:
                setattr(module, name, buffer.copy_(values))
