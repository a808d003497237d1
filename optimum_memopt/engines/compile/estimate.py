"""The plan table and predicted peak of a model that is traced on fake tensors: no weights, no data, no GPU memory."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from optimum_memopt.compat import attention_implementation, is_encoder_decoder
from optimum_memopt.engines.base import Selection
from optimum_memopt.errors import MemOptError
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.plans.table import PlanTable, canonical_symbols

if TYPE_CHECKING:
    import torch

    from optimum_memopt.measure.workload import Workload


@dataclass(frozen=True)
class Estimate:
    """The predicted memory of a step.

    Attributes:
        table: the plan table, with the prediction in its header.
        parts: bytes by name, see `Footprint`.
        peak_mib: of a step with AdamW.
        device: type of the device whose kernels are assumed.
        attention: transformers' name of the assumed attention implementation.
    """

    table: PlanTable
    parts: dict[str, int]
    peak_mib: float
    device: str
    attention: str

    def to_text(self) -> str:
        """The table, and what the prediction assumes."""
        return (
            f"{self.table.to_text()}\nPredicted, not run: attention is {self.attention}, with the kernel that torch "
            f"takes on {self.device}; other devices may take another one. Exact with --memory_opt_compiler aot_eager, "
            "except for the header's remarks in brackets; inductor saves the same activations, and their peak was "
            "between a third lower and a fifth higher: a training run predicts it from inductor's own programs"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def estimate(workload: "Workload", selection: Selection, symbolic: bool = False) -> Estimate:
    """Trace one training forward and its backward on fake tensors, and partition them with the compile engine.

    Args:
        workload: the model and the size of its batch.
        selection: which plans.
        symbolic: sizes stay symbols, so that savings are formulas; several times slower.

    Raises:
        MemOptError: bad sizes or plans, or a model whose forward depends on the values in its tensors.
    """
    import torch
    from transformers.initialization import no_init_weights

    from optimum_memopt.engines.compile import compat
    from optimum_memopt.engines.compile.engine import CompileEngine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = CompileEngine(selection, compiler="aot_eager", dynamic=symbolic)
    # As under a Trainer.
    engine.outputs_read_by = lambda: ""
    with compat.fake_tensors():
        # Some models draw initial values in a loop until they are in range, which fake tensors never are.
        with device, no_init_weights():
            model: Any
            model, batch = workload.build()
        model.tie_weights()
        _decide_problem_type(model.config, batch.get("labels"))
        engine.attach(model)
        try:
            model(**batch)
        except MemOptError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            raise MemOptError(
                f"{type(model).__name__} cannot be traced on fake tensors ({type(error).__name__}: {reason}); "
                "--measure runs it"
            ) from error
    table, predictor = engine.plans(), engine.predictor
    if table is None or predictor is None:
        raise MemOptError("; ".join(table.header if table is not None else ()))
    footprint = predictor.footprint()
    attention = attention_implementation(model.config) or "eager"
    if not symbolic:
        table = _without_formulas(table, batch, is_encoder_decoder(model))
    return Estimate(table, asdict(footprint), footprint.peak / MIB, device.type, attention)


def _decide_problem_type(config: Any, labels: "torch.Tensor | None") -> None:
    """Set the problem type where each row has one class as its label: DeBERTa's forward reads the labels otherwise."""
    if labels is None or labels.dim() != 1 or labels.is_floating_point():
        return
    if getattr(config, "problem_type", None) is None:
        config.problem_type = "single_label_classification"


def _without_formulas(table: PlanTable, batch: "dict[str, torch.Tensor]", is_encoder_decoder: bool) -> PlanTable:
    """A table without formulas, since sizes are fixed; symbols are named after the batch."""
    sizes = {f"{name}_dim{dim}": size for name, tensor in batch.items() for dim, size in enumerate(tensor.shape)}
    canonical = canonical_symbols(sizes, is_encoder_decoder)
    return replace(
        table,
        plans=tuple(replace(plan, saving_symbolic="") for plan in table.plans),
        symbols={canonical[name]: size for name, size in sizes.items()},
    )
