"""The compile engine: memory plans on stock PyTorch, through torch.compile and a custom partitioner for AOTAutograd.

Importing this package imports none of torch's compilers; making an engine does.
"""

from optimum_memopt.engines.api.factory import EngineFactory
from optimum_memopt.engines.compile.options import CompileOptions
from optimum_memopt.engines.shared.registry import Registration, register_engine

__all__ = ["CompileOptions"]


def _load() -> EngineFactory:
    from optimum_memopt.engines.compile.factory import CompileFactory

    return CompileFactory()


register_engine(
    Registration(
        "compile",
        options=CompileOptions,
        load=_load,
        summary="torch.compile",
        order=10,
        need_trainer=frozenset({"memory_opt_batch"}),
    )
)
