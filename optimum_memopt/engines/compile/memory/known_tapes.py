"""Cache of the tapes of earlier calls: a forward that makes the same runs reuses the tape instead of recording it."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from optimum_memopt.engines.compile.memory.tape import RunId, Tape, TapeRecorder
from optimum_memopt.engines.torch_compat import dynamo

# Maximum number of tapes; the oldest is dropped first.
_MOST = 128
# How often equal calls may make other runs before no more tapes are kept: a forward may skip layers at random.
_MOST_CHANGES = 3


class OtherRunsError(RuntimeError):
    """A forward's runs differ from those of an earlier call with equal arguments."""


@dataclass(frozen=True)
class KnownTape:
    """A tape, and the id and argument sizes of each run."""

    runs: tuple[tuple[RunId, Mapping[int, tuple[int, ...]]], ...]
    tape: Tape


class TapePlayer:
    """Checks a forward's runs against a known tape; replaces a `TapeRecorder`."""

    def __init__(self, known: KnownTape) -> None:
        self._known = known
        self.count = 0

    def before(self, run: RunId, arguments: Sequence[object], parameters: Sequence[str] = ()) -> None:
        """Check that the graph about to run is the next run of the tape; raises OtherRunsError otherwise."""
        runs = self._known.runs
        if self.count == len(runs):
            raise OtherRunsError
        expected, sizes = runs[self.count]
        if run != expected or not _have_sizes(arguments, sizes):
            raise OtherRunsError
        self.count += 1

    def after(self, results: Sequence[object]) -> None:
        """Do nothing: the results of a graph are on the tape."""

    def end(self, outputs: Iterable[object]) -> None:
        """Raises OtherRunsError if runs of the tape are missing."""
        if self.count < len(self._known.runs):
            raise OtherRunsError

    def tape(self, graphs: Sequence[Hashable]) -> Tape:
        """Returns the known tape."""
        return self._known.tape


@dataclass(eq=False)
class KnownTapes:
    """Tapes by the call in which each was recorded; keys are from `described`."""

    _tapes: dict[Hashable, KnownTape] = field(default_factory=dict)
    _changes: int = 0

    def player(self, call: Hashable) -> TapePlayer | None:
        """Returns a player of the tape of an equal call; None if there is none."""
        known = self._tapes.get(call)
        return None if known is None else TapePlayer(known)

    def add(self, call: Hashable, recorder: TapeRecorder, tape: Tape) -> None:
        """Keep the tape of a call, unless equal calls have repeatedly made other runs."""
        if self._changes >= _MOST_CHANGES:
            return
        if len(self._tapes) >= _MOST:
            del self._tapes[next(iter(self._tapes))]
        self._tapes[call] = KnownTape(tuple(recorder.runs), tape)

    def forget(self) -> None:
        """Drop all tapes, since an equal call has made other runs."""
        self._tapes.clear()
        self._changes += 1


def described(values: Iterable[object]) -> Hashable:
    """Returns a key of everything in these arguments that a forward's runs may depend on: shape, dtype and
    `requires_grad` of tensors, which tensors share a storage, numbers and strings, and the types of other values."""
    storages: dict[int, int] = {}
    return tuple(
        (value.shape, value.dtype, value.requires_grad, storages.setdefault(dynamo.storage_id(value), len(storages)))
        if isinstance(value, torch.Tensor)
        else (value if isinstance(value, int | float | str) else type(value))
        for value in values
    )


def _have_sizes(arguments: Sequence[object], sizes: Mapping[int, tuple[int, ...]]) -> bool:
    """Returns True if these arguments have `sizes`, which are from `tape.sizes_of`."""
    for place, expected in sizes.items():
        argument = arguments[place]
        if (argument.shape if isinstance(argument, torch.Tensor) else (argument,)) != expected:
            return False
    return True
