"""The life cycle of an engine on a model, and the registry of attached engines."""

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from optimum_memopt.compat.torch import is_in_function_transform
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.shared.forward_patch import (
    Checkpointing,
    ModuleCompilation,
    TrainingForward,
    training_forward,
)
from optimum_memopt.errors import MemOptError, UnsupportedModelError, abbreviate
from optimum_memopt.logs import get_logger

# Weak keys and values, since an engine refers to its model: this dict keeps neither alive. The engine's patches on the
# model keep the engine alive.
_engines: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Engine]]" = weakref.WeakKeyDictionary()


def engine_of(model: torch.nn.Module) -> Engine | None:
    """Returns the engine that is attached to this model, if any."""
    held = _engines.get(model)
    return held() if held is not None else None


def note_engine(model: torch.nn.Module, engine: Engine, instead_of: Engine | None = None) -> None:
    """Record that `engine` is attached to `model`. Raises MemOptError if an engine other than `instead_of` is."""
    holder = engine_of(model)
    if holder is not None and holder not in (engine, instead_of):
        raise MemOptError(
            f"{type(model).__name__} already has the {holder.name} engine attached; detach it first, with detach() of "
            "the engine that optimize() returned, or with trainer.memopt.detach()"
        )
    _engines[model] = weakref.ref(engine)


def check_parameters(model: torch.nn.Module) -> None:
    """Refuse a model without parameters, or with parameters that have no shape yet. Raises UnsupportedModelError."""
    if next(model.parameters(), None) is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no parameters, so there is nothing to train")
    if lazy := next((name for name, each in model.named_parameters() if is_lazy(each)), ""):
        raise UnsupportedModelError(f"{lazy} has no shape before the first forward", "run a batch through the model")


@dataclass(frozen=True)
class Attached:
    """A model and the patches that an engine applies to it; kept while the engine is suspended."""

    model: torch.nn.Module
    training_forward: TrainingForward
    checkpointing: Checkpointing
    compilation: ModuleCompilation


class InPlaceEngine(Engine):
    """The life cycle of an engine: `attach`, `suspend`, `detach`.

    Compiled code is kept while the engine is suspended, and reused when the engine is attached to the same model
    again. While the engine is attached, the model's own activation checkpointing is off, replaced by level 1 if no
    plan was requested, and so is `Module.compile` on its modules.
    """

    keeps_checkpointing = False

    def __init__(self, selection: Selection | None = None) -> None:
        self._last_attached: Attached | None = None
        self._is_attached = False
        self._was_called = self._was_plain = False
        self.apply(selection or Selection())

    @property
    def _attached(self) -> Attached:
        if self._last_attached is None:
            raise RuntimeError(f"the {self.name} engine has no model; call attach() first")
        return self._last_attached

    @property
    def _model(self) -> torch.nn.Module:
        return self._attached.model

    @property
    def selection(self) -> Selection:
        return self._asked

    def apply(self, selection: Selection) -> None:
        self._asked = selection
        self._selection = selection
        self._forget()

    def attach(self, model: torch.nn.Module) -> None:
        if self._is_attached:
            if self._model is not model:
                raise MemOptError("this engine is attached to another model; detach() it first")
            self._continue()
            return
        self._check(model)
        note_engine(model, self)
        place = training_forward(model)
        if self._last_attached is None or self._last_attached.training_forward is not place:
            self._forget()
        self._was_called = False
        attached = Attached(model, place, Checkpointing(model), ModuleCompilation(model))
        self._last_attached, self._is_attached = attached, True
        place.start(self._forward)
        try:
            self._enter()
            self._replace_compilation()
            if self._attached.checkpointing.is_on and not self.keeps_checkpointing:
                self._replace_checkpointing()
            elif self._selection != self._asked:
                self.apply(self._asked)
        except BaseException:
            self.suspend()
            raise
        self._continue()

    def suspend(self) -> None:
        if not self._is_attached:
            return
        self._is_attached = False
        _engines.pop(self._model, None)
        self._attached.training_forward.stop()
        self._attached.checkpointing.restore()
        self._attached.compilation.restore()
        self._leave()

    def detach(self) -> None:
        self.suspend()
        self._forget()
        self._last_attached = None

    def check_used(self) -> None:
        # TRL's trainers with a fused head and loss (`DistillationTrainer`, `GRPOTrainer` with Liger Kernel) call the
        # model below the head (TRL 1.16, `_ForwardRedirection`).
        if self._was_called or self._was_plain or not self._is_attached:
            return
        name, asked = type(self._model).__name__, self._selection.name
        missing = f"{asked} cannot apply" if asked else "there is no plan table"
        if self._attached.training_forward.is_replaced:
            unused = f"the forward of {name} was replaced after the {self.name} engine, which does not run: {missing}"
            instead = "replace it before calling optimize or attach"
        else:
            unused = (
                f"training calls submodules of {name} instead of its forward, so the {self.name} engine does not run: "
                f"{missing}"
            )
            instead = "attach an engine to the submodule, as in optimize(model.base_model, memory_opt_level=1)"
        if asked:
            raise UnsupportedModelError(unused, instead)
        get_logger().warning(f"{unused}; {instead}")

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if around := "torch.func (grad, vmap, jvp)" if is_in_function_transform() else self._mode_around():
            self._say_plain(around)
            return self._attached.training_forward.plain_forward(*args, **kwargs)
        if not self._was_called:
            self._was_called = True
            # Modules may have been compiled since `attach`, for example by a training loop.
            self._replace_compilation()
        if self._attached.checkpointing.is_on and not self.keeps_checkpointing:
            # Checkpointing was switched on after `attach`, for example by the user's training loop with
            # activation_checkpointing_enable().
            self._replace_checkpointing()
        return self._train_forward(*args, **kwargs)

    def _mode_around(self) -> str:
        """Returns what is active around a forward and keeps the engine from running it; empty if nothing does."""
        return ""

    def _say_plain(self, around: str) -> None:
        if not self._was_plain:
            self._was_plain = True
            get_logger().warning(
                f"forwards of {type(self._model).__name__} under {around} run in plain PyTorch, outside the plan and "
                "the prediction"
            )

    def _replace_checkpointing(self) -> None:
        offloads = self._attached.checkpointing.offloads
        self._attached.checkpointing.switch_off()
        chosen = self._selection
        if chosen == replace(Selection(), strict=chosen.strict, compress=chosen.compress):
            self._selection = replace(chosen, level=1)
            self._forget()
        get_logger().info(
            f"activation checkpointing of {type(self._model).__name__} is off while the {self.name} engine trains it; "
            f"{self._selection.name} recomputes instead"
        )
        if offloads and self._selection.budget is None:
            get_logger().warning(
                "its offload is off too, so layer inputs stay on the device; --memory_opt_budget offloads those that "
                "do not fit"
            )

    def _replace_compilation(self) -> None:
        if names := self._attached.compilation.switch_off():
            get_logger().info(
                f"Module.compile of {abbreviate(names, most=1)} is off while the {self.name} engine trains "
                f"{type(self._model).__name__}, since the engine must see its operators"
            )

    def _check(self, model: torch.nn.Module) -> None:
        """Refuse a model that the engine cannot train. Raises MemOptError."""

    def _enter(self) -> None:
        """Apply the engine's own changes that last while the model is attached."""

    def _leave(self) -> None:
        """Undo `_enter`."""

    def _continue(self) -> None:
        """Begin training, or resume it in the middle of a step."""

    def _forget(self) -> None:
        """Drop all compiled code."""

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
