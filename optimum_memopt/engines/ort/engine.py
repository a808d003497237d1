"""Trains a model through ONNX Runtime in place: the model keeps its class, modules, parameters and state-dict keys."""

import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from optimum_memopt.engines import in_place
from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.key_value_cache import without_key_value_cache
from optimum_memopt.engines.ort import env_option_checks, support_checks
from optimum_memopt.engines.ort.extensions import BUILD_COMMAND
from optimum_memopt.engines.ort.failures import one_line
from optimum_memopt.engines.ort.insight import applied_counts, parse_insight, to_plans
from optimum_memopt.engines.ort.module_state import Churn, ModuleState, SharedCopy, in_words
from optimum_memopt.engines.ort.module_with_loss import (
    LabelShapes,
    LabelSmoothing,
    put_loss_inside,
    with_label_smoothing,
)
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.engines.ort.post_norm import residual_normalizations
from optimum_memopt.engines.ort.selection import Choice, check_applied, check_supported, choose_config, choose_level
from optimum_memopt.engines.ort.session import POST_BACKWARD, PRE_FORWARD, Hooks, OrtSession
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.logs import get_logger
from optimum_memopt.memory import malloc
from optimum_memopt.plans.table import Plan, PlanTable, canonical_symbols

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["OrtEngine"]

