"""The ort engine: ONNX Runtime Training's ORTModule and its C++ memory optimizer, in place, on today's torch.

Importing this package imports nothing of onnxruntime; `OrtEngine.attach` does.
"""

from typing import Any

import torch

from optimum_memopt.engines.api.factory import EngineFactory
from optimum_memopt.engines.ort.compat.installation import DISTRIBUTIONS, missing
from optimum_memopt.engines.ort.options import FOR_ANY_ENGINE, NEED_TRAINER, PER_RANK, OrtOptions
from optimum_memopt.engines.shared.optimizers import Provider, register_optimizer
from optimum_memopt.engines.shared.registry import Registration, register_engine

__all__ = ["DISTRIBUTIONS", "OrtOptions", "missing"]


def _load() -> EngineFactory:
    from optimum_memopt.engines.ort.factory import OrtFactory

    return OrtFactory()


def _fused_adam_missing(device: str) -> str:
    from optimum_memopt.engines.ort.optimizers import fused_adam_missing

    return fused_adam_missing(device)


def _fused_adam() -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    from optimum_memopt.engines.ort.optimizers import fused_adam

    return fused_adam()


register_optimizer("ort_fused_adam", Provider(_fused_adam_missing, _fused_adam, needs="CUDA"))
register_engine(
    Registration(
        "ort",
        options=OrtOptions,
        load=_load,
        summary="ONNX Runtime's ORTModule",
        order=0,
        for_any_engine=FOR_ANY_ENGINE,
        need_trainer=NEED_TRAINER,
        per_rank=PER_RANK,
    )
)
