"""How well a budget is kept and used, and its cost against other ways to the same peak.

    python benchmarks/budget.py --json budget.json --docs docs
    python benchmarks/budget.py --part cases --cases 50 --json budget.json
    python benchmarks/budget.py --quick

Parts:

- `cases`: small models train one step with aot_eager under a random budget; torch's allocator is compared with it.
- `baselines`: torch's activation_memory_budget, activation checkpointing, level 1 and single rows of the plan table,
  each against the solver at the same peak. Models are traced on fake tensors, under autocast to bfloat16; times are
  estimated for an H100.
- `steps`: measured step times of such ways on the CPU, against the solver's at the same peak.
- `solver`: the solver against all subsets of a layer's activations, and its solving times.
- `units`: plans of layers that are compiled by themselves, against plans of the whole forward.
- `ragged`: the costs of up to three plans for an epoch of real text with batches of various lengths.

Results in --json are not measured again, so the parts may run in pieces. Needs matplotlib for the plot (the extra
`benchmark`).
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

# Makes the tests' model zoo importable.
sys.path.append(str(Path(__file__).parents[1]))

import budget_baselines
import budget_cases
import budget_ragged
import budget_solver
import budget_steps
import budget_units
from shared import fill

from optimum_memopt.compat.installed import installed_version

# Each module has run(saved, keep, arguments), which adds results to `saved`, and sections(saved), the page's texts.
PARTS: dict[str, Any] = {
    "cases": budget_cases,
    "baselines": budget_baselines,
    "steps": budget_steps,
    "solver": budget_solver,
    "units": budget_units,
    "ragged": budget_ragged,
}


def conditions(threads: int) -> str:
    versions = (installed_version((name,)) for name in ("torch", "transformers", "scipy"))
    found = [" ".join(version) for version in versions if version]
    return f"{', '.join(found)}; CPU, {platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", type=int, default=200, help="number of cases in the part `cases`")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of the part `steps`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="smoke test: tiny models, few cases and rounds")
    parser.add_argument("--json", type=Path, help="file with all measurements")
    parser.add_argument("--docs", type=Path, help="folder whose budget_benchmark.md and its plot are updated")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    about = conditions(arguments.threads)
    saved: dict[str, Any] = {"conditions": about, "parts": {}}
    if arguments.json and arguments.json.exists():
        saved = json.loads(arguments.json.read_text(encoding="utf-8"))
        if saved["conditions"] != about:
            sys.exit(f"error: --json {arguments.json}: measured under other conditions: {saved['conditions']}")

    def keep() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(saved), encoding="utf-8")

    for name in arguments.part:
        PARTS[name].run(saved["parts"].setdefault(name, {}), keep, arguments)
    sections = {
        name: text for part, found in saved["parts"].items() for name, text in PARTS[part].sections(found).items()
    }
    print(about, *(f"{name}:\n\n{text}" for name, text in sections.items()), sep="\n\n")
    if arguments.docs:
        fill(arguments.docs / "budget_benchmark.md", {**sections, "conditions": about})
        if "baselines" in saved["parts"]:
            budget_baselines.plot(saved["parts"]["baselines"], arguments.docs / "budget_benchmark.svg")


if __name__ == "__main__":
    main()
