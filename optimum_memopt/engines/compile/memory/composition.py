"""Composes the events of a step from those of its graphs, over the tape of its forward. Pure.

The events of each graph alone are exact. In the composition, a storage that one graph returns and others read or save
is held once, until its last reader is done, and a gradient that one backward returns is the tangent of the backward
that runs next.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from optimum_memopt.engines.api.predictions import OUTPUTS, RECOMPUTED, SAVED
from optimum_memopt.engines.api.run import NOTHING_HELD, HeldUntil
from optimum_memopt.engines.compile.graph.layouts import Layout
from optimum_memopt.engines.compile.memory.around_runs import Reduced
from optimum_memopt.engines.compile.memory.graph_events import GraphEvents
from optimum_memopt.engines.compile.memory.tape import BETWEEN, Outside, Tape, gradient_name
from optimum_memopt.engines.simulator.events import Event, StepEvents, Storage, bytes_during
from optimum_memopt.engines.torch_compat import dynamo

# Name of the tensors that the training loop has computed from the outputs and still holds.
_LEFT = "left by the loop"


def compose(tape: Tape, runs: Sequence[GraphEvents], frees_gradients: bool = False) -> StepEvents:
    """Returns the events of a step whose forward is the tape.

    Args:
        runs: the events of each call.
        frees_gradients: gradients of parameters are added to earlier ones, or released, once a backward returns them.
    """
    composition = _Composition(tape, runs, frees_gradients)
    count, collectives = len(tape.calls), composition.collectives
    forward = [event for index in range(count) for event in composition.forward(index)]
    dropped, forward = composition.hold_results(forward)
    dropping = composition.drop_results(dropped)
    events = [*forward, *collectives.end_of_forward, dropping, *collectives.without_results]
    forward_end = len(events) - 1
    given, *backward = composition.backward(count - 1)
    events += (given, *collectives.prefetched, *backward)
    for index in reversed(range(count - 1)):
        events += composition.backward(index)
    events += (*composition.reduced(collectives.last), *collectives.end, *composition.drop_held())
    until = tape.held_outputs.until
    outputs = sum(storage.bytes for storage in composition.results) if until else 0
    earlier = outputs if until == HeldUntil.NEXT_FORWARD else 0
    return StepEvents(tuple(events), forward_end, outputs, earlier)


def bytes_left_by(tape: Tape, runs: Sequence[GraphEvents], count: int) -> int:
    """Returns the bytes held after the first `count` calls of a tape, with what is gathered for the next one."""
    composition = _Composition(tape, runs)
    events = [event for index in range(count) for event in composition.forward(index)]
    if count < len(tape.calls):
        events += composition.collectives.runs[count].before
    return bytes_during(events)[1]


class _Composition:
    """The names of a step's storages, and the readers of those that pass between graphs."""

    def __init__(self, tape: Tape, runs: Sequence[GraphEvents], frees_gradients: bool = False) -> None:
        self._tape, self._calls, self._given = tape, tape.calls, tape.given
        self._frees_gradients = frees_gradients
        self._graphs = [graph.with_earlier_gradients() if frees_gradients else graph for graph in runs]
        # Names of the storages saved by runs without a backward, by the call after which the runs' results are freed.
        self._unread: dict[int, list[str]] = {}
        for index, graph in enumerate(self._graphs):
            if self._calls[index].is_unread:
                returned = {name for _, name in graph.outputs}
                own = (each.name for each in graph.saved if each.name not in returned)
                self._unread.setdefault(tape.ends_at(index), []).extend(f"{index} {name}" for name in own)
                self._graphs[index] = graph.without_backward()
        # Per run: names in the step of the storages that its forward takes, returns and saves.
        self._names = [self._names_of(index) for index in range(len(self._calls))]
        # Per run: arguments that its backward reads from a new storage; and names held for the forwards it reruns.
        self._later = [self._later_of(index) for index in range(len(self._calls))]
        self._kept: dict[int, dict[str, None]] = {}
        # By name of a storage that passes between graphs: the runs whose backward needs it.
        self._readers: dict[str, set[int]] = {}
        for index, (graph, names) in enumerate(zip(self._graphs, self._names, strict=True)):
            names = names | {local: storage.name for local, storage in self._later[index].items()}
            for local in (*(storage.name for storage in graph.saved), *graph.saved_inputs):
                if local in names:
                    self._readers.setdefault(names[local], set()).add(index)
            for position in self._calls[index].recomputed:
                again = tape.source(index, self._calls[index].inputs[position])
                elsewhere = {_shared(number) for number in self._calls[again].outputs.values()}
                for local, name in self._names[again].items():
                    if local not in self._later[again] and name not in elsewhere:
                        self._kept.setdefault(index, {})[name] = None
                        self._readers.setdefault(name, set()).add(index)
        # Operators between graphs, with reader numbers from -1 down, in the place of the index of a call.
        self._outside = [(-1 - number, operator) for number, operator in enumerate(tape.outside)]
        for reader, operator in self._outside:
            for tensor in operator.saved:
                self._readers.setdefault(_shared(tensor.storage), set()).add(reader)
        self._held: set[str] = set()
        # Storages that the caller holds until the end of the backward.
        self.results: tuple[Storage, ...] = ()
        # Names of storages that the caller holds until it drops them, in order.
        self._of_caller: dict[str, None] = {}
        # Gradient by number of its storage or parameter; and the number of backwards that have yet to read a gradient.
        self._gradients: dict[int, str] = {}
        self._waiting: Counter[str] = Counter()
        self._layouts: dict[str, Layout | None] = {}
        # Filled only if there are operators outside of all graphs.
        self._gradient_bytes: dict[str, int] = {}
        # Gradients that only an operator outside of all graphs reads.
        self._passed: list[str] = []
        self.collectives = tape.collectives([[at for at, _ in graph.gradients] for graph in self._graphs])
        self._around = self.collectives.runs
        # Gradients freed when their sharded group is reduced, by name; and those among them that are tangents.
        self._grouped: dict[str, object] = {}
        self._lent: set[str] = set()

    def _names_of(self, index: int) -> dict[str, str]:
        graph, call = self._graphs[index], self._calls[index]
        names: dict[str, str] = {}
        for position, storage in graph.inputs.items():
            number = call.inputs.get(position)
            if number is not None and number not in self._given:
                names[storage.name] = _shared(number)
        for place, name in graph.outputs:
            returned = None if place is None else call.outputs.get(place)
            # A result that is written back to an input has its own storage until it is copied there.
            if name and returned is not None and returned not in {*self._given, *call.inputs.values()}:
                names.setdefault(name, _shared(returned))
        return names

    def _later_of(self, index: int) -> dict[str, Storage]:
        """Returns the storages that a run's backward reads for offloaded or recomputed arguments, by local name."""
        call, inputs = self._calls[index], self._graphs[index].inputs
        places = {
            place: RECOMPUTED if place in call.recomputed else SAVED for place in call.offloaded | call.recomputed
        }
        return {
            inputs[place].name: inputs[place]._replace(
                name=f"{_shared(call.inputs[place])} for {index}", category=category, layer=call.layer
            )
            for place, category in places.items()
            if place in inputs
        }

    def forward(self, index: int) -> Iterator[Event]:
        """Yields the events of a run, after the allocation of inputs from outside of all graphs, and its releases."""
        graph, names = self._graphs[index], self._names[index]
        yield from self._around[index].before
        given = [self._renamed(index, storage) for storage in graph.inputs.values() if storage.name in names]
        if not index:
            yield from self._saved_outside(-1)
        outside = {storage.name: storage for storage in given if storage.name not in self._held}
        if outside:
            yield Event("", allocates=tuple(outside.values()))
        self._held |= outside.keys()
        for event in graph.forward:
            allocates = tuple(self._renamed(index, storage) for storage in event.allocates)
            self._held.update(storage.name for storage in allocates)
            frees = tuple(self._name(index, name) for name in event.frees)
            yield event._replace(layer=self._layer(index, event.layer), allocates=allocates, frees=frees)
        returned = [self._name(index, name) for name in graph.returned]
        self._of_caller.update((name, None) for name in (*names.values(), *returned) if name in self._held)
        yield from self._saved_outside(index)
        yield from self._around[index].after
        if index < len(self._calls) - 1:
            passed = set(names.values())
            # Results that the caller does not get were written back to an input.
            dropped = [name for name in returned if name not in passed]
            released = [_shared(number) for number in sorted(self._calls[index].released)]
            if frees := (*self._dropped([*dropped, *released]), *self._unread.get(index, ())):
                yield Event("", frees=frees)

    def _saved_outside(self, call: int) -> Iterator[Event]:
        """Yields the allocation of storages that operators after a call save and no graph has allocated."""
        saved = {_shared(number): size for number, size in self._tape.saved_behind(call).items()}
        new = tuple(Storage(name, size, SAVED, BETWEEN) for name, size in saved.items() if name not in self._held)
        self._held |= saved.keys()
        if new:
            yield Event("", allocates=new)

    def hold_results(self, forward: list[Event]) -> tuple[tuple[Storage, ...], list[Event]]:
        """Make the caller hold the forward's results, or copies of them; Trainer keeps only the loss.

        Returns:
            The copies that the caller drops before the backward; and the forward's events, with the allocation of the
            copies, the previous step's results, and the tensors that the caller computes from its results.
        """
        held = self._tape.held_outputs
        if held == NOTHING_HELD:
            return (), forward
        returned = set(map(_shared, self._tape.results))
        made = (storage for event in forward for storage in event.allocates if storage.name in returned)
        if held.copies:
            results = tuple(
                each._replace(name=f"copy of {each.name}", bytes=round(held.copies * each.bytes), category=OUTPUTS)
                for each in made
            )
            dropped = Event("", frees=self._dropped([*self._of_caller]))
            forward = [*forward, Event("", allocates=results), dropped]
        else:
            results = tuple(made)
            for storage in results if held.until else ():
                self._readers.setdefault(storage.name, set()).add(len(self._calls))
            outputs = {each.name: each._replace(category=OUTPUTS) for each in results if each.category != SAVED}
            forward = [
                event._replace(allocates=tuple(outputs.get(each.name, each) for each in event.allocates))
                for event in forward
            ]
        size = sum(each.bytes for each in results)
        left = (Storage(_LEFT, round(held.left * size), OUTPUTS),) if held.left else ()
        self.results = (*results, *left) if held.until else left
        if held.until == HeldUntil.NEXT_FORWARD:
            earlier = tuple(each._replace(name=f"earlier {each.name}", category=OUTPUTS) for each in self.results)
            dropped = Event("", frees=tuple(each.name for each in earlier))
            forward = [Event("", allocates=earlier), *forward, dropped]
        if held.loss:
            forward = [*forward, Event("", "loss", workspace=round(held.loss * size)), Event("", allocates=left)]
        return results if held.copies and not held.until else (), forward

    def drop_results(self, others: Sequence[Storage]) -> Event:
        """Returns the event at which the forward's caller drops its storages and these others."""
        unread = self._unread.get(len(self._calls) - 1, ())
        return Event("", frees=(*self._dropped([*self._of_caller]), *unread, *(storage.name for storage in others)))

    def drop_held(self) -> Iterator[Event]:
        """Yields the event that frees the results that the caller held, and the tensors computed from them."""
        if self.results:
            yield Event("", frees=tuple(storage.name for storage in self.results))

    def backward(self, index: int) -> Iterator[Event]:
        """Yields the events of a run's backward, with its tangents before and the frees of summed gradients after."""
        graph, call, around = self._graphs[index], self._calls[index], self._around[index]
        names = {storage.name: self._name(index, storage.name) for storage in graph.saved}
        names |= {name: self._names[index].get(name, "") for name in graph.saved_inputs}
        names |= {name: storage.name for name, storage in self._later[index].items()}
        needed = [name for name in names.values() if index in self._readers.get(name, ())]
        behind = [entry for entry in self._outside if entry[1].call == index]
        outside = [*self._backward_outside(behind), *around.outside]
        if outside:
            yield Event("")
            yield from outside
        tangents, copied = [], []
        for position, storage in graph.tangents:
            number = -1 if position is None else call.outputs.get(position, -1)
            names[storage.name] = self._gradients.pop(number, "")
            if before := names[storage.name]:
                self._waiting[before] -= 1
            if not before or graph.layouts.needs_copy(position, self._layouts.get(before)):
                copied += [before] if before and not self._waiting[before] else []
                names[storage.name] = f"{index} {storage.name}"
                tangents.append(storage._replace(name=names[storage.name]))
            if (group := around.given) is not None:
                self._grouped[names[storage.name]] = group
                self._waiting[names[storage.name]] += 1
                self._lent.add(names[storage.name])
        # One storage may be the gradient of several results, for example of results that are summed after the run.
        given = Counter(names[storage.name] for _, storage in graph.tangents)
        at_once, at_end = ([], copied) if dynamo.holds_tangents() else (copied, [])
        yield Event("", allocates=tuple(tangents), frees=(*self._passed, *at_once))
        self._passed = []
        yield from around.before_backward
        yield from self._reloaded(index)
        for at in self._tape.again[index]:
            yield from (*self._around[at].before_again, *self._again(at), *self._around[at].after_again)
        for event in graph.backward:
            allocates = tuple(
                storage._replace(name=f"{index} {storage.name}", layer=self._layer(index, storage.layer))
                for storage in event.allocates
            )
            if self._outside:
                self._gradient_bytes.update((storage.name, storage.bytes) for storage in allocates)
            done = [names.get(name, f"{index} {name}") for name in event.frees]
            given.subtract(done)
            done = [name for name in dict.fromkeys(done) if given[name] <= 0 and self._is_last(index, name)]
            yield event._replace(layer=self._layer(index, event.layer), allocates=allocates, frees=tuple(done))
        returned = {names.get(name, f"{index} {name}") for _, name in graph.gradients}
        needed += self._kept.get(index, ())
        unread = [name for name in needed if name not in returned and index in self._readers[name]]
        frees = [name for name in unread if self._is_last(index, name)]
        if frees := [*frees, *at_end, *self._summed(index, names)]:
            yield Event("", frees=tuple(frees))
        yield from self.reduced(around.reduced)

    def _reloaded(self, index: int) -> Iterator[Event]:
        """Yields the reloads of offloaded arguments for a run's backward, and the prefetch for the next backward."""
        if not self._calls[index].offloaded:
            return
        before = next((at for at in reversed(range(index)) if self._calls[at].offloaded), index)
        for at in dict.fromkeys((index, before)):
            places = (self._graphs[at].inputs[place].name for place in self._calls[at].offloaded)
            storages = [self._later[at][name] for name in places if name in self._later[at]]
            if new := tuple(storage for storage in storages if storage.name not in self._held):
                self._held.update(storage.name for storage in new)
                yield Event(f"{new[0].name} reloaded", "reload", self._calls[at].layer, new)

    def _again(self, index: int) -> Iterator[Event]:
        """Yields the events of a recomputed forward; keeps only outputs that a backward reads."""
        graph, call, held = self._graphs[index], self._calls[index], set[str]()
        numbers = {name: call.outputs.get(place, -1) for place, name in graph.outputs if place is not None}
        wanted = {
            name: self._later[at][self._graphs[at].inputs[place].name]
            for name, number in numbers.items()
            for at in range(index + 1, len(self._calls))
            for place in self._calls[at].recomputed
            if self._calls[at].inputs[place] == number
        }
        for event in graph.forward:
            named = (
                wanted.get(storage.name) or storage._replace(name=f"{index} again {storage.name}")
                for storage in event.allocates
            )
            allocates = tuple(storage._replace(category=RECOMPUTED, layer=call.layer) for storage in named)
            frees = tuple(f"{index} again {name}" for name in event.frees)
            held = held.union(storage.name for storage in allocates).difference(frees)
            yield event._replace(layer=call.layer, allocates=allocates, frees=frees)
        left = {storage.name for storage in wanted.values()}
        yield Event("", frees=tuple(sorted(held - left)))

    def reduced(self, groups: Iterable[Reduced]) -> Iterator[Event]:
        """Yields the events that end the backwards of sharded groups."""
        for group in groups:
            gradients = [name for name, owner in self._grouped.items() if owner is group.group]
            for name in gradients:
                del self._grouped[name]
            self._waiting.subtract(self._lent.intersection(gradients))
            self._lent.difference_update(gradients)
            freed = tuple(name for name in gradients if not self._waiting[name])
            yield from (group.before, group.copied._replace(frees=freed), group.after)

    def _backward_outside(self, operators: Iterable[tuple[int, Outside]]) -> Iterator[Event]:
        """Yields the backward events of operators between two calls."""
        for reader, operator in operators:
            done = [_shared(tensor.storage) for tensor in operator.saved]
            done = [name for name in dict.fromkeys(done) if self._is_last(reader, name)]
            event = operator.backward
            yield event._replace(frees=(*event.frees, *done))
            self._gradient_bytes.update((storage.name, storage.bytes) for storage in event.allocates)
            read = []
            for number, result in operator.passed:
                name = gradient_name(number)
                before = self._gradients.setdefault(result, name)
                if self._gradient_bytes.get(before, 0) < self._gradient_bytes.get(name, 0):
                    # The earlier gradient is that of a view of the result, and this operator has read it.
                    self._gradients[result] = name
                    self._waiting[before] -= 1
                    read += [] if self._waiting[before] else [before]
                self._waiting[name] += 1
            if read:
                yield Event("", frees=tuple(read))

    def _summed(self, index: int, names: Mapping[str, str]) -> Iterator[str]:
        """Yields gradients that are freed, since autograd adds each to an earlier one of the same tensor."""
        call, graph = self._calls[index], self._graphs[index]
        for position, local in graph.gradients:
            if not local:
                continue
            name = names.get(local, f"{index} {local}")
            self._layouts.setdefault(name, graph.layouts.gradients.get(position))
            owner = None if position is None else self._around[index].owners.get(position)
            number = None if position is None else call.inputs.get(position)
            if number is not None:
                yield from self._added(index, number, name, owner)
            elif self._frees_gradients and owner is None:
                yield name

    def _added(self, index: int, number: int, name: str, owner: object | None) -> Iterator[str]:
        """Pass on the gradient of a storage, which other runs may also read; yields the gradients that are freed."""
        if owner is not None:
            if self._gradients.setdefault(number, name) == name:
                self._grouped[name] = owner
            else:
                yield name
        elif self._frees_gradients and number in self._given:
            # autograd sums the gradients of all graphs before it accumulates them.
            first = self._gradients.setdefault(number, name)
            if first != name:
                yield name
            if not any(number in earlier.inputs.values() for earlier in self._calls[:index]):
                yield first
        elif number not in self._gradients:
            self._gradients[number] = name
            if number in self._tape.returned[index] or number in self._given:
                self._waiting[name] += 1
            elif index:
                self._passed.append(name)
        elif self._gradients[number] != name and not self._waiting[name]:
            yield name

    def _is_last(self, index: int, name: str) -> bool:
        """Returns True if a storage has no reader left after this run's backward; removes the run from its readers."""
        if (readers := self._readers.get(name)) is not None:
            readers.discard(index)
            return not readers
        return bool(name) and not self._waiting[name]

    def _dropped(self, names: Iterable[str]) -> tuple[str, ...]:
        dropped = [name for name in names if name in self._of_caller]
        for name in dropped:
            del self._of_caller[name]
        return tuple(name for name in dropped if not self._readers.get(name))

    def _name(self, index: int, local: str) -> str:
        return self._names[index].get(local, f"{index} {local}")

    def _renamed(self, index: int, storage: Storage) -> Storage:
        name, layer = self._name(index, storage.name), self._layer(index, storage.layer)
        category = SAVED if self._readers.get(name) else storage.category
        return storage._replace(name=name, layer=layer, category=category)

    def _layer(self, index: int, layer: str) -> str:
        """Returns the path of the layer that runs; equal layers share the graph of the first."""
        return (self._calls[index].layer or layer) if layer else ""


def _shared(number: int) -> str:
    return f"storage {number}"
