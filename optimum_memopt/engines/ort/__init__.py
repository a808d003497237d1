"""The ort engine: ONNX Runtime Training's ORTModule and its C++ memory optimizer, in place, on today's torch.

Importing this package imports nothing of onnxruntime; `OrtEngine.attach` does.
"""

from optimum_memopt.engines.api.factory import EngineFactory
from optimum_memopt.engines.ort import fused_adam
from optimum_memopt.engines.ort.installed import DISTRIBUTIONS, missing
from optimum_memopt.engines.ort.options import FOR_ANY_ENGINE, NEED_TRAINER, PER_RANK, OrtOptions
from optimum_memopt.engines.shared.registry import register_engine

__all__ = ["DISTRIBUTIONS", "OrtOptions", "missing"]


def _load() -> EngineFactory:
    from optimum_memopt.engines.ort.factory import OrtFactory

    return OrtFactory()


fused_adam.register()
register_engine(
    "ort",
    options=OrtOptions,
    load=_load,
    summary="ONNX Runtime's ORTModule",
    order=0,
    for_any_engine=FOR_ANY_ENGINE,
    need_trainer=NEED_TRAINER,
    per_rank=PER_RANK,
)
