"""Every patch applied to a Trainer, in order, with undo. Copies of the Trainer have none of them.

A method is replaced once, by a function that calls the wrappers of `Patch` in their order around the original method.
If other code has wrapped that function meanwhile, `close` leaves it in place as a plain pass-through. Patches of a run
(`HookingCallback`) are undone when `train()` ends, even by an error; patches of `attach` stay on the Trainer for its
next `train()`, unless `attach` itself fails.
"""

import copy
import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from typing import Any

from transformers import Trainer, TrainerCallback

from optimum_memopt import copies
from optimum_memopt.compat.transformers import GRADIENT_NORM, TRAIN_SAMPLER
from optimum_memopt.logs import get_logger

# Takes the method to wrap, returns the wrapped method.
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Patch(Enum):
    """The method that a wrapper patches, and its reason; for each method from the innermost to the outermost."""

    NOTED_LOSS = ("compute_loss", "its memory outside of the model's forward is predicted from its own inputs")
    SMOOTHED_LOSS = "compute_loss", "the engine smooths labels where it computes the loss"
    AGREED_FAILURE = "compute_loss", "a forward that runs out of memory on one rank ends on all ranks, which rerun it"
    FAILED_TOGETHER = "compute_loss", "a failed first forward stops all ranks before they wait for gradients"
    FALLBACK = "training_step", "a first step whose backward cannot run continues without a plan"
    GUARDED_STEP = "training_step", "a step that runs out of memory is explained or rerun"
    COUNTED_TOKENS = "training_step", "padding is counted before label smoothing removes the labels"
    GUARDED_OPTIMIZER = "step", "an optimizer's step that runs out of memory is explained"
    RELEASED_NORM = GRADIENT_NORM, "the logged norm includes gradients released in the backward"
    ATTACHED_ENGINE = "create_optimizer", "the model is loaded, and neither DDP, DeepSpeed nor autocast wraps it yet"
    GROUPED_ROWS = TRAIN_SAMPLER, "all ranks get rows of similar length"
    CHOSEN_MICRO_BATCH = "train", "micro-batch and accumulation are chosen before a run and restored after it"
    REMOVED_HOOKS = "train", "a Trainer has no event after an error in which callbacks could remove their hooks"
    DRY_RUN = "train", "nothing is trained; the phases of the run are shown"
    RELEASED_MODEL = "train", "the model is restored, and the page of the run is written"

    @property
    def method(self) -> str:
        return self.value[0]


_ORDER = list(Patch)


class _Method:
    """A method of a Trainer or its optimizer, with wrappers around it."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self.name = owner, name
        self.inner = self._call = getattr(owner, name)
        self.before = vars(owner).get(name)
        self._wrappers: list[tuple[Patch, Wrap]] = []

        @functools.wraps(self.inner)
        def function(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        self.function: Callable[..., Any] = function
        copies.mark(self)
        copies.leave_out_of_copies(owner, _without_engine)
        setattr(owner, name, function)

    @classmethod
    def of(cls, owner: Any, name: str) -> "_Method":
        """Returns the `_Method` in place; a new one if there is none, or if other code has wrapped it since."""
        known = copies.patched_of(vars(owner).get(name))
        return known if isinstance(known, cls) else cls(owner, name)

    def add(self, patch: Patch, wrap: Wrap) -> Callable[[], None]:
        wrapper = (patch, wrap)
        self._wrappers.append(wrapper)
        self._wrappers.sort(key=lambda each: _ORDER.index(each[0]))
        self._compose()
        return lambda: self._remove(wrapper)

    def _remove(self, wrapper: tuple[Patch, Wrap]) -> None:
        self._wrappers.remove(wrapper)
        self._compose()
        if self._wrappers or vars(self._owner).get(self.name) is not self.function:
            return
        if self.before is None:
            delattr(self._owner, self.name)
        else:
            setattr(self._owner, self.name, self.before)

    def _compose(self) -> None:
        self._call = self.inner
        for _, wrap in self._wrappers:
            self._call = wrap(self._call)


# The Trainer attribute that holds the `Attachment`.
ATTACHMENT = "memopt"
# Callbacks that this package added, without those that the user gave to the Trainer.
_callbacks_put_on: "weakref.WeakSet[TrainerCallback]" = weakref.WeakSet()


def innermost(owner: Any, name: str) -> Callable[..., Any]:
    """Returns a method of a Trainer or its optimizer without this package's wrappers."""
    method = getattr(owner, name)
    known = copies.patched_of(method)
    return known.inner if isinstance(known, _Method) else method


# The name of the loss that a Trainer's label smoother computes.
SMOOTHER = "the Trainer's label smoother"


def loss_name(trainer: Any) -> str:
    """Returns the name of the function that computes a Trainer's loss; empty if the model's forward does."""
    if getattr(innermost(trainer, "compute_loss"), "__func__", None) is not Trainer.compute_loss:
        return f"{type(trainer).__name__}.compute_loss"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    return SMOOTHER if trainer.label_smoother is not None else ""


class TrainerPatches(ExitStack):
    """Wrappers and callbacks that are installed together; `close` removes them in reverse order."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has no patches.
        return TrainerPatches, ()

    def put_attachment(self, trainer: Trainer, attachment: Any) -> None:
        setattr(trainer, ATTACHMENT, attachment)
        self.callback(delattr, trainer, ATTACHMENT)

    def put(self, owner: Any, patch: Patch, wrap: Wrap) -> None:
        """Wrap a method of a Trainer or its optimizer, at the wrapper's place in the order of `Patch`."""
        self.callback(_Method.of(owner, patch.method).add(patch, wrap))

    def add_callback(self, trainer: Trainer, callback: TrainerCallback) -> None:
        if callback not in trainer.callback_handler.callbacks:
            trainer.add_callback(callback)
            self.callback(trainer.remove_callback, callback)
            _callbacks_put_on.add(callback)


def _without_engine(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a Trainer's attributes without the engine and its callbacks; an optimizer has neither."""
    if ATTACHMENT not in state:
        return state
    get_logger().info(
        "a copy of a Trainer trains in plain PyTorch, without a memory plan; optimum_memopt.attach(copy) gives it one"
    )
    handler = copy.copy(state["callback_handler"])
    # By identity, since a user's callbacks may have no hash.
    put_on = {id(callback) for callback in _callbacks_put_on}
    handler.callbacks = [callback for callback in handler.callbacks if id(callback) not in put_on]
    return {name: value for name, value in state.items() if name != ATTACHMENT} | {"callback_handler": handler}
