"""How ranks share the parameters of a model that trains; `shared_model` chooses."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from optimum_memopt.engines.compile.memory.around_runs import Sharding, Unsharded
from optimum_memopt.engines.compile.sharding.fsdp2 import fsdp2_sharding
from optimum_memopt.engines.compile.sharding.zero3 import LeafSteps, Zero3Sharding
from optimum_memopt.engines.compile.torch_compat import fully_shard, zero3
from optimum_memopt.errors import MemOptError


@dataclass(frozen=True)
class WholeModel:
    """A model whose parameters each rank holds.

    Attributes:
        is_shared: ranks gather its parameters together, so that none may run a forward alone.
    """

    model: torch.nn.Module

    is_shared = False

    def gathered(self) -> list[torch.Tensor]:
        """Returns the parameters that are gathered before a forward."""
        return []

    def gathered_again(self, layer: torch.nn.Module) -> AbstractContextManager[None]:
        """Around a forward of a layer that a backward runs."""
        return contextlib.nullcontext()

    def forgetting(self) -> Callable[[], None]:
        """Returns a function that has DeepSpeed, if it trains the model, forget a forward that runs again."""
        return zero3.forgetting(self.model)

    def sharding(
        self, forward: Callable[..., Any], args: tuple[Any, ...], inputs: Mapping[str, Any], compiled: Collection[str]
    ) -> Sharding:
        """Returns what a step holds around the graphs of a forward that has run.

        Args:
            forward: as plain PyTorch runs it, of positional arguments and those by keyword.
            args, inputs: of the batch.
            compiled: paths of the layers whose graphs are known.
        """
        return Unsharded()


@dataclass(frozen=True)
class Fsdp2Model(WholeModel):
    """A model that FSDP2 shards.

    Attributes:
        opened: paths of its open modules; see `capture/regions.py`.
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
    """Returns how ranks share a model.

    Args:
        opened: see `Fsdp2Model`.
        leafs: paths of the layers that ZeRO 3 gathers; None for a model that it does not shard.
    """
    if leafs is not None:
        return Zero3Model(model, leafs)
    return Fsdp2Model(model, opened) if fully_shard.is_sharded(model) else WholeModel(model)
