"""The arguments of a training forward's call, and the kinds of calls, each of which is traced separately."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from optimum_memopt.engines.compile.memory.known_tapes import described
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.engines.torch_compat import dynamo
from optimum_memopt.engines.torch_compat.attention import KeptMasks


@dataclass(frozen=True)
class ForwardArgs:
    """The arguments of a training forward.

    Attributes:
        args: positional arguments.
        inputs: keyword arguments.
        loss_only: backward is only called on the loss.
        reader: name of the code that may read outputs beside the loss; empty if none does.
        drops_cache: the key-value cache, which plain PyTorch may make, is disabled.
    """

    args: tuple[Any, ...]
    inputs: dict[str, Any]
    loss_only: bool
    reader: str
    drops_cache: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """Returns all arguments by name, positional ones by their place."""
        return {**{f"argument {place}": each for place, each in enumerate(self.args)}, **self.inputs}

    @cached_property
    def description(self) -> Hashable:
        """Returns `described` of all arguments."""
        return described(dynamo.tree_leaves((self.args, self.inputs)))

    @classmethod
    def of(
        cls, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_only: bool, reader: str
    ) -> "ForwardArgs":
        """Returns the arguments of a call, with the key-value cache disabled unless requested."""
        inputs = without_key_value_cache(model, args, kwargs)
        return cls(args, inputs, loss_only, reader, inputs.keys() != kwargs.keys())


class CallKind(NamedTuple):
    """The kind of a call. Each kind is traced separately.

    Attributes:
        hooks: ids of global module hooks.
        reads_outputs: training loops compute gradients of outputs beside the loss.
        trains: for each parameter of the layers whether it trains; empty if layers are not regions.
    """

    loss_only: bool
    drops_logits: bool
    masks: KeptMasks
    hooks: tuple[int, ...]
    has_regions: bool
    reads_outputs: bool
    trains: tuple[bool, ...]

    def compared(self, other: "CallKind") -> list[str]:
        """Returns the differences from another kind in words."""
        kept = (
            "only the loss keeps its gradient"
            if self.loss_only
            else "outputs other than the loss may be read, and keep their gradients"
        )
        lines = {
            "loss_only": kept,
            "drops_logits": "no logits are returned" if self.drops_logits else "logits are returned",
            "masks": self.masks.first_after(other.masks),
            "hooks": "global module hooks changed",
            "has_regions": "layers are compiled separately" if self.has_regions else "layers have hooks",
            "reads_outputs": "outputs other than the loss have gradients",
            "trains": "the trained parameters changed",
        }
        if self.has_regions != other.has_regions:
            # Only known with regions.
            del lines["trains"]
        return [line for name, line in lines.items() if getattr(self, name) != getattr(other, name)]
