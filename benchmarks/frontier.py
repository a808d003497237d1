"""Peak memory against time per step of every way to make a Trainer's step smaller, each in a fresh process.

    python benchmarks/frontier.py
    python benchmarks/frontier.py --models roberta --compilers aot_eager inductor --only "level|torch.compile"
    python benchmarks/frontier.py --bf16 --memory_cap 40GiB --layers 12 --seq_len 512

Baselines: eager PyTorch; transformers' activation checkpointing; `torch.compile`, alone and with
`activation_memory_budget`. Compared with them: the compile engine and the ort engine of this package. A step is
forward and backward with dropout 0.1; the first one compiles and is not measured. All start from the same weights,
batch and seed. Repeats are interleaved, and each number is their median. `activations` is the peak minus the memory
held between steps (weights, libraries), that is activations and gradients. Peaks are exact: resident memory on the
CPU, torch's allocator on CUDA.

With --memory_cap each baseline trains the largest batch whose step, with AdamW, stays under the cap: torch's limit for
the process on CUDA, the measured peak on the CPU. Needs matplotlib for the plot (the extra `benchmark`).
"""

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from baselines import COMPILERS, EAGER, FAMILIES, Baseline, baselines, capped, measure, rows, without_plan
from labels import label
from shared import MODELS, fill, make_config, pyplot, to_markdown
from tqdm import tqdm

from optimum_memopt.compat.installed import installed_version
from optimum_memopt.errors import MemOptError
from optimum_memopt.measure import Measurement
from optimum_memopt.predict.workload import Workload

DECIMALS = {"of eager": 2, "of eager ": 2, "s/step": 2, "CPU-s/step": 2, "samples/s": 2, " of eager ": 2}
MARKERS = dict(zip(FAMILIES, "*s^voD", strict=True))
_UNITS = {"GiB": 2**30, "MiB": 2**20}


@dataclass
class Result:
    """The measurements of a baseline; `error` says why one of its processes failed."""

    baseline: Baseline
    runs: list[Measurement] = field(default_factory=list)
    error: str = ""

    @property
    def batch_size(self) -> float:
        return self.baseline.workload.batch_size if self.runs else math.nan

    def median(self, attribute: str) -> float:
        return statistics.median(getattr(run, attribute) for run in self.runs) if self.runs else math.nan

    def to_dict(self) -> dict[str, Any]:
        runs = [json.loads(run.to_json()) for run in self.runs]
        return {"baseline": asdict(self.baseline), "runs": runs, "error": self.error}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Result":
        runs = [Measurement.from_json(json.dumps(run)) for run in data["runs"]]
        return cls(Baseline.from_json(json.dumps(data["baseline"])), runs, data["error"])


Results = dict[str, Result]


def run(results: dict[str, Results], arguments: argparse.Namespace, folder: str, keep: Callable[[], None]) -> None:
    """Measure until each baseline has `--repeats` runs.

    Args:
        results: results by model; new ones are added.
        folder: where the models' configs are saved.
        keep: called after each run.
    """
    bar = tqdm(unit="run", file=sys.stderr)
    wanted = re.compile(arguments.only)
    for repeat in range(arguments.repeats):
        for model in arguments.models:
            make_config(model, arguments.hidden, arguments.layers).save_pretrained(f"{folder}/{model}")
            workload = Workload(f"{folder}/{model}", MODELS[model], arguments.batch_size, arguments.seq_len)
            make = partial(Baseline, workload, steps=arguments.steps, bf16=arguments.bf16)
            found = results.setdefault(model, {})
            for baseline in all_baselines(make, found, arguments):
                name = baseline.name
                if name != EAGER and not wanted.search(name):
                    continue
                if name not in found or len(found[name].runs) <= repeat:
                    bar.set_postfix_str(f"{model}: {name}")
                    add_run(found, baseline, arguments)
                    keep()
                    bar.update()
    bar.close()


def all_baselines(make: Callable[..., Baseline], found: Results, arguments: argparse.Namespace) -> Iterator[Baseline]:
    """Yields all baselines, and single rows of the plan table once it is measured."""
    yield from baselines(make, arguments.compilers, arguments.every, arguments.budgets)
    for compiler in arguments.compilers:
        none = found.get(without_plan(compiler))
        if none and none.runs:
            yield from rows(make, compiler, none.runs[0], arguments.rows)


