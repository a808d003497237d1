"""Trains a model in ONNX Runtime, in place: its class, modules, parameters and state-dict keys stay the same."""

import types
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from optimum_memopt.compat.transformers import is_encoder_decoder
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort import checks
from optimum_memopt.engines.ort import options as ort_options
from optimum_memopt.engines.ort.compat import internals
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.engines.ort.session.graph_plans import check_supported
from optimum_memopt.engines.ort.session.module_state import ModuleState, ReexportLimit, SharedCopy, describe_changes
from optimum_memopt.engines.ort.session.module_with_loss import LabelShapes, return_loss_only, with_label_smoothing
from optimum_memopt.engines.ort.session.session import OrtSession, one_line
from optimum_memopt.engines.shared import in_place
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.generators import GeneratorStates
from optimum_memopt.logs import get_logger
from optimum_memopt.memory import process
from optimum_memopt.plans.table import PlanTable

if TYPE_CHECKING:
    from transformers import TrainingArguments


class OrtEngine(in_place.InPlaceEngine):
    """The `ort` engine.

    Training forwards (training mode, gradients enabled) run in ONNX Runtime; all others run the model's own forward.
    """

    name = "ort"

    def __init__(self, selection: Selection | None = None, options: OrtOptions | None = None) -> None:
        self._options = options or OrtOptions()
        self._smoothing: LabelSmoothing | None = None
        self._has_evaluated = False
        self._exported_attention: str | None = None
        self.keeps_checkpointing = self._options.ort_allow_autograd_checkpoint
        super().__init__(selection)

    def apply(self, selection: Selection) -> None:
        """Select other plans. Raises ConfigError for counts other than -1 and 0, and for offload and compression,
        which ONNX Runtime does not support."""
        if selection.config is not None:
            check_supported(selection.config)
        super().apply(selection)

    def check_arguments(self, args: "TrainingArguments") -> None:
        checks.check_arguments(args, self._options.ort_allow_autograd_checkpoint, self._options.ort_zero_stage3)
        ort_options.check_arguments(self._options, args)

    def _enter(self) -> None:
        self._attention = None
        self._reexports = ReexportLimit()
        if not self._options.ort_arena:
            process.return_freed_memory()
        self._attention = checks.choose_attention(self._model)
        exported_with, self._exported_attention = self._exported_attention, checks.attention(self._model)
        if exported_with != self._exported_attention:
            self._forget()
        for remark in (*checks.remarks(self._model), ort_options.skip_check_remark(self._options.ort_skip_check)):
            if remark:
                get_logger().warning(remark)

    def _leave(self) -> None:
        if self._attention is not None:
            model: Any = self._model
            model.set_attn_implementation(self._attention)
        if not self._options.ort_arena:
            process.restore_malloc()

    def _continue(self) -> None:
        # A step that was interrupted, for instance by running out of memory, leaves a forward without its backward.
        if self._session is not None and self._session.backward_is_due:
            self._forget()

    def smooth_labels(self, smoothing: Any) -> bool:
        """Compute the loss of a `LabelSmoothing` in the graph; needs `--ort_module_with_loss`."""
        if smoothing != self._smoothing:
            self._smoothing = smoothing
            self._forget()
        return True

    def _check(self, model: torch.nn.Module) -> None:
        checks.check(model, self._options.ort_allow_autograd_checkpoint)
        ort_options.check_model(self._options, model)

    def plans(self) -> PlanTable | None:
        return self._session.table if self._session is not None else self._fallback_table

    def insight(self) -> str:
        """Returns ONNX Runtime's own per-node text of the current training graph."""
        return self._session.insight if self._session is not None else ""

    @property
    def _redraws_random_numbers(self) -> bool:
        return self._session is not None and self._session.plans.choice.redraws_random_numbers

    @property
    def graph(self) -> Any:
        """Returns the current training graph (`onnx.GraphProto`); None before the first training forward."""
        return self._session.internals.graph if self._session is not None else None

    def _forget(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None:
            session.close()
        self._session: OrtSession | None = None
        self._exported_table: PlanTable | None = None
        # The plan table while plain PyTorch trains the model.
        self._fallback_table: PlanTable | None = None
        self._state: ModuleState | None = None

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._model.training:
            # ORTModule computes no gradients in evaluation mode.
            self._say_evaluates()
            return self._attached.training_forward.plain_forward(*args, **kwargs)
        self._drop_outdated_session()
        if self._fallback_table is not None:
            return self._run_fallback(*args, **kwargs)
        checks.check_autocast(self._model)
        if self._session is not None and self._session.backward_is_due and self._redraws_random_numbers:
            raise MemOptError(
                "a training forward follows one whose backward has not run: ONNX Runtime draws recomputed dropout "
                "masks in the order of the forwards, so this plan needs forward and backward in pairs; run each "
                "backward first, use torch.no_grad() for forwards without one, or leave out the Dropout plans"
            )
        generators = GeneratorStates.of(next(self._model.parameters()).device)
        try:
            if self._session is None:
                if reason := checks.unsupported_reason(self._model):
                    self._fall_back(reason)
                    return self._run_fallback(*args, **kwargs)
                self._session = OrtSession(self._export_copy(), self._options, self._selection)
                self._label_shapes = LabelShapes(is_encoder_decoder(self._model))
            if self._options.ort_module_with_loss:
                self._label_shapes.check(kwargs)
            outputs = self._session.forward(*args, **without_key_value_cache(self._model, args, kwargs, forced=True))
            if self._session.table is not self._exported_table:
                self._accept_export()
            return outputs
        except (MemOptError, torch.OutOfMemoryError):
            # The caller may continue with a smaller batch: leave neither a graph without a session behind, nor a
            # forward without its backward.
            self._forget()
            raise
        except IndexError:
            # A label or id of this batch is out of range; a session that is already built can run the next batch.
            if self._session is None or self._session.is_building or self._redraws_random_numbers:
                self._forget()
            raise
        except Exception as error:
            if self._session is not None and not self._session.is_building:
                reason = self._batch_failure(error, args, kwargs)
            else:
                reason = str(error) if isinstance(error, checks.UnsupportedByOrt) else one_line(error)
            if not reason:
                self._forget()
                raise
            self._fall_back(reason, error)
            # The export runs the forward, which draws random numbers.
            generators.restore()
        except BaseException:
            # Training may continue after Ctrl-C.
            self._forget()
            raise
        return self._run_fallback(*args, **kwargs)

    def _fall_back(self, reason: str, error: Exception | None = None) -> None:
        """Train with plain PyTorch from now on.

        Raises:
            UnsupportedModelError: the fallback is off (`--ort_fallback false`).
        """
        if not self._options.ort_fallback:
            raise UnsupportedModelError(
                f"ONNX Runtime cannot train {type(self._model).__name__}: {reason}",
                "--memory_opt_engine compile trains it under a plan, --ort_fallback with plain PyTorch",
            ) from error
        state = self._state
        self._forget()
        self._state = state
        line = (
            f"NOT on ONNX Runtime: it cannot train this model ({reason}); no plan is applied, "
            "--memory_opt_engine compile trains it under one"
        )
        get_logger().warning(line)
        self._fallback_table = PlanTable(engine=self.name, plans=(), header=(line,))

    def _drop_outdated_session(self) -> None:
        """Drop the session if model state that is baked into its graph has changed since the export."""
        state = ModuleState(self._model)
        changes = self._state.changes(state) if self._state is not None else {}
        if self._fallback_table is not None and changes.keys() <= self._reexports.exceeded:
            changes = {}
        if changes:
            get_logger().info(f"re-exporting the model: {describe_changes(changes)}")
            self._forget()
            self._check(self._model)
        self._state = state
        if name := self._reexports.record(changes):
            self._fall_back(
                f"{name} keeps changing ({' -> '.join(changes[name])}), and each change needs a new export; keep it "
                "fixed"
            )

    def _say_evaluates(self) -> None:
        if not self._has_evaluated:
            self._has_evaluated = True
            get_logger().warning(
                f"a forward of {type(self._model).__name__} in evaluation mode with gradients enabled runs in plain "
                "PyTorch: ONNX Runtime trains only in training mode; for training call model.train(), or use "
                "--memory_opt_engine compile"
            )

    def _accept_export(self) -> None:
        """Copy the attributes that the traced forward set on the exported copy to the model. If only caches of the
        forward have changed, accept them without a re-export."""
        self._exported_table = self.plans()
        self._exported.write_back_attributes()
        state = ModuleState(self._model)
        if self._state is not None and self._state.only_caches_changed(state):
            self._state = state

    def _run_fallback(self, *args: Any, **kwargs: Any) -> Any:
        forward = with_label_smoothing(self._attached.training_forward.plain_forward, self._smoothing)
        outputs = forward(*args, **kwargs)
        # State that the forward itself changes is no reason to try ONNX Runtime again.
        self._state = ModuleState(self._model)
        return outputs

    def _batch_failure(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Returns why ONNX Runtime fails on a batch that PyTorch can run; empty if PyTorch fails too."""
        try:
            with torch.no_grad():
                self._attached.training_forward.plain_forward(*args, **kwargs)
        except Exception:
            return ""
        return (
            f"a batch after the first fails, for instance because the graph has the first one's shapes baked in "
            f"({one_line(error)}); pad all batches to one shape and drop the last"
        )

    def _export_copy(self) -> torch.nn.Module:
        """Returns the module that ORT exports. It shares submodules and parameters with the model, but not the root's
        hooks, which the model's own `__call__` runs already."""
        self._exported = SharedCopy(self._model)
        module = self._exported.module
        module.__dict__.pop("forward", None)
        previous = self._attached.training_forward.before
        if isinstance(previous, types.MethodType):
            module.forward = types.MethodType(previous.__func__, module)
        for name in internals.MODULE_HOOKS:
            module.__dict__[name] = OrderedDict()
        if self._options.ort_module_with_loss:
            options = self._options
            sparse = options.ort_compute_optimizer and options.ort_label_sparse_optimizer is not False
            return_loss_only(module, self._smoothing, sparse)
        return module
