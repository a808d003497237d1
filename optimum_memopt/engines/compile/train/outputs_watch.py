"""Finds out how long a training loop holds the outputs of its forwards.

`out = model(**batch)` keeps the logits until the variable is assigned again: through the backward, the optimizer step
and the next forward. `loss = model(**batch).loss` drops them at once. Before the first step, a loop that gets logits
is assumed to hold them; a Trainer is not. Each step is watched, and its result counts from then on. If the forward is
wrapped, as by accelerate for autocast, the loop may hold copies of the outputs.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from optimum_memopt.compat.torch import current_autocast, tensors_in
from optimum_memopt.copies import add_hook
from optimum_memopt.engines.api.run import IN_FLOAT32, HeldOutputs, HeldUntil
from optimum_memopt.engines.compile.train.loss_watch import LossWatch, WatchedStorage, bytes_of, storages_of
from optimum_memopt.engines.shared.forward_patch import weak_reference


class OutputsWatch:
    """Watches how long the outputs of one model's forwards are held.

    Args:
        assumed: the assumption until a step has been watched.
        loss: watch of the loop's memory for its loss; None: it is not watched.
    """

    def __init__(self, model: torch.nn.Module, assumed: HeldUntil, loss: LossWatch | None = None) -> None:
        self._model, self._assumed, self._loss = weakref.ref(model), assumed, loss
        self._remove_hook: Callable[[], None] | None = None
        self._seen: HeldUntil | None = None
        self._copies, self._more = 0.0, 0
        # For the last forward: the outputs that the loop gets, those that the forward itself returned, and references
        # to objects that only the loop still holds when the backward begins. For earlier forwards: live outputs.
        self._outputs: list[WatchedStorage] = []
        self._results: list[WatchedStorage] = []
        self._returned: list[weakref.ref[Any]] = []
        self._earlier: list[WatchedStorage] = []
        # Bytes of the last forward's outputs.
        self._last = 0
        self._is_over = self._was_held = False
        self._is_told = True

    @property
    def held(self) -> HeldOutputs:
        """Returns the held outputs, by the step that held them longest; before the first step, as assumed."""
        until = self._assumed if self._seen is None else self._seen
        if (loss := self._loss) is None:
            return HeldOutputs(until, self._copies, self._more)
        # The assumption is a multiple of the forward's own outputs, but the loop may get larger copies of them.
        most = loss.most / self._copies if loss.is_assumed and self._copies else loss.most
        return HeldOutputs(until, self._copies, self._more + loss.earlier, most, loss.left)

    @property
    def is_assumed(self) -> bool:
        """True if no step has been watched yet."""
        return self._seen is None

    @property
    def bytes(self) -> int:
        """Returns the bytes of outputs that are still held, and of the loop's own memory that it holds with the last
        ones."""
        alive = _alive_bytes([*self._earlier, *self._outputs])
        return alive + round(self.held.left * min(alive, self._last))

    def begin(self, is_wrapped: bool = False) -> None:
        """Note that a forward is about to run.

        Args:
            is_wrapped: the forward is wrapped, so that the loop may get other outputs.
        """
        if self._loss is not None:
            self._loss.pass_on()
        if self._is_over:
            until = HeldUntil.END_OF_STEP if self._was_held else HeldUntil.BACKWARD
            self._note(HeldUntil.NEXT_FORWARD if _alive_bytes(self._outputs) else until)
        self._earlier = [each for each in (*self._earlier, *self._outputs) if each.is_alive]
        self._outputs, self._results, self._returned, self._is_over = [], [], [], False
        self._is_told = not is_wrapped or self._remove_hook is not None
        model = self._model()
        if not self._is_told and model is not None:
            # The hook runs from the model's next call on. Until then, assume copies under autocast.
            self._remove_hook = add_hook(model, "forward", _hook(weak_reference(self._watch_returned)))
            autocast = current_autocast(next(model.parameters()).device.type)
            self._copies = IN_FLOAT32 if autocast is not None else 0.0

    def stop(self) -> None:
        """Stop watching, and remove the hook from the model."""
        if self._loss is not None:
            self._loss.stop()
        if self._remove_hook is not None:
            self._remove_hook()
            self._remove_hook = None

    def watch(self, outputs: Any) -> None:
        """Watch the outputs of the forward that has run."""
        tensors = list(tensors_in(outputs))
        node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
        if node is not None and not any(tensor.dim() for tensor in tensors):
            # The loss is the only output.
            self._note(HeldUntil.BACKWARD)
            return
        if not self._is_told or node is None:
            return
        # Only outputs of this graph show what the loop holds: hidden states of other graphs are saved for their
        # backwards, but a graph saves its own results as other tensors.
        self._hold([tensor for tensor in tensors if tensor.dim()], outputs, node)
        self._results = self._outputs
        held = weak_reference(self._note_backward)

        def note_backward(*_: Any) -> None:
            # The engine may have been detached by now.
            if (note := held()) is not None:
                note()

        # A pre-hook: for a hook after the backward, autograd would hold its input gradients until it is done.
        node.register_prehook(note_backward)
        if (loss := self._loss) is not None and not loss.is_read:
            nodes = {each.grad_fn for each in tensors if each.grad_fn is not None}
            for each in nodes:
                each.register_prehook(lambda gradients: loss.end([one for one in gradients if one is not None]))

    def _watch_returned(self, outputs: Any) -> None:
        """Watch the outputs that the loop gets, if they are not those of the last forward."""
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.dim()]
        known = {each.number for each in self._results}
        if not known:
            return
        copies = 0.0
        if any(each.number not in known for each in storages_of(tensors)):
            self._hold(tensors, outputs)
            copies = bytes_of(self._outputs) / max(1, bytes_of(self._results))
        self._copies = copies

    def _hold(self, tensors: Sequence[torch.Tensor], outputs: Any, node: Any = None) -> None:
        self._outputs = storages_of(tensors)
        self._last = bytes_of(self._outputs)
        self._returned = [weakref.ref(each) for each in tensors if node is None or each.grad_fn is node]
        # A tuple has no weak references.
        with contextlib.suppress(TypeError):
            self._returned.append(weakref.ref(outputs))
        if self._loss is not None:
            self._loss.begin(tensors)

    def _note_backward(self) -> None:
        """Note which outputs are held when the backward of the first graph begins."""
        self._is_over, self._was_held = True, any(ref() is not None for ref in self._returned)
        self._more = max(self._more, _alive_bytes(self._earlier))
        if not self._was_held:
            self._note(HeldUntil.BACKWARD)

    def _note(self, until: HeldUntil) -> None:
        self._seen = until if self._seen is None else max(self._seen, until)


def _hook(watch: Callable[[], Callable[[Any], None] | None]) -> Callable[..., None]:
    """Returns a forward hook that passes the outputs of a module to the watch."""

    def hook(module: torch.nn.Module, args: Any, outputs: Any) -> None:
        if torch.is_grad_enabled() and (method := watch()) is not None:
            method(outputs)

    return hook


def _alive_bytes(storages: Iterable[WatchedStorage]) -> int:
    return bytes_of(each for each in storages if each.is_alive)
