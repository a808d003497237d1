"""The advisor against an exhaustive sweep of real runs on the CPU: compares the recommended plan and micro-batch with
the best of all that stay within the budget.

    python benchmarks/advise.py --out /tmp/advise [--models gpt2 …] [--docs docs]

No plan and level 1 run with every micro-batch size; a budget runs with the recommended size, half of it and twice as
much. The recommended run and the fastest of the others then take turns in one process, one step each. Seconds are CPU
seconds, with one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared import fill, to_markdown

ROWS, LENGTH = 16, 128
# Positions of the budgets between the lowest peak (0) and the peak of all rows at once without a plan (1).
SHARES = (0.2, 0.4, 0.6, 0.8)
NO_PLAN, LEVEL_1, BUDGET = "no plan", "level 1", "budget"
_STEPS = 3
# How many of the sweep's fastest runs race against the recommended one, and over how many rounds.
_RIVALS, _ROUNDS = 2, 9
# Prefix of the lines that a worker prints for the benchmark.
_MARK = "json:"
_WIDTH, _LAYERS, _HEADS = 256, 3, 4
_LANGUAGE = ("bert-mlm", "gpt2", "llama")
MODELS = ("roberta", "deberta-v2", *_LANGUAGE)
_TASKS = {"bert-mlm": "fill-mask", "gpt2": "text-generation", "llama": "text-generation"}


@dataclass(frozen=True)
class Ran:
    """Real steps of a plan.

    Attributes:
        rows: rows of a micro-batch.
        peak: peak resident memory, in bytes.
        seconds: CPU seconds of an optimizer step.
    """

    plan: str
    chunked: bool
    rows: int
    peak: int
    seconds: float

    @property
    def runner(self) -> "Runner":
        return self.plan, self.chunked, self.rows


def config(name: str) -> Any:
    """Returns a config with three layers of width 256."""
    import transformers
    from shared import make_config

    if name in ("roberta", "deberta-v2", "gpt2"):
        return make_config(name, _WIDTH, _LAYERS)
    if name == "bert-mlm":
        return transformers.BertConfig(
            vocab_size=8192,
            hidden_size=_WIDTH,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            intermediate_size=4 * _WIDTH,
        )
    return transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        intermediate_size=8 * _WIDTH // 3,
    )


def workload(folder: Path, name: str) -> Any:
    """Returns the workload of a model, whose config is saved in the folder."""
    from optimum_memopt.predict.workload import Workload

    path = folder / name
    if not path.exists():
        config(name).save_pretrained(path)
    return Workload(str(path), _TASKS.get(name, "text-classification"), ROWS, LENGTH)


# A plan, whether its loss is chunked, and the rows of a micro-batch.
Runner = tuple[str, bool, int]

# Worker processes; they print JSON.


def print_advice(folder: Path, name: str) -> None:
    """Print the advice for each budget."""
    from optimum_memopt.engines.compile.predict.micro_batches import of_workload
    from optimum_memopt.predict.advise import advise, to_dict
    from optimum_memopt.sizes import parse_budget
    from optimum_memopt.step_settings import StepSpec

    free = of_workload(workload(folder, name), parse_budget("auto"), StepSpec())
    plans = {plan.name: plan for plan in free.plans if not plan.chunks_loss}
    low, high = free.lowest(plans[BUDGET], 2), free.step(plans[NO_PLAN], ROWS, 1).peak
    for share in SHARES:
        # A whole number of MiB, as in the flag.
        budget = int(low + share * (high - low)) // 2**20 * 2**20
        predictor = free.within(budget)
        print(_MARK, json.dumps(to_dict(advise(predictor, ROWS), predictor)), flush=True)


def print_runs(folder: Path, name: str, plan: str, chunked: bool, budget: str | None, sizes: Sequence[int]) -> None:
    """Print the measured steps of each micro-batch size, smallest first; nothing if no plan fits the budget."""
    import torch

    from optimum_memopt.errors import DoesNotFitError
    from optimum_memopt.memory.peak_monitor import PeakMonitor

    training = _Training(folder, name, chunked, **_options(folder, name, (plan, chunked, sizes[0]), budget))
    for rows in sizes:
        monitor = PeakMonitor(torch.device("cpu"))
        seconds = []
        try:
            for step in range(_STEPS):
                if step == 1:
                    monitor.start_run()
                seconds.append(training.step(rows))
        except DoesNotFitError:
            return
        found = Ran(plan, chunked, rows, int(monitor.run_peak * 2**20), min(seconds[1:]))
        print(_MARK, json.dumps(asdict(found)), flush=True)
        if plan == BUDGET:
            training.engine.plan_file().save(_plan_path(folder, name, found.runner, budget))
        training.forget()


def print_race(folder: Path, name: str, budget: str, runners: Sequence[Runner]) -> None:
    """Print the seconds of each runner's step, round by round; the first round is a warm-up and is not printed."""
    trainings = [
        _Training(folder, name, runner[1], **_options(folder, name, runner, budget, is_saved=True))
        for runner in runners
    ]
    for number in range(_ROUNDS + 1):
        seconds = [training.step(rows) for training, (_, _, rows) in zip(trainings, runners, strict=True)]
        if number:
            print(_MARK, json.dumps(seconds), flush=True)