_ROOT_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class OrtEngine(in_place.InPlaceEngine):
    """The `ort` engine.

    Training forwards (training mode, gradients on) go to ONNX Runtime, all others to the model's own forward.

    Raises:
        ConfigError: the selection asks for what ONNX Runtime cannot do (a count other than -1 and 0, offload).
    """

    name = "ort"

    def __init__(
        self, selection: Selection | None = None, options: OrtOptions | None = None, log_level: str = "info"
    ) -> None:
        self._options = options or OrtOptions()
        self._log_level = log_level
        self._smoothing: LabelSmoothing | None = None
        self._exported_attention: str | None = None
        self._churn = Churn()
        self._seen_autocast: Any = False
        self.keeps_checkpointing = self._options.ort_allow_autograd_checkpoint
        super().__init__(selection)

    def apply(self, selection: Selection) -> None:
        """Choose other plans; the next training forward builds a new session with them.

        Raises:
            ConfigError: see the class.
        """
        if selection.config is not None:
            check_supported(selection.config)
        super().apply(selection)

    def check_arguments(self, args: "TrainingArguments") -> None:
        """Refuse Trainer arguments that ONNX Runtime cannot train with.

        Raises:
            MemOptError: half precision on the CPU, activation checkpointing, torch.compile, FSDP, DataParallel.
        """
        support_checks.check_arguments(
            args, self._options.ort_allow_autograd_checkpoint, self._options.ort_zero_stage3
        )
        env_option_checks.check_arguments(self._options, args)

    def _enter(self) -> None:
        self._attention = None
        self._churn = Churn()
        if not self._options.ort_arena:
            malloc.give_back_freed_memory()
        self._attention = support_checks.choose_attention(self._model)
        exported_with, self._exported_attention = self._exported_attention, support_checks.attention(self._model)
        if exported_with != self._exported_attention:
            self._forget()
        for remark in filter(
            None,
            (*support_checks.remarks(self._model), env_option_checks.skip_check_remark(self._options.ort_skip_check)),
        ):
            get_logger().warning(remark)

    def _leave(self) -> None:
        if self._attention is not None:
            self._model.set_attn_implementation(self._attention)
        if not self._options.ort_arena:
            malloc.restore()

    def _continue(self) -> None:
        # A forward whose backward never ran, as of a step that ran out of memory half-way.
        if self._backward_is_due:
            self._forget()

    def smooth_labels(self, smoothing: LabelSmoothing | None) -> bool:
        """Return the smoothed loss from training forwards with labels; needs the loss inside ONNX Runtime."""
        if smoothing != self._smoothing:
            self._smoothing = smoothing
            self._forget()
        return True

    def _check(self, model: torch.nn.Module) -> None:
        support_checks.check(model, self._options.ort_allow_autograd_checkpoint)
        env_option_checks.check_model(self._options, model)

    def plans(self) -> PlanTable | None:
        """The table of the current training graph, None before the first training forward."""
        return self._table

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> None:
        """None: ONNX Runtime allocates as it likes."""

    def insight(self) -> str:
        """ONNX Runtime's own per-node text of the current training graph."""
        return self._insight

    @property
    def graph(self) -> Any:
        """The current training graph (`onnx.GraphProto`), None before the first training forward."""
        return self._session.graph if self._session is not None else None

    def _forget(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None:
            session.close()
        self._session: OrtSession | None = None
        self._table: PlanTable | None = None
        self._insight = ""
        self._choice = Choice()
        self._plans: tuple[Plan, ...] = ()
        self._seen: ModuleState | None = None
        self._backward_is_due = False
        self._was_exported = False
        self._fallback_reason = ""

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._notice_changes()
        if self._fallback_reason:
            return self._run_fallback(*args, **kwargs)
        support_checks.check_autocast(self._model)
        if self._choice.redraws_random_numbers and self._backward_is_due:
            raise MemOptError(
                "a training forward follows one whose backward has not run: ONNX Runtime draws recomputed dropout "
                "masks in the order of the forwards, so this plan needs forward and backward in pairs; run each "
                "backward first, use torch.no_grad() for forwards without one, or leave out the Dropout plans"
            )
        try:
            if self._session is None:
                if reason := support_checks.why_not(self._model):
                    return self._give_back(reason)(*args, **kwargs)
                self._session = self._make_session()
                config = getattr(self._model, "config", None)
                self._label_shapes = LabelShapes(bool(getattr(config, "is_encoder_decoder", False)))
            if self._options.ort_module_with_loss:
                self._label_shapes.check(kwargs)
            outputs = self._session.forward(*args, **without_key_value_cache(self._model, args, kwargs, forced=True))
            self._after_export()
            return outputs
        except MemOptError:
            # Whoever catches it and goes on must not meet a graph without a session.
            self._forget()
            raise
        except torch.OutOfMemoryError:
            # Says nothing about the model; a smaller batch may follow, which must not meet a forward left half-way.
            self._forget()
            raise
        except IndexError:
            # A label or an id of this batch; a session that was built runs the next one.
            self._backward_is_due = False
            if self._session is None or self._session.is_building or self._choice.redraws_random_numbers:
                self._forget()
            raise
        except Exception as error:
            if self._session is not None and not self._session.is_building:
                reason = self._why_not_this_batch(error, args, kwargs)
            else:
                reason = str(error) if isinstance(error, support_checks.Unsuitable) else one_line(error)
            if not reason:
                self._forget()
                raise
            give_back = self._give_back(reason, error)
        except BaseException:
            # Training that goes on after Ctrl-C must not meet a graph without a session, or a forward left half-way.
            self._forget()
            raise
        return give_back(*args, **kwargs)

    def _give_back(self, reason: str, error: Exception | None = None) -> Callable[..., Any]:
        """From now on train with plain PyTorch, if the user wants that."""
        if not self._options.ort_fallback:
            raise UnsupportedModelError(
                f"ONNX Runtime cannot train {type(self._model).__name__}: {reason}",
                "--memory_opt_engine compile trains it under a plan, --ort_fallback with plain PyTorch",
            ) from error
        seen = self._seen
        self._forget()
        self._fallback_reason, self._seen = reason, seen
        line = (
            f"NOT on ONNX Runtime: it cannot train this model ({reason}); no plan is applied, "
            "--memory_opt_engine compile trains it under one"
        )
        get_logger().warning(line)
        self._table = PlanTable(engine=self.name, plans=(), header=(line,))
        return self._run_fallback

    @property
    def _fallback(self) -> Callable[..., Any]:
        return with_label_smoothing(self._training_forward.plain_forward, self._smoothing)

    def _notice_changes(self) -> None:
        """Forget a session whose graph has built in what is no longer so."""
        self._churn.forward()
        autocast = _autocast(self._model)
        changes: dict[str, tuple[str, str]] = {}
        if self._seen is not None:
            if autocast != self._seen_autocast:
                changes["autocast"] = (str(self._seen_autocast), str(autocast))
            if not self._seen.is_current():
                changes |= self._seen.changes()
            if self._fallback_reason and changes.keys() <= self._churn.refused:
                changes = {}
            if changes:
                get_logger().info(f"building a new graph: {in_words(changes)}")
                self._forget()
                self._check(self._model)
        if self._seen is None or not self._seen.is_current():
            self._seen = ModuleState(self._model)
        self._seen_autocast = autocast
        if often := self._churn.seen(changes):
            self._give_back(
                f"{often} changes again and again ({' -> '.join(changes[often])}), and each change takes a new "
                "export; keep it fixed"
            )

    def _after_export(self) -> None:
        """Settle what the model's own code changed when it was traced in this step."""
        if self._was_exported:
            self._was_exported = False
            self._exported.give_back_attributes()
            if self._seen is not None and self._seen.only_noted():
                self._seen = ModuleState(self._model)

    def _run_fallback(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._fallback(*args, **kwargs)
        if self._seen is not None and not self._seen.is_current():
            # What the forward itself changes is no reason to try ONNX Runtime again.
            self._seen = ModuleState(self._model)
        return outputs

    def _why_not_this_batch(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why ONNX Runtime fails on a batch that PyTorch takes; empty when PyTorch does not take it either."""
        try:
            with torch.no_grad():
                self._training_forward.plain_forward(*args, **kwargs)
        except Exception:
            return ""
        return (
            f"a batch after the first ends in an error, as where a graph holds the first one's shapes "
            f"({one_line(error)}); pad all batches to one shape and drop the last"
        )

    def _make_session(self) -> OrtSession:
        return OrtSession(
            self._inner(),
            self._options,
            layerwise=self._selection.level > 0,
            recompute=self._selection.level > 0 or self._selection.config is not None,
            hooks=Hooks(choose=self._choose, report=self._report, phase=self._phase),
            log_level=self._log_level,
        )

    def _inner(self) -> torch.nn.Module:
        """What ORT exports: shares submodules and parameters with the model, but not the hooks, which the model's own
        `__call__` runs already."""
        self._exported = SharedCopy(self._model)
        inner = self._exported.module
        inner.__dict__.pop("forward", None)
        if isinstance(self._training_forward.previous, types.MethodType):
            inner.forward = types.MethodType(self._training_forward.previous.__func__, inner)
        for name in _ROOT_HOOKS:
            inner.__dict__[name] = OrderedDict()
        if self._options.ort_module_with_loss:
            options = self._options
            sparse = options.ort_compute_optimizer and options.ort_label_sparse_optimizer is not False
            put_loss_inside(inner, self._smoothing, sparse)
        return inner

    def _phase(self, phase: int) -> None:
        if phase == PRE_FORWARD:
            self._backward_is_due = True
        elif phase == POST_BACKWARD:
            self._backward_is_due = False

    def _choose(self, text: str, combinations: Mapping[str, int]) -> tuple[str, ...]:
        session = self._session
        if session.inlined_functions:
            switched_off = session.has_extensions
            way_out = "leave out --ort_custom_autograd false" if switched_off else f"build them with: {BUILD_COMMAND}"
            raise UnsupportedModelError(
                f"{type(self._model).__name__} uses torch.autograd.Function ({', '.join(session.inlined_functions)}), "
                "whose backward ONNX Runtime can only run with the torch extensions",
                f"{way_out}, or give --memory_opt_engine compile",
            )
        if session.aten_operators and not session.has_extensions:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} needs torch's own {', '.join(session.aten_operators)}, which ONNX "
                "Runtime can only run with the torch extensions",
                f"build them with: {BUILD_COMMAND}, or give --memory_opt_engine compile",
            )
        dimensions = session.dimensions
        config = getattr(self._model, "config", None)
        names = canonical_symbols(dimensions, bool(getattr(config, "is_encoder_decoder", False)))
        values = {names[name]: value for name, value in dimensions.items() if name in names}
        self._plans = to_plans(parse_insight(text), combinations, names, values)
        self._values = values
        existing = dict.fromkeys(part for plan in self._plans for part in plan.config.split(","))
        selection = self._selection
        if selection.config is not None:
            self._choice = choose_config(selection.config, existing, selection.strict)
        elif selection.level:
            self._choice = choose_level(selection.level, existing, residual_normalizations(session.graph))
        for remark in self._choice.remarks:
            get_logger().warning(remark)
        return self._choice.configs

    def _report(self, text: str) -> None:
        counts = applied_counts(parse_insight(text))
        for remark in check_applied(self._choice, counts, self._selection.strict and not self._selection.level):
            get_logger().warning(remark)
        rebuilt = self._table is not None
        self._was_exported = True
        self._insight = text
        self._table = PlanTable(
            engine=self.name,
            plans=tuple(_with_counts(plan, self._choice, counts) for plan in self._plans),
            symbols=self._values,
            header=self._header(),
        )
        if rebuilt:
            get_logger().info("other inputs than before: ONNX Runtime built a new training graph")

    def _header(self) -> tuple[str, ...]:
        provider = "CUDAExecutionProvider" if self._session.device.type == "cuda" else "CPUExecutionProvider"
        asked = f"config {self._selection.config}" if self._selection.config else f"level {self._selection.level}"
        return (f"{type(self._model).__name__} on {provider}, {asked}",)


def _autocast(model: torch.nn.Module) -> Any:
    """The dtype of autocast where the model lies, False without it."""
    parameter = next(model.parameters(), None)
    device_type = parameter.device.type if parameter is not None else "cpu"
    return torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)


def _with_counts(plan: Plan, choice: Choice, counts: Mapping[str, tuple[int, int]]) -> Plan:
    """The plan with what was asked for and applied; a joint row is on when all of its parts are."""
    parts = plan.config.split(",")
    requested = -1 if all(part in choice.configs for part in parts) else 0
    applied = min(counts.get(part, (0, 0))[1] for part in parts) if requested else 0
    notes = dict.fromkeys(choice.notes[part] for part in parts if part in choice.notes)
    return replace(plan, requested_count=requested, applied_count=min(applied, plan.frequency), note="; ".join(notes))
