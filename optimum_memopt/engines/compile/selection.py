"""What the user asked for against what the graphs offer. Pure."""

from collections.abc import Sequence

from optimum_memopt.plans.grammar import PlanConfig

from .graphs import Graph


def check_known(config: PlanConfig, graphs: Sequence[Graph], strict: bool) -> tuple[str, ...]:
    return ()
