"""CPU seconds of a run's first training step, and milliseconds of later ones, by the number of layers.

    python benchmarks/first_step.py --docs docs
    python benchmarks/first_step.py --compiler inductor --layers 12 --json first_step.json
    python benchmarks/first_step.py --compiler inductor --layers 12 --hidden 256 --second_start --docs docs

Each way to train runs in a process of its own, with one thread: no engine; this engine with the whole forward as one
graph, with equal layers compiled once (`--memory_opt_unit`), and the latter also under a budget; stock `torch.compile`
of the model with symbolic sizes; and `torch.compile` of each layer, as accelerate's `compile_regions` does. Caches are
off; with `--second_start` a second process reads the caches that a first one with the same arguments filled. The first
step's seconds exclude a step of plain PyTorch and include the C++ compilers that it starts; later steps are the
median.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared import fill, sizes, to_markdown

MODELS = ("roberta", "llama")
LAYERS = (4, 12, 24, 48)
NO_ENGINE, MODEL, LAYER = "no engine", "engine, unit model", "engine, unit layer"
BUDGET = "engine, budget, unit layer"
STOCK, BY_HAND = "torch.compile", "torch.compile of each layer"
WAYS = (NO_ENGINE, MODEL, LAYER, BUDGET, STOCK, BY_HAND)
STEPS = 15


def build(name: str, layers: int, hidden: int) -> Any:
    import transformers

    shape = sizes(hidden, layers)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, use_cache=False)).train()
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**shape, **still)).train()


def attach(model: Any, way: str, compiler: str, level: int) -> None:
    import torch

    if way in (MODEL, LAYER, BUDGET):
        import optimum_memopt

        plan = {"memory_opt_budget": "64GiB"} if way == BUDGET else {"memory_opt_level": level}
        optimum_memopt.optimize(
            model,
            memory_opt_engine="compile",
            memory_opt_compiler=compiler,
            memory_opt_loss="plain",
            memory_opt_unit=way.split()[-1],
            **plan,
        )
    elif way == STOCK:
        model.forward = torch.compile(model.forward, backend=compiler, dynamic=True)
    elif way == BY_HAND:
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        for layer in layers:
            layer.compile(backend=compiler, dynamic=True)


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its child processes that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def measured(way: str, name: str, layers: int, hidden: int, compiler: str, level: int) -> dict[str, float]:
    """Measure the CPU seconds of a way's first and later steps in this process."""
    import torch

    torch.manual_seed(0)
    model = build(name, layers, hidden)

    def step(rows: int = 2, length: int = 32) -> float:
        ids = torch.randint(5, 8192, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, length * 3 // 4 :] = 0
        model.zero_grad()
        began = cpu_seconds()
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        return cpu_seconds() - began

    step()
    plain = step()
    attach(model, way, compiler, level)
    first = step()
    return {
        "first": first - plain if way != NO_ENGINE else 0.0,
        "another size": step(3, 39),
        "later": statistics.median(step() for _ in range(STEPS)),
    }


def in_process(arguments: argparse.Namespace, way: str, name: str, layers: int) -> dict[str, float]:
    case = [way, name, layers, arguments.hidden, arguments.compiler, arguments.level]
    with tempfile.TemporaryDirectory() as folder:
        # One compile thread: CPU time of worker processes is not counted before they end.
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "OPTIMUM_MEMOPT_CACHE": folder,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        if not arguments.second_start:
            caches["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **caches}
        found = started(case, environment)
        if arguments.second_start:
            found["second"] = started(case, environment)["first"]
    return found


def started(case: list[Any], environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in arguments.models:
        for layers in arguments.layers:
            of_ways = {way: in_process(arguments, way, name, layers) for way in arguments.ways}
            for way, seconds in of_ways.items():
                row = {
                    "model": name,
                    "layers": layers,
                    "way": way,
                    "first step, s": seconds["first"],
                    **({"of unit model": seconds["first"] / of_ways[MODEL]["first"]} if MODEL in of_ways else {}),
                    "another size, s": seconds["another size"],
                    "later steps, ms": 1e3 * seconds["later"],
                }
                if "second" in seconds:
                    ratio = seconds["second"] / seconds["first"] if seconds["first"] else 0.0
                    row |= {"second start, s": seconds["second"], "of the first": ratio}
                found.append(row)
                print(json.dumps(row), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--layers", nargs="+", type=int, default=LAYERS)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--level", type=int, default=1, help="level of the engine's plan")
    parser.add_argument("--compiler", default="aot_eager", choices=("aot_eager", "inductor"))
    parser.add_argument("--second_start", action="store_true", help="start twice, the second time with caches")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--docs", type=Path, help="folder of compile.md, to fill in its table")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measured(*json.loads(arguments.case))))
        return
    found = rows(arguments)
    decimals = {"first step, s": 1, "of unit model": 2, "another size, s": 2, "second start, s": 1, "of the first": 2}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    table = to_markdown(found, decimals)
    print(table)
    if arguments.docs:
        name = "second start" if arguments.second_start else "first step"
        fill(arguments.docs / "compile.md", {f"{name} {arguments.compiler}": table})


if __name__ == "__main__":
    main()
