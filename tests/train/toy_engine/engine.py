from optimum_memopt.engines.shared.in_place import InPlaceEngine
from optimum_memopt.plans.table import PlanTable


class ToyEngine(InPlaceEngine):
    name = "toy"

    def __init__(self, step, selection):
        self._step = step
        super().__init__(selection)

    def check_arguments(self, args):
        pass

    def plans(self):
        return PlanTable("toy", (), {}, (f"{self._count} forwards",)) if self._count else None

    def predicted_peak_mib(self, optimizer):
        return None

    def insight(self):
        return ""

    def _forget(self):
        self._count = 0

    def _train_forward(self, *args, **kwargs):
        self._count += self._step
        return self._attached.training_forward.plain_forward(*args, **kwargs)
