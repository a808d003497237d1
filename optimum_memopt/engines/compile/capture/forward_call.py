"""A call of a training forward: its arguments, and the kind of call that they make, each of which is traced apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from optimum_memopt.engines.compile.torch_compat.attention import KeptMasks
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache


@dataclass(frozen=True)
class ForwardArgs:
    """The arguments of a training forward.

    Attributes:
        loss_only: nobody calls backward from any output but the loss.
        reader: who may read more of the outputs than the loss, empty when nobody does.
        drops_cache: of keys and values, which plain PyTorch may make.
    """

    args: tuple[Any, ...]
    inputs: dict[str, Any]
    loss_only: bool
    reader: str
    drops_cache: bool = False

    @classmethod
    def of(
        cls, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_only: bool, reader: str
    ) -> "ForwardArgs":
        """From a call's arguments; disables the key-value cache unless requested."""
        inputs = without_key_value_cache(model, args, kwargs)
        return cls(args, inputs, loss_only, reader, inputs.keys() != kwargs.keys())


class CallKind(NamedTuple):
    """The kind of a call: each is traced by itself.

    Attributes:
        hooks: of all modules.
        reads_outputs: loops compute gradients of outputs beside the loss.
        trains: for each parameter of the layers, where those are regions.
    """

    loss_only: bool
    drops_logits: bool
    masks: KeptMasks
    hooks: tuple[int, ...]
    has_regions: bool
    reads_outputs: bool
    trains: tuple[bool, ...]

    def compared(self, other: "CallKind") -> list[str]:
        """The differences from another kind, in words."""
        kept = (
            "only the loss keeps its gradient"
            if self.loss_only
            else "outputs beside the loss may be read, and keep theirs"
        )
        lines = {
            "loss_only": kept,
            "drops_logits": "no logits are returned" if self.drops_logits else "logits are returned",
            "masks": self.masks.first_after(other.masks),
            "hooks": "all modules have other hooks",
            "has_regions": "layers are compiled by themselves" if self.has_regions else "layers have hooks",
            "reads_outputs": "outputs beside the loss have gradients",
            "trains": "other parameters train",
        }
        if self.has_regions != other.has_regions:
            # Only those in regions are known.
            del lines["trains"]
        return [line for name, line in lines.items() if getattr(self, name) != getattr(other, name)]
