"""An engine that counts training forwards; a test copies it into `optimum_memopt/engines`."""

from dataclasses import dataclass, field

from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.factory import EngineFactory
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.shared.registry import Registration, register_engine


@dataclass
class ToyOptions:
    toy_step: int = field(default=1, metadata={"help": "What a training forward counts as."})


class ToyFactory(EngineFactory):
    def create(self, options, selection: Selection) -> Engine:
        from optimum_memopt.engines.toy.engine import ToyEngine

        return ToyEngine(options.toy_step, selection)


register_engine(Registration("toy", options=ToyOptions, load=ToyFactory, summary="counts forwards", order=-1))
