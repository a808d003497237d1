"""Who makes a choice. A producer is a file here and a place in `PRODUCERS`."""

from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.compile.producers.budget import FromBudget
from optimum_memopt.engines.compile.producers.config import FromConfig
from optimum_memopt.engines.compile.producers.level import FromLevel
from optimum_memopt.engines.compile.producers.producer import Producer
from optimum_memopt.engines.compile.producers.torch_default import TorchDefault

# The first that has something to do with what the user asked for makes the choices.
PRODUCERS: tuple[type[Producer], ...] = (FromBudget, FromLevel, FromConfig, TorchDefault)

__all__ = ["Producer", "producer_for"]


def producer_for(selection: Selection) -> Producer:
    """The producer of what the user asked for."""
    return next(producer for kind in PRODUCERS if (producer := kind.of(selection)) is not None)
