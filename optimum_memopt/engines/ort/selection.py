"""From what the user asked for and what the graph offers to the exact configs that ONNX Runtime is given. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from optimum_memopt.engines.ort.post_norm import POST_NORM_REASON
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.plans.grammar import ALL, ConfigError, PlanConfig, Strategy
from optimum_memopt.plans.matching import match, operators

RANDOM_OPERATORS = frozenset({"Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout", "BiasSoftmaxDropout"})


@dataclass(frozen=True)
class Choice:
    """What to apply.

    Attributes:
        configs: `cluster_id:strategy:-1`, in the order of asking.
        notes: `cluster_id:strategy:-1` to a note for its row of the table.
        remarks: lines to say once.
    """

    configs: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def redraws_random_numbers(self) -> bool:
        return any(RANDOM_OPERATORS & set(operators(config.split(":")[0])) for config in self.configs)


def check_supported(config: PlanConfig) -> None:
    """Refuse what ONNX Runtime's memory optimizer cannot do; needs no graph.

    Raises:
        ConfigError: a count other than -1 and 0 (ORT 1.18 and 1.19 apply every occurrence for any N >= 1), or offload.
    """
    for request in config.requests:
        shown = excerpt(str(request))
        if request.strategy is Strategy.OFFLOAD:
            raise ConfigError(f"{shown}: strategy 3 (offload) is not available on the ort engine; allowed: 0, 1, 2")
        if request.count not in (ALL, 0):
            raise ConfigError(
                f"{shown}: count {request.count} is not available on the ort engine, because ONNX Runtime 1.19 "
                "applies every occurrence for any count from 1; allowed: -1 (all) and 0 (off)"
            )


def choose_config(config: PlanConfig, existing: Iterable[str], strict: bool) -> Choice:
    """Match a user's config with the plans of the graph.

    Args:
        config: already checked by `check_supported`.
        existing: `cluster_id:strategy:-1` of every plan in the graph.
        strict: unknown ids are errors; otherwise remarks.

    Raises:
        ConfigError: an id (or its strategy) that the graph does not have; near matches come first in the message.
    """
    found = match(config, existing, strict, here="provider")
    notes = {one.plan: one.note for one in found.on if one.note}
    return Choice(tuple(one.plan for one in found.on), notes, found.remarks)


def choose_level(level: int, existing: Iterable[str], residual_operators: Collection[str]) -> Choice:
    """Everything recomputable in each transformer layer, but for what would keep the peak up.

    Args:
        level: 1 (recompute), 2 (also with compromise).
        existing: `cluster_id:strategy:-1` of every plan in the graph.
        residual_operators: of `graph_rules.residual_normalizations`.
    """
    wanted = {Strategy.RECOMPUTE} if level == 1 else {Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE}
    configs, notes, existing = [], {}, tuple(existing)
    for plan in existing:
        cluster_id, strategy, _ = plan.split(":")
        if int(strategy) not in wanted:
            continue
        if set(operators(cluster_id)) & set(residual_operators):
            notes[plan] = POST_NORM_REASON
        elif int(strategy) == Strategy.RECOMPUTE_WITH_COMPROMISE and f"{cluster_id}:1:{ALL}" in existing:
            # ORT keeps one request for an id, and the last one given would win.
            notes[plan] = "left out: this id is on with strategy 1, which saves all of its bytes"
        else:
            configs.append(plan)
    remarks = (
        (f"level {level} leaves out {len(notes)} of {len(configs) + len(notes)} plans, see the table's notes",)
        if notes
        else ()
    )
    return Choice(tuple(configs), notes, remarks)


def check_applied(choice: Choice, applied: dict[str, tuple[int, int]], strict: bool) -> tuple[str, ...]:
    """Remarks about plans that ORT took and then applied nowhere.

    Raises:
        MemOptError: there are some and `strict` is set.
    """
    idle = [config for config in choice.configs if applied.get(config, (0, 0))[1] == 0]
    if idle and strict:
        raise MemOptError(f"ONNX Runtime applied none of {', '.join(idle)}; leave them out of the config")
    return (f"ONNX Runtime applied none of {', '.join(idle)}",) if idle else ()
