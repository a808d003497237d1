"""Finds out how long a training loop holds the outputs of its forwards.

`out = model(**batch)` keeps the logits until the variable is assigned again: through the backward, the step of the
optimizer and the next forward. `loss = model(**batch).loss` drops them at once. Nothing tells which before the first
step has run, so that a loop that gets logits is taken to hold them; a Trainer is not. Each step is watched: what one
has shown counts from then on. Where something has wrapped the forward, as accelerate does for autocast, the loop may
hold copies of what it has returned.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from optimum_memopt.compat.torch import tensors_in
from optimum_memopt.copies import add_hook
from optimum_memopt.engines.api.run import HeldOutputs, HeldUntil


class OutputsWatch:
    """How long the outputs of one model's forwards are held.

    Args:
        assumed: until a step has shown it.
    """

    def __init__(self, model: torch.nn.Module, assumed: HeldUntil) -> None:
        self._model, self._assumed = weakref.ref(model), assumed
        self._remove_hook: Callable[[], None] | None = None
        self._seen: HeldUntil | None = None
        self._copies = 0.0
        # Of the last forward: its tensors, and what nothing else than the loop holds when the backward begins.
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._returned: list[weakref.ref[Any]] = []
        # Bytes of what it has returned, by address.
        self._sizes: dict[int, int] = {}
        self._is_over = self._was_held = False
        self._is_told = True

    @property
    def held(self) -> HeldOutputs:
        """What is held the longest that was seen; what is assumed where nothing was."""
        return HeldOutputs(self._assumed if self._seen is None else self._seen, self._copies)

    @property
    def is_assumed(self) -> bool:
        """True where no step has shown it yet."""
        return self._seen is None

    @property
    def bytes(self) -> int:
        """Bytes of the last forward's outputs that are still held."""
        return sum(_sizes(tensor for ref in self._tensors if (tensor := ref()) is not None).values())

    def begin(self, is_wrapped: bool = False) -> None:
        """A forward is about to run, which something has wrapped that may return other outputs."""
        if self._is_over:
            until = HeldUntil.END_OF_STEP if self._was_held else HeldUntil.BACKWARD
            self._note(HeldUntil.NEXT_FORWARD if any(_alive(self._tensors)) else until)
        self._tensors, self._returned, self._sizes, self._is_over = [], [], {}, False
        self._is_told = not is_wrapped or self._remove_hook is not None
        model = self._model()
        if not self._is_told and model is not None:
            # It is called from the model's next call on.
            self._remove_hook = add_hook(model, "forward", _hook(weakref.WeakMethod(self._watch_returned)))

    def stop(self) -> None:
        """Leave the model as it was."""
        if self._remove_hook is not None:
            self._remove_hook()
            self._remove_hook = None

    def watch(self, outputs: Any) -> None:
        """Watch the outputs of the forward that has run."""
        tensors = list(tensors_in(outputs))
        node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
        if not self._is_told or node is None or not any(tensor.dim() for tensor in tensors):
            return
        # Hidden states are saved for backwards to come; a graph saves its own results as other tensors.
        self._hold([tensor for tensor in tensors if tensor.dim()], outputs, node)
        self._sizes = _sizes(ref() for ref in self._tensors)
        held = weakref.WeakMethod(self._note_backward)

        def note_backward(*_: Any) -> None:
            # The engine may have been detached since.
            if (note := held()) is not None:
                note()

        node.register_hook(note_backward)

    def _watch_returned(self, outputs: Any) -> None:
        """Watch what the loop gets in the place of the outputs of the last forward."""
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.dim()]
        sizes = _sizes(tensors)
        if self._sizes and not sizes.keys() <= self._sizes.keys():
            self._copies = max(self._copies, sum(sizes.values()) / max(1, sum(self._sizes.values())))
            self._hold(tensors, outputs)

    def _hold(self, tensors: Iterable[torch.Tensor], outputs: Any, node: Any = None) -> None:
        self._tensors = list(map(weakref.ref, tensors))
        self._returned = [weakref.ref(each) for each in tensors if node is None or each.grad_fn is node]
        # A tuple has no weak references.
        with contextlib.suppress(TypeError):
            self._returned.append(weakref.ref(outputs))

    def _note_backward(self) -> None:
        """Note what is held when the backward has run its first graph."""
        self._is_over, self._was_held = True, any(_alive(self._returned))
        if not self._was_held:
            self._note(HeldUntil.BACKWARD)

    def _note(self, until: HeldUntil) -> None:
        self._seen = until if self._seen is None else max(self._seen, until)


def _hook(watch: Callable[[], Callable[[Any], None] | None]) -> Callable[..., None]:
    """A hook of a module's forward that passes on its outputs."""

    def hook(module: torch.nn.Module, args: Any, outputs: Any) -> None:
        if torch.is_grad_enabled() and (method := watch()) is not None:
            method(outputs)

    return hook


def _alive(held: "Iterable[weakref.ref[Any]]") -> Iterator[bool]:
    return (ref() is not None for ref in held)


def _sizes(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of storages, by address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
