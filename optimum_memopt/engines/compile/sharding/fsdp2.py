"""The memory of FSDP2 around the graphs of a step: gathered parameters and buffers of its collectives.

Allocates and frees as `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py` (torch 2.13). In a forward, the flat
result of an all-gather is held until the next one is copied out. In a backward, the parameters of the preceding module
are gathered meanwhile. A group's gradients are held until its reduce-scatter has copied them, and the copy until the
next group's copy is made.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from optimum_memopt.compat.transformers import embeddings
from optimum_memopt.engines.api.predictions import GRADIENTS, PARAMETERS, TEMPORARY
from optimum_memopt.engines.compile.memory.around_runs import (
    GATHER,
    REDUCE,
    AroundRun,
    Collectives,
    GraphRun,
    Reduced,
    Sharding,
)
from optimum_memopt.engines.compile.memory.events import Event, Storage
from optimum_memopt.engines.compile.torch_compat import fully_shard
from optimum_memopt.engines.compile.torch_compat.fully_shard import ShardedGroup


@dataclass(frozen=True)
class Fsdp2Sharding(Sharding):
    """A model that FSDP2 has sharded.

    Attributes:
        groups: all groups except that of the model itself.
        root: the group of the parameters that no submodule gathers; None: there are none.
        whole: names of unsharded parameters, FSDP2's `ignored_params`.
    """

    groups: tuple[ShardedGroup, ...] = ()
    root: ShardedGroup | None = None
    whole: frozenset[str] = frozenset()

    name: ClassVar = "FSDP2"
    stays_gathered: ClassVar = True
    tells_outside: ClassVar = False
    unknown: ClassVar = ""

    @property
    def is_sharded(self) -> bool:
        return bool(self.groups) or self.root is not None

    @property
    def ranks(self) -> int:
        return max((group.ranks for group in (*self.groups, *filter(None, [self.root]))), default=1)

    def of_module(self, path: str) -> ShardedGroup | None:
        """Returns the group of the module at this path, unless the group is open; None if there is none."""
        return next((group for group in self.groups if not group.is_open and path in group.modules), None)

    def of_parameter(self, name: str) -> ShardedGroup | None:
        """Returns the group that gathers a parameter, by its name in the model; None if no group does."""
        holders = [
            (len(module), group) for group in self.groups for module in group.modules if name.startswith(f"{module}.")
        ]
        return max(holders, key=lambda holder: holder[0])[1] if holders else self.root

    def collectives(self, runs: Sequence[GraphRun]) -> Collectives:
        step, count = _Step(), len(runs)
        owners = [self.of_module(run.layer) if run.layer else None for run in runs]
        opened = [group for group in self.groups if group.is_open]
        # Per run: True if the forward of a module that is not open begins, or ends, with it.
        begins = [
            owner is not None and (not index or owners[index - 1] is not owner) for index, owner in enumerate(owners)
        ]
        ends = [owner is not None and owners[index + 1 : index + 2] != [owner] for index, owner in enumerate(owners)]
        around: list[AroundRun] = []
        for index, owner in enumerate(owners):
            before: list[Event] = []
            if not index:
                before += step.gather(self.root, is_forward=True) if self.root is not None else ()
                for group in opened:
                    before += step.gather(group, is_forward=False)
            if owner is not None and begins[index]:
                before += step.gather(owner, is_forward=True)
            after = step.reshard(owner) if owner is not None and ends[index] and owner.reshards else ()
            around.append(AroundRun(tuple(before), after, owners=self._owners(owner, runs[index].parameters)))
        end_of_forward = step.end_of_forward()
        order = [owner for owner, is_end in zip(owners, ends, strict=True) if is_end]
        # The loss's backward first calls the hook of an open module, or the model's own.
        has_hook = bool(opened) or self.root is not None
        prefetched = step.prefetch(order[-1]) if order and has_hook else ()
        last_closed = max((index for index, owner in enumerate(owners) if owner is not None), default=-1)
        deferred: list[ShardedGroup] = []
        for index in reversed(range(count)):
            owner = owners[index]
            if owner is not None and ends[index]:
                order.pop()
                around[index].before_backward = step.pre_backward(owner, order[-1] if order else None)
            for at in runs[index].again:
                if (repeated := owners[at]) is not None:
                    around[at].before_again, around[at].after_again = step.around_again(repeated)
            ended = [owner] if owner is not None and begins[index] else []
            if owner is not None and not set(runs[index].gradients) - runs[index].parameters.keys():
                deferred += ended
                ended = []
            if index == last_closed + 1:
                ended += [group for group in opened if group.reads_gradients]
            around[index].reduced = tuple(map(step.post_backward, ended))
        rest = [*deferred, *(group for group in opened if not group.reads_gradients), *filter(None, [self.root])]
        last = tuple(map(step.post_backward, rest))
        return Collectives(tuple(around), end_of_forward, prefetched, last, step.end_of_backward())

    def _owners(self, own: ShardedGroup | None, names: Mapping[int, str]) -> dict[int, ShardedGroup]:
        groups = {at: own or self.of_parameter(name) for at, name in names.items() if name not in self.whole}
        return {at: group for at, group in groups.items() if group is not None}


def fsdp2_sharding(model: torch.nn.Module, opened: Collection[str]) -> Fsdp2Sharding:
    """Returns the sharding of a model that has run.

    Args:
        opened: paths of its open modules; see `ShardedGroup.is_open`.
    """
    reads_ids = embeddings(model, "input")
    groups = [
        replace(
            group,
            is_open=not set(opened).isdisjoint(group.modules),
            reads_gradients=not any(model.get_submodule(path) is reads_ids for path in group.modules),
        )
        for group in fully_shard.groups_of(model)
    ]
    inner = tuple(group for group in groups if "" not in group.modules)
    whole = frozenset(dict(model.named_parameters())) - fully_shard.shards(model).keys()
    return Fsdp2Sharding(inner, next((group for group in groups if "" in group.modules), None), whole)


@dataclass
class _Step:
    """The state of a step while its events are built.

    Attributes:
        gathered: keys of the groups whose parameters are gathered.
        flat: names of all-gather results that are not yet copied out, by the group's key.
        last_flat: name of the last all-gather result copied out in the forward, which is still held.
        scattered: name of the last reduce-scatter input, which is still held.
        count: number of names made so far.
    """

    gathered: set[str] = field(default_factory=set)
    flat: dict[str, str] = field(default_factory=dict)
    last_flat: str = ""
    scattered: str = ""
    count: int = 0

    def _name(self, what: str, group: ShardedGroup) -> str:
        self.count += 1
        return f"{what} {_key(group)} {self.count}"

    def all_gather(self, group: ShardedGroup) -> tuple[Event, ...]:
        """Returns the event that gathers all ranks' shards into one flat tensor."""
        name = self.flat[_key(group)] = self._name("flat", group)
        flat = Storage(name, group.gathered, TEMPORARY, GATHER, group.modules[0])
        return (Event(name, GATHER, group.modules[0], (flat,), group.cast),)

    def gather(self, group: ShardedGroup, is_forward: bool) -> tuple[Event, ...]:
        """Returns the events of an all-gather, unless it was prefetched, and of the copies to parameters."""
        key = _key(group)
        events = () if key in self.flat else self.all_gather(group)
        parameters = Storage(f"gathered {key}", group.gathered, PARAMETERS, GATHER, group.modules[0])
        self.gathered.add(key)
        flat = self.flat.pop(key)
        frees = [flat]
        if is_forward:
            frees, self.last_flat = [self.last_flat], flat
        copied = Event(f"{flat} copied", GATHER, group.modules[0], (parameters,), 0, tuple(filter(None, frees)))
        return (*events, copied)

    def reshard(self, group: ShardedGroup) -> tuple[Event, ...]:
        self.gathered.discard(_key(group))
        return (Event("", frees=(f"gathered {_key(group)}",)),)

    def end_of_forward(self) -> tuple[Event, ...]:
        return (Event("", frees=(self.last_flat,)),) if self.last_flat else ()

    def prefetch(self, group: ShardedGroup | None) -> tuple[Event, ...]:
        if group is None or _key(group) in {*self.gathered, *self.flat}:
            return ()
        return self.all_gather(group)

    def pre_backward(self, group: ShardedGroup, before: ShardedGroup | None) -> tuple[Event, ...]:
        gathered = () if _key(group) in self.gathered else self.gather(group, is_forward=False)
        return (*gathered, *self.prefetch(before))

    def around_again(self, group: ShardedGroup) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        """Returns the events before and after a forward that is rerun; parameters that are already all-gathered for
        the group's own backward are not resharded."""
        stays = _key(group) in {*self.gathered, *self.flat}
        before = () if _key(group) in self.gathered else self.gather(group, is_forward=False)
        return before, () if stays else self.reshard(group)

    def post_backward(self, group: ShardedGroup) -> Reduced:
        freed = [*self.reshard(group)[0].frees]
        if not group.reduced:
            return Reduced(group, Event("", frees=tuple(freed)))
        freed += filter(None, [self.scattered])
        self.scattered = self._name("scattered", group)
        copy = Storage(self.scattered, group.reduced, TEMPORARY, REDUCE, group.modules[0])
        share = Storage(f"gradient of {_key(group)}", group.gradient, GRADIENTS, REDUCE, group.modules[0])
        name = self.scattered
        return Reduced(
            group,
            Event("", frees=tuple(freed)),
            Event(name, REDUCE, group.modules[0], (copy,)),
            Event(f"{name} reduced", REDUCE, group.modules[0], (share,)),
        )

    def end_of_backward(self) -> tuple[Event, ...]:
        return (Event("", frees=(self.scattered,)),) if self.scattered else ()


def _key(group: ShardedGroup) -> str:
    return " ".join(group.modules)
