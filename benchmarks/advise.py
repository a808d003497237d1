"""The advisor against an exhaustive sweep of real runs on the CPU: the recommended plan and micro-batch, and the best
of all that stay within the budget.

    python benchmarks/advise.py --out /tmp/advise [--models gpt2 …] [--docs docs]

Every plan runs with every micro-batch in a process of its own; seconds are the processor's, with one thread.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared import fill, to_markdown

ROWS, LENGTH = 16, 64
# Of the way from the lowest peak to that of all rows at once without a plan.
SHARES = (0.3, 0.8)
NO_PLAN, LEVEL_1, BUDGET = "no plan", "level 1", "budget"
_STEPS = 4
# Of a line that a worker prints for the benchmark.
_MARK = "json:"
_LANGUAGE = ("bert-mlm", "gpt2", "llama")
MODELS = ("roberta", "deberta-v2", *_LANGUAGE)
_TASKS = {"bert-mlm": "fill-mask", "gpt2": "text-generation", "llama": "text-generation"}


@dataclass(frozen=True)
class Ran:
    """Real steps of a plan.

    Attributes:
        rows: of a micro-batch.
        peak: resident, bytes.
        seconds: of an optimizer step, the processor's.
    """

    plan: str
    chunked: bool
    rows: int
    peak: int
    seconds: float

    @property
    def samples(self) -> float:
        """A second."""
        return ROWS / self.seconds


def config(name: str) -> Any:
    """Two layers of 192."""
    import transformers
    from shared import make_config

    if name in ("roberta", "deberta-v2", "gpt2"):
        return make_config(name, 192, 2)
    if name == "bert-mlm":
        return transformers.BertConfig(
            vocab_size=8192, hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=768
        )
    return transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        intermediate_size=512,
    )


def workload(folder: Path, name: str) -> Any:
    """The model of a name, saved in a folder."""
    from optimum_memopt.measure.workload import Workload

    path = folder / name
    if not path.exists():
        config(name).save_pretrained(path)
    return Workload(str(path), _TASKS.get(name, "text-classification"), ROWS, LENGTH)


# Worker processes, which print JSON.


def print_advice(folder: Path, name: str) -> None:
    """The advice within each budget."""
    from optimum_memopt.advise.advice import advise
    from optimum_memopt.advise.text import to_dict
    from optimum_memopt.engines.compile.steps.build import of_workload
    from optimum_memopt.sizes import parse_budget

    free = of_workload(workload(folder, name), parse_budget("auto"))
    plans = {plan.name: plan for plan in free.plans if not plan.chunks_loss}
    low, high = free.lowest(plans[BUDGET], True), free.step(plans[NO_PLAN], ROWS, False).peak
    for share in SHARES:
        # As the flag has it.
        budget = int(low + share * (high - low)) // 2**20 * 2**20
        predictor = free.within(budget)
        print(_MARK, json.dumps(to_dict(advise(predictor, ROWS), predictor)), flush=True)


def print_runs(folder: Path, name: str, plan: str, chunked: bool, budget: str | None, sizes: Sequence[int]) -> None:
    """Steps with each micro-batch, the smallest first; stops where one does not fit."""
    import torch

    import optimum_memopt
    from optimum_memopt.errors import DoesNotFitError
    from optimum_memopt.memory.peak_monitor import PeakMonitor

    model, batch = workload(folder, name).build()
    options = {"memory_opt_budget": budget} if plan == BUDGET else {"memory_opt_level": int(plan == LEVEL_1)}
    loss = "chunked" if chunked else "plain"
    engine = None
    for rows in sizes:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if engine is None or plan == BUDGET:
            if engine is not None:
                engine.detach()
            engine = optimum_memopt.optimize(
                model,
                memory_opt_engine="compile",
                memory_opt_compiler="aot_eager",
                memory_opt_loss=loss,
                memory_opt_log_level="warning",
                **options,
            )
            engine.outputs_read_by = lambda: ""
        micro_batches = [
            {key: value[start : start + rows] for key, value in batch.items()} for start in range(0, ROWS, rows)
        ]
        monitor = PeakMonitor(torch.device("cpu"))
        seconds = []
        try:
            for step in range(_STEPS):
                if step == 1:
                    monitor.start_run()
                begin = time.process_time()
                _step(model, optimizer, micro_batches)
                seconds.append(time.process_time() - begin)
        except DoesNotFitError:
            break
        found = Ran(plan, chunked, rows, int(monitor.run_peak * 2**20), min(seconds[1:]))
        print(_MARK, json.dumps(asdict(found)), flush=True)
        del optimizer


def _step(model: Any, optimizer: Any, micro_batches: list[dict[str, Any]]) -> None:
    """As Trainer has it."""
    import torch

    for micro_batch in micro_batches:
        (model(**micro_batch).loss / len(micro_batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


# The benchmark.


def ask(folder: Path, *arguments: str) -> list[Any]:
    """What a worker prints, a JSON document a line."""
    command = [sys.executable, __file__, "--out", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line[len(_MARK) :]) for line in found.stdout.splitlines() if line.startswith(_MARK)]


def sweep(folder: Path, name: str, budget: int, chosen: int) -> Iterator[Ran]:
    """Every plan with every micro-batch; that of the budget where a step does not fit without, and as it was chosen.

    Args:
        folder: what is found there is not run again.
        name: of the model.
        budget: bytes.
        chosen: rows of the recommended micro-batch.
    """
    sizes = [size for size in range(1, ROWS + 1) if ROWS % size == 0]
    for chunked in (False, True) if name in _LANGUAGE else (False,):
        free = _runs(folder, name, NO_PLAN, chunked, sizes)
        yield from free
        yield from _runs(folder, name, LEVEL_1, chunked, sizes)
        tight = sorted({chosen, *(ran.rows for ran in free if ran.peak > budget)})
        yield from _runs(folder, name, BUDGET, chunked, tight, f"{budget // 2**20}MiB")


def _runs(
    folder: Path, name: str, plan: str, chunked: bool, sizes: Sequence[int], budget: str | None = None
) -> list[Ran]:
    file = folder / f"{name} {plan} {chunked} {budget or ''}.json"
    if not file.exists():
        arguments = ["--run", name, plan, str(int(chunked)), "--rows", *map(str, sizes)]
        file.write_text(json.dumps(ask(folder, *arguments, *(["--budget", budget] if budget else []))))
    return [Ran(**ran) for ran in json.loads(file.read_text())]


def compare(folder: Path, name: str, advice: dict[str, Any]) -> dict[str, Any]:
    """A row of the page."""
    limit, chosen = advice["budget"], advice["recommended"]
    ran = list(sweep(folder, name, limit, chosen["rows"]))
    best = max((one for one in ran if one.peak <= limit), key=lambda one: one.samples)
    key = chosen["plan"], chosen["chunked_loss"], chosen["rows"]
    ours = next(one for one in ran if (one.plan, one.chunked, one.rows) == key)
    return {
        "model": name,
        "budget MiB": limit / 2**20,
        "recommended": _named(*key),
        "samples/s predicted": chosen["samples_per_second"],
        "samples/s": ours.samples,
        "peak MiB predicted": chosen["peak"] / 2**20,
        "peak MiB": ours.peak / 2**20,
        "best of the sweep": _named(best.plan, best.chunked, best.rows),
        "its samples/s": best.samples,
        "of the best": ours.samples / best.samples,
    }


def _named(plan: str, chunked: bool, rows: int) -> str:
    return f"{plan}{', chunked loss' if chunked else ''}, {rows} rows"


def page(rows: list[dict[str, Any]]) -> str:
    """The table, and a sentence that sums it up."""
    decimals = {"samples/s predicted": 1, "samples/s": 1, "its samples/s": 1, "of the best": 3}
    kept = [row for row in rows if row["peak MiB"] <= row["budget MiB"]]
    over = len(rows) - len(kept)
    within = sum(row["of the best"] >= 0.97 for row in kept)
    worst = min(row["of the best"] for row in rows)
    return (
        f"{to_markdown(rows, decimals)}\n\nWithin 3% of the best in {within} of {len(rows)} cases, worst "
        f"{worst:.3f}; over the budget in {over}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder for what was found; what is there is kept.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--docs", type=Path, help="Folder of advise.md, to fill in the table.")
    parser.add_argument("--budget", help=argparse.SUPPRESS)
    parser.add_argument("--advise", help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="+", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.advise:
        return print_advice(args.out, args.advise)
    if args.run:
        name, plan, chunked = args.run
        return print_runs(args.out, name, plan, bool(int(chunked)), args.budget, args.rows)
    rows = []
    for name in args.models:
        file = args.out / f"{name} advice.json"
        if not file.exists():
            file.write_text(json.dumps(ask(args.out, "--advise", name)))
        for advice in json.loads(file.read_text()):
            rows.append(compare(args.out, name, advice))
            print(json.dumps(rows[-1]), flush=True)
    (args.out / "page.md").write_text(page(rows))
    if args.docs:
        fill(args.docs / "advise.md", {"advise": page(rows)})


if __name__ == "__main__":
    main()