def add_run(found: Results, baseline: Baseline, arguments: argparse.Namespace) -> None:
    result = found.get(baseline.name)
    try:
        if result is None:
            if arguments.memory_cap is not None:
                baseline = capped(baseline, arguments.memory_cap, arguments.batch_step)
            result = found[baseline.name] = Result(baseline)
        if not result.error:
            # Each run of this program writes the config to a new folder.
            workload = replace(baseline.workload, batch_size=result.baseline.workload.batch_size)
            result.runs.append(measure(replace(result.baseline, workload=workload)))
    except MemOptError as error:
        found.setdefault(baseline.name, Result(baseline)).error = str(error)
        tqdm.write(f"{baseline.name}: {error}", file=sys.stderr)


def lines(results: Results, time: str) -> Iterator[dict[str, Any]]:
    """Yields a table row of medians for each baseline, with the ratios to eager of activations and of `time`.

    Args:
        results: results by baseline name.
        time: an attribute of the measurements.
    """
    eager = results[EAGER]
    for name, result in results.items():
        if result.runs and not result.error:
            yield {
                "baseline": name,
                "peak MiB": result.median("peak_mib"),
                "activations MiB": result.median("activations_mib"),
                "of eager": result.median("activations_mib") / eager.median("activations_mib"),
                "s/step": result.median("step_seconds"),
                "CPU-s/step": result.median("cpu_seconds"),
                "of eager ": result.median(time) / eager.median(time),
            }


def capped_lines(results: Results) -> Iterator[dict[str, Any]]:
    """Yields a table row for each baseline: its largest batch, and the samples per second with it."""

    def speed(result: Result) -> float:
        return result.batch_size / result.median("step_seconds")

    eager = results[EAGER]
    for name, result in results.items():
        if result.runs and not result.error:
            yield {
                "baseline": name,
                "batch": result.batch_size,
                "of eager": result.batch_size / eager.batch_size,
                "peak MiB": result.median("peak_mib"),
                "samples/s": speed(result),
                " of eager ": speed(result) / speed(eager),
            }


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the Pareto-optimal points (lower is better), sorted by the first number."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def plot(tables: Mapping[str, list[dict[str, Any]]], results: Mapping[str, Results], path: Path) -> None:
    """Plot time per step against the peak of activations, both relative to eager, one panel per model."""
    plots = pyplot("frontier")
    figure, panels = plots.subplots(
        1, len(tables), figsize=(5.2 * len(tables), 4.6), squeeze=False, layout="constrained"
    )
    for panel, (model, table) in zip(panels[0], tables.items(), strict=True):
        points = {row["baseline"]: (row["of eager "], row["of eager"]) for row in table}
        panel.step(*zip(*frontier(points.values()), strict=True), where="post", color="lightgrey", zorder=0)
        for color, (family, marker) in enumerate(MARKERS.items()):
            of_family = [name for name in points if results[model][name].baseline.family == family]
            if of_family:
                times, peaks = zip(*(points[name] for name in of_family), strict=True)
                panel.scatter(times, peaks, marker=marker, color=f"C{color}", label=family)
        panel.set_ylim(bottom=0)
        panel.margins(x=0.08)
        panel.set_title(model)
        panel.set_xlabel("time per step, relative to eager")
        panel.set_ylabel("peak of activations and gradients, relative to eager")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(MARKERS))
    figure.canvas.draw()
    # Labels are placed for the current layout.
    figure.set_layout_engine("none")
    for panel, (_, table) in zip(panels[0], tables.items(), strict=True):
        label(panel, [(_short(row["baseline"]), (row["of eager "], row["of eager"])) for row in table])
    figure.savefig(path, metadata={"Date": None})


def _short(name: str) -> str:
    """Returns a baseline's name without the family that its marker shows."""
    return re.sub(r"^(compile: |ort: |checkpointing, |budget )|, aot_eager$", "", name)


