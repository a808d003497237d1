"""The tapes of earlier calls: a forward that makes the same runs has the same tape, and nothing has to be noted."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from optimum_memopt.engines.compile.memory.tape import RunId, Tape, TapeRecorder
from optimum_memopt.engines.compile.torch_compat import dynamo

# Calls whose tapes are kept; the oldest is dropped first.
_MOST = 128
# Times that equal calls may make other runs: a forward may leave out layers at random.
_MOST_CHANGES = 3


class OtherRunsError(RuntimeError):
    """A forward makes other runs than an earlier call with equal arguments."""


@dataclass(frozen=True)
class KnownTape:
    """A tape, and each run with the sizes of its arguments."""

    runs: tuple[tuple[RunId, Mapping[int, tuple[int, ...]]], ...]
    tape: Tape


class TapePlayer:
    """Plays a known tape while a forward makes its runs, in the place of a `TapeRecorder`."""

    def __init__(self, known: KnownTape) -> None:
        self._known = known
        self.count = 0

    def before(self, run: RunId, arguments: Sequence[object], parameters: Sequence[str] = ()) -> None:
        """A graph is about to run. Raises OtherRunsError where that is not the next run of the tape."""
        runs = self._known.runs
        if self.count == len(runs):
            raise OtherRunsError
        expected, sizes = runs[self.count]
        if run != expected or not _have_sizes(arguments, sizes):
            raise OtherRunsError
        self.count += 1

    def after(self, results: Sequence[object]) -> None:
        """A graph has returned."""

    def end(self, outputs: Iterable[object]) -> None:
        """Raises OtherRunsError where runs of the tape are missing."""
        if self.count < len(self._known.runs):
            raise OtherRunsError

    def tape(self, graphs: Sequence[Hashable]) -> Tape:
        """Returns the known tape."""
        return self._known.tape


@dataclass(eq=False)
class KnownTapes:
    """Tapes by the calls that they were recorded in; see `described`."""

    _tapes: dict[Hashable, KnownTape] = field(default_factory=dict)
    _changes: int = 0

    def player(self, call: Hashable) -> TapePlayer | None:
        """Returns a player for an equal call; None: its tape is not known."""
        known = self._tapes.get(call)
        return None if known is None else TapePlayer(known)

    def add(self, call: Hashable, recorder: TapeRecorder, tape: Tape) -> None:
        """Keep what was recorded in a call, unless equal calls have made other runs again and again."""
        if self._changes >= _MOST_CHANGES:
            return
        if len(self._tapes) >= _MOST:
            del self._tapes[next(iter(self._tapes))]
        self._tapes[call] = KnownTape(tuple(recorder.runs), tape)

    def forget(self) -> None:
        """An equal call has made other runs."""
        self._tapes.clear()
        self._changes += 1


def described(values: Iterable[object]) -> Hashable:
    """Returns what the runs of a forward with these arguments may depend on: shape, dtype and gradient of tensors,
    which of them share a storage, and other values that are numbers or text."""
    storages: dict[int, int] = {}
    return tuple(
        (value.shape, value.dtype, value.requires_grad, storages.setdefault(dynamo.storage_id(value), len(storages)))
        if isinstance(value, torch.Tensor)
        else (value if isinstance(value, int | float | str) else type(value))
        for value in values
    )


def _have_sizes(arguments: Sequence[object], sizes: Mapping[int, tuple[int, ...]]) -> bool:
    """Returns whether arguments have the sizes that `tape.sizes_of` found in others."""
    for place, expected in sizes.items():
        argument = arguments[place]
        if (argument.shape if isinstance(argument, torch.Tensor) else (argument,)) != expected:
            return False
    return True