def _options(
    folder: Path, name: str, runner: Runner, budget: str | None, is_saved: bool = False
) -> dict[str, str | int]:
    """Returns the arguments of `optimize`.

    Args:
        folder: where plans are saved.
        name: name of the model.
        runner: what trains.
        budget: only for a process with a single model.
        is_saved: load the plan that such a process saved, instead of solving for the budget.
    """
    plan, _, _ = runner
    if plan != BUDGET:
        return {"memory_opt_level": int(plan == LEVEL_1)}
    if is_saved:
        return {"memory_opt_plan": str(_plan_path(folder, name, runner, budget))}
    return {"memory_opt_budget": budget}


def _plan_path(folder: Path, name: str, runner: Runner, budget: str | None) -> Path:
    _, chunked, rows = runner
    return folder / f"{name} {chunked} {budget} {rows}.plan.json"


class _Training:
    """A model that the compile engine trains."""

    def __init__(self, folder: Path, name: str, chunked: bool, **options: Any) -> None:

        import optimum_memopt

        self._model, self._batch = workload(folder, name).build()
        self.forget()
        self.engine = optimum_memopt.optimize(
            self._model,
            memory_opt_engine="compile",
            memory_opt_compiler="aot_eager",
            memory_opt_loss="chunked" if chunked else "plain",
            memory_opt_log_level="warning",
            **options,
        )
        self.engine.outputs_read_by = lambda: ""

    def forget(self) -> None:
        """Start over with an optimizer that has no state."""
        import torch

        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)

    def step(self, rows: int) -> float:
        """Run an optimizer step as Trainer does, and return its CPU seconds."""
        import torch

        batch = self._batch
        begin = time.process_time()
        for start in range(0, ROWS, rows):
            micro_batch = {key: value[start : start + rows] for key, value in batch.items()}
            (self._model(**micro_batch).loss * rows / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.process_time() - begin


# The benchmark.


def ask(folder: Path, *arguments: str) -> list[Any]:
    """Run a worker, and return the JSON documents that it prints, one per line."""
    command = [sys.executable, __file__, "--out", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPTIMUM_MEMOPT_CACHE": str(folder / "cache")}
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line[len(_MARK) :]) for line in found.stdout.splitlines() if line.startswith(_MARK)]


