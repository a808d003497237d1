"""A made-up training step with its table, timeline and measurements."""

from dataclasses import replace

from optimum_memopt.callbacks.memory_phases import MeasuredStep
from optimum_memopt.engines.api.predictions import CATEGORIES, CurvePoint, Frontier, Group, Phase, StepTimeline
from optimum_memopt.plans.table import PlanRow, PlanTable
from optimum_memopt.report.page import ReportData

MIB = 2**20
TABLE = PlanTable(
    "compile",
    (
        PlanRow("Gelu+:1:-1", 6, 65_470_464, "36864*rows*length", -1, 6, applied_saving_bytes=65_470_464),
        PlanRow("A<b>&c+:1:-1", 2, 1_234_567, "7*rows", 0, 0, note="<i>not</i> worth it"),
        PlanRow("Where+:1:-1", 1, None, "", 0, 0),
    ),
    {"inputs_input_ids_dim0": 16, "inputs_input_ids_dim1": 111},
    ("Model<x> on cpu by aot_eager, level 1", "Predicted: a & b"),
)


def timeline(layers: int = 4, per_layer: int = 3, always: int = 200 * MIB, other: int = 40 * MIB) -> StepTimeline:
    """Returns a step whose forward operators save 10 MiB each, whose backward frees as much, and an optimizer step."""
    count = layers * per_layer
    names = [f"model.layers.{index // per_layer}" for index in range(count)]
    saved = [10 * MIB * (index + 1) for index in range(count)]
    temporary = [5 * MIB * (1 + index % 2) for index in range(2 * count)]
    gradients = [2 * MIB * index for index in range(count)]
    held = {
        "parameters": [always] * (2 * count + 1),
        "other": [other] * (2 * count + 1),
        "saved activations": [*saved, *reversed(saved), 0],
        "gradients": [*[0] * count, *gradients, 2 * MIB * count],
        "temporaries": [*temporary, 0],
    }
    found = StepTimeline(
        operators=(*(f"op_{index}" for index in range(2 * count)), "optimizer step"),
        layers=(*names, *reversed(names), ""),
        held={name: tuple(held.get(name, [0] * (2 * count + 1))) for name in CATEGORIES},
        backward_at=count,
        alive=(),
        phases=tuple(Phase(name, always, always + 3 * MIB) for name in ("pre_forward", "post_forward")),
        sizes={"inputs_input_ids_dim0": 16},
    )
    at = found.peak_at
    groups = [Group(name, "", 0, sizes[at]) for name, sizes in found.held.items() if name != "saved activations"]
    groups.append(Group("saved activations", "Gelu+", count, found.held["saved activations"][at], tuple(set(names))))
    return replace(found, alive=tuple(sorted(groups, key=lambda group: -group.bytes)))


FRONTIER = Frontier(
    tuple(CurvePoint(size * MIB, size * MIB, (400 - size) / 1000, 1.0) for size in (250, 300, 350, 400)),
    "measured",
    CurvePoint(310 * MIB, 300 * MIB, 0.1, 1.0),
)
FULL = ReportData(
    title="Model<x> on cpu by aot_eager, level 1",
    facts=(("engine", "compile (requested)"), ("model", "<script>alert(1)</script>")),
    table=TABLE,
    timeline=timeline(),
    frontier=FRONTIER,
    measured=MeasuredStep(
        4, (Phase("pre_forward", 399 * MIB // 2, 399 * MIB // 2), Phase("post_forward", 200 * MIB, 204 * MIB))
    ),
    measured_peak=345 * MIB,
    densities={"input_ids": ((1, 71.5), (2, 64.0), (4, 80.25)), "labels": ((1, 15.0), (2, 15.5), (4, 14.9))},
)
