"""Claimed against measured savings of plans: peak memory and time per step, each case in a fresh process.

    python benchmarks/ort_claims.py
    python benchmarks/ort_claims.py --models deberta-v2 --groups torch none levels
    python benchmarks/ort_claims.py --models roberta --groups none levels arena malloc

A step is forward and backward with dropout 0.1; the first one builds the graph and is not measured. The peak is the
exact resident peak (the allocator's on CUDA); malloc returns freed blocks to the system except in the untuned cases.
Repeats are interleaved, and each number is their median. `claimed` is the plan table's sum over the enabled plans,
`saved` how far they lower the peak of no plan. Needs matplotlib for the plot (the extra `benchmark`).
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baselines import Baseline, measure
from shared import MODELS, fill, make_config, pyplot, to_markdown
from tqdm import tqdm

from optimum_memopt.measure import Measurement
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.predict.workload import Workload

GROUPS = ("torch", "none", "rows", "pairs", "levels", "ort-level", "arena", "malloc")
# The last two are about the allocator, not about plans.
DEFAULT_GROUPS = GROUPS[:6]
LEVEL = {"memory_opt_level": 1}
MIB = 2**20
DECIMALS = {"of none": 2, "of none ": 2, "s/step": 2, "CPU-s/step": 1}


@dataclass(frozen=True)
class Named:
    """A case and its name in the table."""

    name: str
    options: Mapping[str, Any] | None
    activation_checkpointing: bool = False
    tuned_malloc: bool = True


NONE = Named("none", {})
FIXED = {
    "torch": (Named("torch", None), Named("torch checkpointing", None, activation_checkpointing=True)),
    "none": (NONE,),
    "levels": (Named("level 1", LEVEL), Named("level 2", {"memory_opt_level": 2})),
    "arena": (Named("none, arena on", {"ort_arena": True}), Named("level 1, arena on", {**LEVEL, "ort_arena": True})),
    "malloc": (
        Named("none, malloc untuned", {}, tuned_malloc=False),
        Named("level 1, malloc untuned", LEVEL, tuned_malloc=False),
    ),
}


def rows_of(table: PlanTable, peak_mib: float, share: float) -> list[str]:
    """Returns the configs of the rows that claim at least this share of the peak, largest first."""
    return [plan.config for plan in table.plans if (plan.saving_bytes or 0) >= share * peak_mib * MIB]


def cases_of(group: str, none: Measurement, share: float) -> tuple[Named, ...]:
    """Returns the cases of a group for the model whose `none` was measured."""
    if group in FIXED:
        return FIXED[group]
    if group == "ort-level":
        # ORT's own level 1 recomputes every row, normalizations included.
        parts = [part for plan in none.table.plans for part in plan.config.split(",") if ":1:" in part]
        return (Named("ORT's level 1", {"memory_opt_config": ",".join(dict.fromkeys(parts))}),)
    configs = rows_of(none.table, none.peak_mib, share)
    if group == "rows":
        return tuple(Named(_short(config), {"memory_opt_config": config}) for config in configs)
    pairs = itertools.combinations(configs[:3], 2)
    merged = (dict.fromkeys(f"{one},{other}".split(",")) for one, other in pairs)
    return tuple(Named(_short(config), {"memory_opt_config": config}) for config in map(",".join, merged))


def _short(config: str) -> str:
    """Returns the cluster ids of a config; strategy and count are the same in all."""
    return ", ".join(part.removesuffix(":1:-1") for part in config.split(","))


def measured(workloads: Mapping[str, Workload], arguments: argparse.Namespace) -> dict[str, dict[str, list]]:
    """Returns the measurements of each repeat, by model and case."""
    found: dict[str, dict[str, list[Measurement]]] = {model: {} for model in workloads}
    bar = tqdm(unit="run", file=sys.stderr)

    def run(model: str, named: Named) -> None:
        bar.set_postfix_str(f"{model} {named.name}")
        settings = {"activation_checkpointing": named.activation_checkpointing, "tuned_malloc": named.tuned_malloc}
        case = Baseline(workloads[model], named.options, steps=arguments.steps, **settings)
        found[model].setdefault(named.name, []).append(measure(case))
        bar.update()

    for _ in range(arguments.repeats):
        for model in workloads:
            # This case runs first, since its table names the rows.
            run(model, NONE)
            none = found[model][NONE.name][0]
            groups = (cases_of(group, none, arguments.share) for group in arguments.groups)
            cases = [named for group in groups for named in group if named != NONE]
            bar.total = arguments.repeats * len(workloads) * (len(cases) + 1)
            for named in cases:
                run(model, named)
    bar.close()
    return found


def lines(cases: Mapping[str, list[Measurement]], time: str = "cpu_seconds") -> Iterator[dict[str, Any]]:
    """Yields a table row of medians for each case, with the ratios to no plan of the peak and of `time`.

    Args:
        cases: measurements by case.
        time: an attribute of the measurements.
    """

    def median(name: str, attribute: str) -> float:
        return statistics.median(getattr(run, attribute) for run in cases[name])

    none = {attribute: median(NONE.name, attribute) for attribute in ("peak_mib", "step_seconds", "cpu_seconds")}
    for name in cases:
        peak, seconds, cpu = (median(name, attribute) for attribute in none)
        yield {
            "case": name,
            "peak MiB": peak,
            "of none": peak / none["peak_mib"],
            "claimed MiB": cases[name][0].claimed_bytes / MIB,
            "saved MiB": none["peak_mib"] - peak,
            "s/step": seconds,
            "CPU-s/step": cpu,
            "of none ": median(name, time) / none[time],
        }


def plot(tables: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot bars of claimed and measured savings, with the time beside them, one row of panels per model."""
    height = sum(len(rows) for rows in tables.values()) * 0.27 + len(tables)
    figure, axes = pyplot("ort_claims").subplots(
        len(tables),
        2,
        figsize=(9.5, height),
        squeeze=False,
        width_ratios=(3, 1),
        height_ratios=[len(rows) for rows in tables.values()],
        layout="constrained",
    )
    for (saving, time), (model, rows) in zip(axes, tables.items(), strict=True):
        names = [row["case"] for row in rows]
        places = range(len(rows))
        saving.barh([place - 0.2 for place in places], [row["claimed MiB"] for row in rows], 0.4, label="claimed")
        saving.barh([place + 0.2 for place in places], [row["saved MiB"] for row in rows], 0.4, label="measured")
        saving.set_yticks(places, names)
        saving.set_title(f"{model}: saved of {rows[0]['peak MiB'] / rows[0]['of none']:.0f} MiB")
        saving.set_xlabel("MiB")
        saving.legend()
        time.barh(places, [row["of none "] for row in rows], 0.6, color="grey")
        time.axvline(1, color="black", linewidth=0.8)
        time.set_yticks([])
        time.set_title("time, of none")
        for panel in (saving, time):
            panel.invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


