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
from optimum_memopt.engines.simulator.events import Event, Storage
from optimum_memopt.engines.torch_compat import fully_shard
from optimum_memopt.engines.torch_compat.fully_shard import ShardedGroup


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
        step, calls = _Step(), self._calls(runs)
        around = self._forward(step, calls)
        end_of_forward = _freeing(step.last_flat)
        last = next((call.ends for call in reversed(calls) if call.ends is not None), None)
        # The loss's backward first calls the hook of an open module, or the model's own.
        has_hook = bool(self._opened) or self.root is not None
        prefetched = step.prefetch(last) if has_hook else ()
        reduced = self._backward(step, calls, around)
        return Collectives(tuple(around), end_of_forward, prefetched, reduced, _freeing(step.scattered))

    @property
    def _opened(self) -> list[ShardedGroup]:
        return [group for group in self.groups if group.is_open]

    def _calls(self, runs: Sequence[GraphRun]) -> list["_Call"]:
        owners = [self.of_module(run.layer) if run.layer else None for run in runs]
        before, behind = [None, *owners[:-1]], [*owners[1:], None]
        return [
            _Call(run, owner, None if earlier is owner else owner, None if later is owner else owner)
            for run, owner, earlier, later in zip(runs, owners, before, behind, strict=True)
        ]

    def _forward(self, step: "_Step", calls: Sequence["_Call"]) -> list[AroundRun]:
        """Returns the events around the calls in the forward."""
        around: list[AroundRun] = []
        for index, call in enumerate(calls):
            before: list[Event] = []
            if not index:
                before += step.gather(self.root, is_forward=True) if self.root is not None else ()
                for group in self._opened:
                    before += step.gather(group, is_forward=False)
            if call.begins is not None:
                before += step.gather(call.begins, is_forward=True)
            after = step.reshard(call.ends) if call.ends is not None and call.ends.reshards else ()
            around.append(AroundRun(tuple(before), after, owners=self._owners(call.owner, call.run.parameters)))
        return around

    def _backward(self, step: "_Step", calls: Sequence["_Call"], around: Sequence[AroundRun]) -> tuple[Reduced, ...]:
        """Adds the events around the calls in the backward; returns the ends of the groups reduced after it."""
        last_closed = max((index for index, call in enumerate(calls) if call.owner is not None), default=-1)
        waiting = [call.ends for call in calls if call.ends is not None]
        deferred: list[ShardedGroup] = []
        for index, call in reversed(list(enumerate(calls))):
            if call.ends is not None:
                waiting.pop()
                around[index].before_backward = step.pre_backward(call.ends, waiting[-1] if waiting else None)
            for at in call.run.again:
                if (repeated := calls[at].owner) is not None:
                    around[at].before_again, around[at].after_again = step.around_again(repeated)
            ended = [call.begins] if call.begins is not None else []
            if not set(call.run.gradients) - call.run.parameters.keys():
                # Without a gradient for an input, no hook ends the module's backward.
                deferred += ended
                ended = []
            if index == last_closed + 1:
                ended += [group for group in self._opened if group.reads_gradients]
            around[index].reduced = tuple(map(step.post_backward, ended))
        open_groups = (group for group in self._opened if not group.reads_gradients)
        return tuple(map(step.post_backward, [*deferred, *open_groups, *filter(None, [self.root])]))

    def _owners(self, own: ShardedGroup | None, names: Mapping[int, str]) -> dict[int, ShardedGroup]:
        groups = {at: own or self.of_parameter(name) for at, name in names.items() if name not in self.whole}
        return {at: group for at, group in groups.items() if group is not None}


@dataclass(frozen=True)
class _Call:
    """A run of a graph.

    Attributes:
        owner: the group of the module that it runs in; None: it runs in no module, or in an open one.
        begins: the same group if the module's forward begins with this run, else None.
        ends: the same group if the module's forward ends with this run, else None.
    """

    run: GraphRun
    owner: ShardedGroup | None
    begins: ShardedGroup | None
    ends: ShardedGroup | None


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
        return _freeing(f"gathered {_key(group)}")

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


def _freeing(name: str) -> tuple[Event, ...]:
    return (Event("", frees=(name,)),) if name else ()


def _key(group: ShardedGroup) -> str:
    return " ".join(group.modules)
