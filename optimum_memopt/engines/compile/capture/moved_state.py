"""Finds state that changes between a forward and its backward, which would then recompute from other values.

Frozen parameters and large buffers are saved without a copy (`graph/state_copies.py`), since most never change. They
are watched instead.

- In the first backwards of each graph run, the values are compared with those that the forward has read. Code that
  writes to state mostly does so in each step, also by `.data`, which no version counter shows. State that is only read
  to recompute is copied to the host for that, unless it is large, so that this backward is also right. Of other state,
  some thousand numbers and the sum of all numbers are compared.
- From then on, version counters are compared when the backward begins, which does not wait for the device.

State that has changed is copied by all later forwards, whose graphs are retraced for that.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from optimum_memopt.compat.torch import without_repeats, writes_to
from optimum_memopt.engines.torch_compat import autograd, dynamo
from optimum_memopt.logs import get_logger

# Backwards of each graph run in which values are compared.
COMPARED_BACKWARDS = 3

# Numbers that are compared one by one if a tensor is not copied.
_SAMPLE = 4096
# Numbers that are added up at once: torch casts integers to int64 first (`make_reduction_from_ty` in
# `aten/src/ATen/native/ReduceOpsUtils.h`), which takes four times the memory of a weight in half precision.
_SUMMED = 2**18
# Bytes of state that one forward copies for the comparison.
_MOST_BYTES = 2**24
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class SavedState:
    """State that autograd saves, with the values that the forward has read.

    Attributes:
        former: the values that the forward has read, as `_compared` returns them, on the host.
        is_whole: `former` is a copy of the whole tensor.
        opened: called when the backward reads the state, with two flags: the state has changed; its former values are
            known.
    """

    tensor: torch.Tensor
    former: tuple[torch.Tensor, ...]
    is_whole: bool
    opened: Callable[[bool, bool], None]

    @classmethod
    def of(cls, tensor: torch.Tensor, is_whole: bool, opened: Callable[[bool, bool], None]) -> "SavedState":
        # Detached: the forward has not read a storage that is assigned to the tensor later.
        tensor = tensor.detach()
        return cls(tensor, _compared(tensor, is_whole), is_whole, opened)

    def open(self) -> torch.Tensor:
        """Returns the values for the backward, the former ones if they are known."""
        now = _compared(self.tensor, self.is_whole)
        pairs = zip(now, self.former, strict=True)
        has_changed = not all(torch.equal(_bits(one), _bits(other)) for one, other in pairs)
        self.opened(has_changed, self.is_whole)
        return self.former[0].to(self.tensor.device) if has_changed and self.is_whole else self.tensor


def _compared(tensor: torch.Tensor, is_whole: bool) -> tuple[torch.Tensor, ...]:
    """Returns a copy of the tensor, or a sample of its numbers and the sum of all bits as integers, on the host."""
    if is_whole:
        return (tensor.to("cpu", copy=True),)
    tensor = without_repeats(tensor)
    every = max(1, tensor.numel() // _SAMPLE)
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    # The entries of a view with gaps are copied, so that none between them is compared.
    some = tensor.as_strided((min(tensor.numel(), _SAMPLE),), (every,)) if is_dense else tensor.flatten()[::every]
    longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    pieces = tensor.split(max(1, _SUMMED * tensor.shape[longest] // tensor.numel()), longest)
    sums = [_bits(piece).sum(dtype=torch.int64) for piece in pieces]
    return some.to("cpu", copy=True), torch.stack(sums).sum().cpu()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits as integers, so that NaN equals itself."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.dtype.itemsize])


@dataclass(frozen=True)
class StateArgs:
    """The arguments of a graph run.

    Attributes:
        saved: returns what autograd saves in place of a tensor of state, None for other tensors; None: nothing is
            replaced.
        copied: positions of arguments that change before the backward and are copied by the graph.
    """

    args: Sequence[Any]
    saved: Callable[[torch.Tensor], SavedState | None] | None = None
    copied: Collection[int] = ()


class StateWatch:
    """Watches the state of one model.

    Args:
        name_of: returns the name of a tensor for log lines, empty if it has none.

    Attributes:
        moved: the sources of state that is known to change, as of the beginning of the forward.
    """

    def __init__(self, name_of: Callable[[torch.Tensor], str]) -> None:
        self._name_of = name_of
        self.moved: frozenset[str] = frozenset()
        self._compared: Counter[Hashable] = Counter()
        # Bytes that the current forward has copied.
        self._bytes_copied = 0
        # State found changed since the forward began, and whether a backward has read the new values.
        self._new: dict[str, torch.Tensor] = {}
        self._was_read = False
        # State of the current graph run, with its version and source.
        self._versions: list[tuple[torch.Tensor, int, str]] = []

    def begin(self) -> bool:
        """Begin a forward. Returns True if its graphs must be retraced, since more state has changed."""
        self._bytes_copied = 0
        new = {source: tensor for source, tensor in self._new.items() if source not in self.moved}
        if not new:
            return False
        names = [self._name_of(tensor) or source for source, tensor in new.items()]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        read = "; gradients of that step were computed from the new values" if self._was_read else ""
        get_logger().warning(
            f"{names[0]}{more} changed between a forward and its backward{read}: recompiling the forward, to save "
            "a copy from now on"
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
        """Returns the arguments for a graph run.

        Args:
            sources: sources of the arguments that are state and that the backward recomputes from, by position.
            is_only_recomputed: by position, whether the backward reads the argument for nothing else.
            copied: see `StateArgs`.
            run: key of the graph run, the same in each forward.
        """
        # A failed run leaves its own behind.
        self._versions = []
        if not sources:
            return StateArgs(args, copied=copied)
        watched = {at: source for at, source in sources.items() if not is_traceable_wrapper_subclass(args[at])}
        if self._compared[run] >= COMPARED_BACKWARDS:
            given = list(args)
            for at, source in watched.items():
                self._versions.append((args[at], writes_to(args[at]), source))
                # `.data` hides the version from autograd, which would raise an error for changed state.
                given[at] = args[at].data
            return StateArgs(given, copied=copied)
        places = {dynamo.storage_id(args[at]): at for at in watched}
        # The function that autograd keeps must not hold other arguments.
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
                # Count once per run: one backward opens all of its state.
                self._compared[run] += not is_opened
                is_opened = True
                if has_changed:
                    self._new[watched[at]] = tensors[at]
                    self._was_read |= not is_right

            return SavedState.of(saved, is_whole, opened)

        return StateArgs(args, saved_state, copied)

    def after(self, results: Sequence[Any]) -> None:
        """Have the versions of a graph run's state compared when its backward begins; the backwards of other runs of
        the forward may come earlier, later or never."""
        versions, self._versions = self._versions, []
        if not versions or (node := autograd.compiled_node(results)) is None:
            return

        def compare(_: Any) -> None:
            moved = {source: tensor for tensor, version, source in versions if writes_to(tensor) != version}
            self._new.update(moved)
            self._was_read |= bool(moved)

        node.register_prehook(compare)
