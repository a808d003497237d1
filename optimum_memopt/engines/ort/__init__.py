"""The ort engine: ONNX Runtime Training's ORTModule and its C++ memory optimizer, applied in place, on current torch.

Importing this package does not import onnxruntime; `OrtEngine.attach` does.
"""

from types import ModuleType

from optimum_memopt.engines.api.factory import EngineFactory
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.engines.shared.optimizers import Provider, register_optimizer
from optimum_memopt.engines.shared.registry import Registration, register_engine


def _load() -> EngineFactory:
    from optimum_memopt.engines.ort.factory import OrtFactory

    return OrtFactory()


def _optimizers() -> ModuleType:
    # Imported late: it imports transformers' Trainer, which is slow, see `engines/shared/label_smoothing.py`.
    from optimum_memopt.engines.ort import optimizers

    return optimizers


register_optimizer(
    "ort_fused_adam",
    Provider(
        lambda device: _optimizers().fused_adam_missing(device), lambda: _optimizers().fused_adam(), needs="CUDA"
    ),
)
register_engine(
    Registration(
        "ort",
        options=OrtOptions,
        load=_load,
        summary="ONNX Runtime's ORTModule",
        order=0,
        for_any_engine=frozenset({"ort_fp16_optimizer"}),
        need_trainer=frozenset({"ort_fp16_optimizer"}),
        per_rank=frozenset({"ort_cache_dir", "ort_save_onnx"}),
    )
)
