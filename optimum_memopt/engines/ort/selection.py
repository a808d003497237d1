"""Matches a config or a level with the plans of a graph and returns the exact configs for ONNX Runtime. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from optimum_memopt.engines.ort.post_norm import POST_NORM_REASON
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.plans.grammar import ALL, ConfigError, PlanConfig, Strategy
from optimum_memopt.plans.matching import match, operators

RANDOM_OPERATORS = frozenset({"Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout", "BiasSoftmaxDropout"})


@dataclass(frozen=True)
class Choice:
    """The plans to apply.

    Attributes:
        configs: `cluster_id:strategy:-1`, in the order of the request.
        notes: `cluster_id:strategy:-1` to a note for its row of the table.
        remarks: lines to log once.
    """

    configs: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def redraws_random_numbers(self) -> bool:
        return any(RANDOM_OPERATORS & set(operators(config.split(":")[0])) for config in self.configs)


def check_supported(config: PlanConfig) -> None:
    """Refuse what ONNX Runtime's memory optimizer does not support; needs no graph.

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
    matched = match(config, existing, here="provider")
    if strict:
        matched.check()
    notes = {row: note for row in matched.requests if (note := matched.note(row))}
    return Choice(tuple(matched.requests), notes, matched.remarks)


def choose_level(level: int, existing: Iterable[str], residual_operators: Collection[str]) -> Choice:
    """All recomputable activations of each transformer layer, except those whose recompute raises the peak.

    Args:
        level: 1 (recompute), 2 (also with compromise).
        existing: `cluster_id:strategy:-1` of every plan in the graph.
        residual_operators: from `post_norm.residual_normalizations`.
    """
    strategies = {Strategy.RECOMPUTE} if level == 1 else {Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE}
    configs, notes, existing = [], {}, tuple(existing)
    for plan in existing:
        cluster_id, strategy, _ = plan.split(":")
        if int(strategy) not in strategies:
            continue
        if set(operators(cluster_id)) & set(residual_operators):
            notes[plan] = POST_NORM_REASON
        elif int(strategy) == Strategy.RECOMPUTE_WITH_COMPROMISE and f"{cluster_id}:1:{ALL}" in existing:
            # ORT keeps one request per id, the last one.
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
    """Remarks about plans that ORT accepted and applied nowhere.

    Raises:
        MemOptError: there are some and `strict` is set.
    """
    idle = [config for config in choice.configs if applied.get(config, (0, 0))[1] == 0]
    if idle and strict:
        raise MemOptError(f"ONNX Runtime applied none of {', '.join(idle)}; leave them out of the config")
    return (f"ONNX Runtime applied none of {', '.join(idle)}",) if idle else ()