def conditions(arguments: argparse.Namespace) -> str:
    """Returns the conditions that the numbers depend on besides the models."""
    import platform

    import torch
    import transformers

    versions = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    ort = installed_version(("onnxruntime-training", "onnxruntime-training-cpu"))
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        device = f"CPU ({(names or [platform.machine()])[0]}), {torch.get_num_threads()} threads"
    cap = f"at most {arguments.memory_cap / 2**30:g} GiB with AdamW" if arguments.memory_cap else ""
    parts = [
        *versions,
        *([" ".join(ort)] if ort else []),
        device,
        f"{arguments.layers} layers of {arguments.hidden} units, vocabulary 8192",
        cap or f"batch {arguments.batch_size}",
        f"length {arguments.seq_len}",
        f"dropout 0.1, {'bf16 autocast' if arguments.bf16 else 'fp32'}, {arguments.steps} steps measured in a process",
    ]
    return "; ".join(parts)


def save(path: Path, about: str, results: Mapping[str, Results]) -> None:
    raw = {model: [result.to_dict() for result in found.values()] for model, found in results.items()}
    path.write_text(json.dumps({"conditions": about, "models": raw}), encoding="utf-8")


def load(path: Path, about: str) -> dict[str, Results]:
    """Load the results of earlier runs.

    Raises:
        MemOptError: the results were measured under other conditions.
    """
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["conditions"] != about:
        raise MemOptError(f"--json {path}: measured under other conditions: {data['conditions']}")
    loaded = {model: list(map(Result.from_dict, found)) for model, found in data["models"].items()}
    return {model: {result.baseline.name: result for result in found} for model, found in loaded.items()}


def size(text: str) -> int:
    """Returns the bytes of a size such as `40GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: allowed: sizes such as 40GiB and 1500MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["roberta", "deberta-v2"])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--bf16", action="store_true", help="train under autocast to bfloat16")
    parser.add_argument("--compilers", nargs="+", choices=COMPILERS, help="default: inductor on CUDA, else aot_eager")
    parser.add_argument("--every", nargs="+", type=int, default=[1, 2], help="checkpoint every n-th layer")
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--rows", type=int, default=3, help="number of single rows, largest claimed savings first")
    parser.add_argument("--only", default="", help="regular expression for names of baselines; eager always runs")
    parser.add_argument("--steps", type=int, default=1, help="measured steps per process")
    parser.add_argument("--repeats", type=int, default=1, help="processes per baseline, including those in --json")
    parser.add_argument("--memory_cap", type=size, help="such as 40GiB: find each baseline's largest batch within it")
    parser.add_argument("--batch_step", type=int, default=8, help="batches under --memory_cap are multiples of this")
    parser.add_argument(
        "--time", choices=("cpu_seconds", "step_seconds"), help="see ort_claims.py; default: by device"
    )
    parser.add_argument("--json", help="file of measurements; those in it are not repeated")
    parser.add_argument("--docs", help="folder whose frontier.md and frontier.svg are updated")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    import torch

    cuda = torch.cuda.is_available()
    arguments.compilers = arguments.compilers or ["inductor" if cuda else "aot_eager"]
    time = arguments.time or ("step_seconds" if cuda else "cpu_seconds")
    about = conditions(arguments)
    try:
        results = load(Path(arguments.json), about) if arguments.json else {}
    except MemOptError as error:
        sys.exit(f"error: {error}")

    def keep() -> None:
        if arguments.json:
            save(Path(arguments.json), about, results)

    with tempfile.TemporaryDirectory() as folder:
        run(results, arguments, folder, keep)
    is_capped = arguments.memory_cap is not None
    tables = {
        model: list(capped_lines(found) if is_capped else lines(found, time)) for model, found in results.items()
    }
    sections = {model: to_markdown(table, DECIMALS) for model, table in tables.items()}
    counts = sorted({len(result.runs) for found in results.values() for result in found.values() if result.runs})
    about += f"; processes of each baseline: {' to '.join(map(str, counts[:1] + counts[1:][-1:]))}"
    print(about)
    for model, text in sections.items():
        failed = [f"failed: {name}: {result.error}" for name, result in results[model].items() if result.error]
        print(f"\n{model}:\n\n{text}\n", *failed, sep="\n")
    if arguments.docs:
        suffix = " capped" if is_capped else ""
        sections = {f"{name}{suffix}": text for name, text in {**sections, "conditions": about}.items()}
        fill(Path(arguments.docs) / "frontier.md", sections)
        if not is_capped:
            plot(tables, results, Path(arguments.docs) / "frontier.svg")


if __name__ == "__main__":
    main()