def sweep(folder: Path, name: str, budget: int, chosen: int) -> Iterator[Ran]:
    """Yields real steps of each plan.

    The budget's plan runs with the recommended micro-batch, and with half and twice its rows if these exceed the
    budget without a plan.

    Args:
        folder: holds earlier results, which are not measured again.
        name: name of the model.
        budget: the budget, in bytes.
        chosen: rows of the recommended micro-batch.
    """
    sizes = [size for size in range(1, ROWS + 1) if ROWS % size == 0]
    for chunked in (False, True) if name in _LANGUAGE else (False,):
        free = _runs(folder, name, NO_PLAN, chunked, sizes)
        yield from free
        yield from _runs(folder, name, LEVEL_1, chunked, sizes)
        tight = {ran.rows for ran in free if ran.peak > budget} & {chosen // 2, 2 * chosen}
        for rows in sorted({chosen, *tight}):
            yield from _runs(folder, name, BUDGET, chunked, [rows], f"{budget // 2**20}MiB")


def _runs(
    folder: Path, name: str, plan: str, chunked: bool, sizes: Sequence[int], budget: str | None = None
) -> list[Ran]:
    which = "".join(f" {one}" for one in (budget, sizes[0] if len(sizes) == 1 else None) if one is not None)
    file = folder / f"{name} {plan} {chunked}{which}.json"
    if not file.exists():
        arguments = ["--run", name, plan, str(int(chunked)), "--rows", *map(str, sizes)]
        file.write_text(json.dumps(ask(folder, *arguments, *(["--budget", budget] if budget else []))))
    return [Ran(**ran) for ran in json.loads(file.read_text())]


def compare(folder: Path, name: str, advice: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the page's table."""
    limit, chosen = advice["budget"], advice["recommended"]
    ran = list(sweep(folder, name, limit, chosen["rows"]))
    key = chosen["plan"], chosen["chunked_loss"], chosen["rows"]
    row = {
        "model": name,
        "budget MiB": limit / 2**20,
        "recommended": _named(*key),
        "samples/s predicted": chosen["samples_per_second"],
        "peak MiB predicted": chosen["peak"] / 2**20,
    }
    # Measured alone in its process, as it would train: a process that has run other batches holds more.
    ours = _runs(folder, name, *key[:2], [key[2]], f"{limit // 2**20}MiB" if key[0] == BUDGET else None)
    if not ours:
        # The training process holds more than the one that advised, so the budget was refused.
        return {**row, "peak MiB": 0.0, "samples/s": 0.0, "best other": "", "of its speed": 0.0}
    fitting = [one for one in ran if one.peak <= limit and one.runner != key]
    rivals = sorted(fitting, key=lambda one: one.seconds)[:_RIVALS]
    rounds = race(folder, name, limit, [key, *(one.runner for one in rivals)])
    # Median ratio of our speed to each rival's, round by round.
    shares = [statistics.median(theirs / own for own, theirs in pairs) for pairs in _pairs(rounds)]
    best = min(range(len(rivals)), key=lambda number: shares[number], default=None)
    return {
        **row,
        "peak MiB": ours[0].peak / 2**20,
        "samples/s": ROWS / statistics.median(own for own, *_ in rounds),
        "best other": "" if best is None else _named(*rivals[best].runner),
        "of its speed": 1.0 if best is None else shares[best],
    }


def _pairs(rounds: Sequence[Sequence[float]]) -> list[list[tuple[float, float]]]:
    """Returns for each runner but the first its pairs (seconds of the first runner, its own), round by round."""
    return [[(row[0], row[other]) for row in rounds] for other in range(1, len(rounds[0]))]


def race(folder: Path, name: str, limit: int, runners: Sequence[Runner]) -> list[list[float]]:
    """Returns the seconds of the runners' interleaved steps, one list per round."""
    file = folder / f"{name} race {limit}.json"
    if not file.exists():
        budget = f"{limit // 2**20}MiB"
        file.write_text(json.dumps(ask(folder, "--race", name, json.dumps(runners), "--budget", budget)))
    found: list[list[float]] = json.loads(file.read_text())
    return found


def _named(plan: str, chunked: bool, rows: int) -> str:
    return f"{plan}{', chunked loss' if chunked else ''}, {rows} rows"


def page(rows: list[dict[str, Any]]) -> str:
    """Returns the table and a sentence that sums it up."""
    decimals = {"samples/s predicted": 1, "samples/s": 1, "of its speed": 3}
    kept = [row for row in rows if row["peak MiB"] <= row["budget MiB"]]
    over = len(rows) - len(kept)
    within = sum(row["of its speed"] >= 0.97 for row in kept)
    worst = min(row["of its speed"] for row in rows)
    return (
        f"{to_markdown(rows, decimals)}\n\nAt least 97% of the best other's speed in {within} of {len(rows)} cases, "
        f"worst {worst:.3f}; over the budget in {over}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder for the results; existing ones are kept.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--docs", type=Path, help="Folder of advise.md, to fill in the table.")
    parser.add_argument("--budget", help=argparse.SUPPRESS)
    parser.add_argument("--advise", help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="+", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--race", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.advise:
        return print_advice(args.out, args.advise)
    if args.race:
        name, runners = args.race
        return print_race(args.out, name, args.budget, json.loads(runners))
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