def write_docs(folder: Path, tables: Mapping[str, list[dict[str, Any]]]) -> None:
    """Write the tables between the markers of ort_claims.md, and the plot next to it."""
    fill(folder / "ort_claims.md", {model: to_markdown(rows, DECIMALS) for model, rows in tables.items()})
    plot(tables, folder / "ort_claims.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["roberta", "deberta-v2"])
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=DEFAULT_GROUPS)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1, help="measured steps per process")
    parser.add_argument("--repeats", type=int, default=2, help="processes per case")
    parser.add_argument(
        "--share", type=float, default=0.03, help="leave out rows that claim less than this share of the peak"
    )
    parser.add_argument(
        "--time",
        choices=("cpu_seconds", "step_seconds"),
        default="cpu_seconds",
        help="time whose ratio is shown: CPU time, which hardly depends on other load, or wall time (on CUDA)",
    )
    parser.add_argument("--docs", help="folder whose ort_claims.md and ort_claims.svg are updated")
    parser.add_argument("--json", help="file to write all measurements to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workloads = {}
        for model in arguments.models:
            make_config(model, arguments.hidden, arguments.layers).save_pretrained(f"{folder}/{model}")
            workloads[model] = Workload(f"{folder}/{model}", MODELS[model], arguments.batch_size, arguments.seq_len)
        found = measured(workloads, arguments)
    tables = {model: list(lines(cases, arguments.time)) for model, cases in found.items()}
    if arguments.json:
        raw = {
            model: {case: [json.loads(run.to_json()) for run in runs] for case, runs in cases.items()}
            for model, cases in found.items()
        }
        Path(arguments.json).write_text(json.dumps(raw), encoding="utf-8")
    for model, rows in tables.items():
        print(f"{model}:\n\n{to_markdown(rows, DECIMALS)}\n")
    if arguments.docs:
        write_docs(Path(arguments.docs), tables)


if __name__ == "__main__":
    main()
