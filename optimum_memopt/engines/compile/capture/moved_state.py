"""Finds state that changes between a forward and its backward, which would then recompute from other values.

Of frozen parameters and large buffers no copy is saved (`graph/state_copies.py`): most never change. They are watched
instead.

- In the first backwards of each run of a graph the values are compared with those that the forward has read. Code that
  writes to state mostly does so in each step, also by `.data`, which no version counter shows. State that is read for
  a recompute alone is copied to the host for that, as far as it is not large, so that this backward is right, too; of
  the rest some thousand numbers are compared, and the sum of all.
- From then on version counters are compared when the backward begins, which waits for no device.

What has changed is copied by all forwards to come, whose graphs are traced again for that.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from optimum_memopt.engines.compile.torch_compat import autograd, dynamo
from optimum_memopt.logs import get_logger

# Backwards of a run of a graph in which values are compared.
COMPARED_BACKWARDS = 3

# Numbers of a tensor that are compared one by one where it is not copied.
_SAMPLE = 4096
# Numbers that are added up at once: torch casts integers to int64 before it does (`make_reduction_from_ty` in
# `aten/src/ATen/native/ReduceOpsUtils.h`), which takes four times a weight in half precision.
_SUMMED = 2**18
# State that one forward copies to compare it, bytes.
_MOST_BYTES = 2**24
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class SavedState:
    """State that autograd saves, with the values that the forward has read.

    Attributes:
        former: on the host, what `_compared` had returned.
        opened: called when the backward reads it: whether it has changed, and whether the backward gets what it was.
    """

    tensor: torch.Tensor
    former: tuple[torch.Tensor, ...]
    is_whole: bool
    opened: Callable[[bool, bool], None]

    @classmethod
    def of(cls, tensor: torch.Tensor, is_whole: bool, opened: Callable[[bool, bool], None]) -> "SavedState":
        # A storage that the tensor is given later is none that the forward has read.
        tensor = tensor.detach()
        return cls(tensor, _compared(tensor, is_whole), is_whole, opened)

    def open(self) -> torch.Tensor:
        """The values for the backward."""
        now = _compared(self.tensor, self.is_whole)
        pairs = zip(now, self.former, strict=True)
        has_changed = not all(torch.equal(_bits(one), _bits(other)) for one, other in pairs)
        self.opened(has_changed, self.is_whole)
        return self.former[0].to(self.tensor.device) if has_changed and self.is_whole else self.tensor


def _compared(tensor: torch.Tensor, is_whole: bool) -> tuple[torch.Tensor, ...]:
    """A copy of the tensor, or numbers from all over it and the sum of its bits, on the host."""
    if is_whole:
        return (tensor.to("cpu", copy=True),)
    some = tensor.as_strided((min(tensor.numel(), _SAMPLE),), (max(1, tensor.numel() // _SAMPLE),))
    longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    pieces = tensor.split(max(1, _SUMMED * tensor.shape[longest] // tensor.numel()), longest)
    sums = [_bits(piece).sum(dtype=torch.int64) for piece in pieces]
    return some.to("cpu", copy=True), torch.stack(sums).sum().cpu()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, of which all are equal to themselves."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.dtype.itemsize])


@dataclass(frozen=True)
class StateArgs:
    """The arguments of a run of a graph.

    Attributes:
        saved: what autograd saves in the place of state; None: state itself.
        copied: places of those that change before the backward, and of which the graph reads a copy.
    """

    args: Sequence[Any]
    saved: Callable[[torch.Tensor], SavedState | None] | None = None
    copied: Collection[int] = ()


class StateWatch:
    """Watches the state of one model.

    Args:
        name_of: the name of a tensor in log lines, empty where it has none.

    Attributes:
        moved: the sources of state that had changed when the forward began.
    """

    def __init__(self, name_of: Callable[[torch.Tensor], str]) -> None:
        self._name_of = name_of
        self.moved: frozenset[str] = frozenset()
        self._compared: Counter[Hashable] = Counter()
        # By this forward.
        self._bytes_copied = 0
        # Changed since, and whether a backward has read the new values.
        self._new: dict[str, torch.Tensor] = {}
        self._was_read = False
        # Of the forward that runs: state, its version and its source; and autograd's node of the last graph.
        self._versions: list[tuple[torch.Tensor, int, str]] = []
        self._node: Any = None

    def begin(self) -> bool:
        """A forward begins: true where its graphs have to be traced again, since more state has moved."""
        # A forward that has failed leaves its own.
        self._versions, self._node, self._bytes_copied = [], None, 0
        new = {source: tensor for source, tensor in self._new.items() if source not in self.moved}
        if not new:
            return False
        names = [self._name_of(tensor) or source for source, tensor in new.items()]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        read = "; gradients of that step were computed from the new values" if self._was_read else ""
        get_logger().warning(
            f"{names[0]}{more} changed between a forward and its backward{read}: compiling the forward again, which "
            "saves a copy from now on"
        )
        self.moved = self.moved.union(new)
        self._new, self._was_read = {}, False
        return True

    def before(
        self,
        args: Sequence[Any],
        sources: Mapping[int, str],
        is_only_recomputed: Mapping[int, bool],
        copied: Collection[int],
        run: Hashable,
    ) -> StateArgs:
        """The arguments for a run of a graph.

        Args:
            sources: of the state among the arguments that the backward recomputes from, by places.
            is_only_recomputed: whether it reads that for nothing else, by places.
            copied: see `StateArgs`.
            run: the same for the same run of each forward.
        """
        if not sources:
            return StateArgs(args, copied=copied)
        watched = {at: source for at, source in sources.items() if not is_traceable_wrapper_subclass(args[at])}
        if self._compared[run] >= COMPARED_BACKWARDS:
            given = list(args)
            for at, source in watched.items():
                self._versions.append((args[at], autograd.version_of(args[at]), source))
                # Without a version for autograd, which would end the run where the state has changed.
                given[at] = args[at].data
            return StateArgs(given, copied=copied)
        places = {dynamo.storage_id(args[at]): at for at in watched}
        # What autograd saves must hold no other arguments.
        tensors = {at: args[at] for at in watched}
        is_opened = False

        def saved_state(saved: torch.Tensor) -> SavedState | None:
            if (at := places.get(dynamo.storage_id(saved))) is None:
                return None
            is_whole = saved.numel() <= _SAMPLE
            if is_only_recomputed[at] and self._bytes_copied + saved.nbytes <= _MOST_BYTES:
                self._bytes_copied += saved.nbytes
                is_whole = True

            def opened(has_changed: bool, is_right: bool) -> None:
                nonlocal is_opened
                # Once a run: all of its state is opened by one backward.
                self._compared[run] += not is_opened
                is_opened = True
                if has_changed:
                    self._new[watched[at]] = tensors[at]
                    self._was_read |= not is_right

            return SavedState.of(saved, is_whole, opened)

        return StateArgs(args, saved_state, copied)

    def after(self, results: Sequence[Any]) -> None:
        """Note the results of a run; within the forward."""
        if self._versions:
            self._node = autograd.compiled_node(results) or self._node

    def end(self) -> None:
        """The forward has run: compare versions when its backward begins."""
        versions, node = self._versions, self._node
        self._versions, self._node = [], None
        if node is None or not versions:
            return

        def compare(_: Any) -> None:
            moved = {source: tensor for tensor, version, source in versions if autograd.version_of(tensor) != version}
            self._new.update(moved)
            self._was_read |= bool(moved)

        node.register_prehook(compare)
