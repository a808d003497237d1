"""How ranks share the parameters of a trained model: unsharded, FSDP2 or ZeRO 3; `shared_model` chooses."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from optimum_memopt.engines.compile.memory.around_runs import Sharding, Unsharded
from optimum_memopt.engines.compile.sharding.fsdp2 import fsdp2_sharding
from optimum_memopt.engines.compile.sharding.zero3 import LeafSteps, Zero3Sharding
from optimum_memopt.engines.torch_compat import fully_shard, zero3
from optimum_memopt.errors import MemOptError


@dataclass(frozen=True)
class WholeModel:
    """A model that is not sharded: each rank holds all parameters.

    Attributes:
        is_shared: whether ranks gather its parameters together, so that no rank may run a forward alone.
    """

    model: torch.nn.Module

    is_shared = False

    def gathered(self) -> list[torch.Tensor]:
        """Returns the parameters that are gathered before a forward."""
        return []

    def gathered_again(self, layer: torch.nn.Module) -> AbstractContextManager[None]:
        """Returns a context that gathers a layer's parameters for a forward that a backward reruns."""
        return contextlib.nullcontext()

    def forgetting(self) -> Callable[[], None]:
        """Returns a function that makes DeepSpeed, if it trains the model, forget a forward that is rerun."""
        return zero3.forgetting(self.model)

    def sharding(
        self, forward: Callable[..., Any], args: tuple[Any, ...], inputs: Mapping[str, Any], compiled: Collection[str]
    ) -> Sharding:
        """Returns how ranks share the parameters in a step, for a forward that has run.

        Args:
            forward: the forward of plain PyTorch; takes positional arguments and keyword arguments.
            args, inputs: positional and keyword arguments of the batch.
            compiled: paths of the layers whose graphs are known.
        """
        return Unsharded()


@dataclass(frozen=True)
class Fsdp2Model(WholeModel):
    """A model that FSDP2 shards.

    Attributes:
        opened: paths of its open modules, gathered with the head; see `capture/regions.py`.
    """

    opened: Collection[str]

    is_shared = True

    def gathered(self) -> list[torch.Tensor]:
        return fully_shard.gathered(self.model)

    def gathered_again(self, layer: torch.nn.Module) -> AbstractContextManager[None]:
        return fully_shard.gathered_again(layer)

    def sharding(self, *_: Any) -> Sharding:
        return fsdp2_sharding(self.model, self.opened)


@dataclass(frozen=True)
class Zero3Model(WholeModel):
    """A model that ZeRO 3 shards.

    Attributes:
        layers: paths of its leaf modules.
    """

    layers: Collection[str]

    is_shared = True

    def gathered_again(self, layer: torch.nn.Module) -> AbstractContextManager[None]:
        return zero3.gathered_again(layer)

    def sharding(
        self, forward: Callable[..., Any], args: tuple[Any, ...], inputs: Mapping[str, Any], compiled: Collection[str]
    ) -> Sharding:
        try:
            if (partitioning := zero3.partitioning_of(self.model)) is None:
                return Unsharded()
            steps = LeafSteps(self.model, forward, args, inputs, partitioning, self.layers, compiled)
            steps({}, partitioning.prefetched)
        except MemOptError as error:
            return Unsharded(str(error))
        return Zero3Sharding(steps, partitioning.ranks, partitioning.prefetched)


def shared_model(
    model: torch.nn.Module, opened: Collection[str] = (), leafs: Collection[str] | None = None
) -> WholeModel:
    """Returns the model with its sharding method.

    Args:
        opened: see `Fsdp2Model`.
        leafs: paths of the layers that ZeRO 3 gathers as leaf modules; None for a model that it does not shard.
    """
    if leafs is not None:
        return Zero3Model(model, leafs)
    return Fsdp2Model(model, opened) if fully_shard.is_sharded(model) else WholeModel(model)
