"""Host time of a training step: CPU milliseconds of what launches a step's kernels, by the way to train.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --models llama --layers 12 --json host_time.json

On the stand-in for a device (`make test-cuda` builds it) kernels do nothing, so that the host's share is all there is;
on a GPU the processors' time is taken, in which nothing waits. Each way runs in a process of its own, with
one thread; the median of later steps, and its ratio to `torch.compile` of the whole model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shared import fill, to_markdown

MODELS = ("roberta", "llama")
EAGER, STOCK, BY_HAND = "plain PyTorch", "torch.compile", "torch.compile of each layer"
ENGINE = {
    "engine, unit model": {"memory_opt_unit": "model"},
    "engine, unit layer": {"memory_opt_unit": "layer"},
    "engine, unit model, level 1": {"memory_opt_unit": "model", "memory_opt_level": 1},
    "engine, unit layer, level 1": {"memory_opt_unit": "layer", "memory_opt_level": 1},
}
WAYS = (EAGER, STOCK, BY_HAND, *ENGINE)
WARM, STEPS = 5, 15


def prepare(model: Any, way: str) -> None:
    import torch

    import optimum_memopt

    if way in ENGINE:
        options = {"memory_opt_engine": "compile", "memory_opt_compiler": "inductor", "memory_opt_loss": "plain"}
        optimum_memopt.optimize(model, **options, **ENGINE[way])
    elif way == STOCK:
        model.forward = torch.compile(model.forward, dynamic=True)
    elif way == BY_HAND:
        for layers in (module for module in model.modules() if isinstance(module, torch.nn.ModuleList)):
            for layer in layers:
                layer.forward = torch.compile(layer.forward, dynamic=True)


def worker(name: str, way: str, layers: int, hidden: int, profile: Path | None) -> dict[str, float]:
    import torch
    from gpu.steps import Shape, batch_of, build, forward

    torch.set_num_threads(1)
    # It asks the device for more than the stand-in knows.
    torch.backends.cuda.enable_cudnn_sdp(False)
    shape = Shape(layers, hidden, hidden // 64, 4 * hidden, vocabulary=8192, batch=8, length=128)
    model, batch = build(name, shape), batch_of(shape)
    # Where nothing is padding a loop needs no mask, which plain PyTorch would wait for.
    del batch["attention_mask"]
    prepare(model, way)
    parameters = list(model.parameters())

    def step() -> tuple[float, float]:
        """Seconds of the forward and of both; the backward has a thread of its own."""
        began = time.process_time()
        loss = forward(model, batch, "bf16")
        middle = time.process_time()
        loss.backward()
        end = time.process_time()
        for parameter in parameters:
            parameter.grad = None
        return middle - began, end - began

    for _ in range(WARM):
        step()
    if profile is not None:
        import cProfile

        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(STEPS):
            step()
        profiler.disable()
        profiler.dump_stats(profile)
        return {}
    forwards, steps = zip(*(step() for _ in range(STEPS)), strict=True)
    return {"forward": 1000 * statistics.median(forwards), "step": 1000 * statistics.median(steps)}


def measure(name: str, way: str, asked: argparse.Namespace) -> dict[str, float]:
    words = ["--worker", name, way, "--layers", str(asked.layers), "--hidden", str(asked.hidden)]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--docs", type=Path, help="write the table into the page gpu.md of this folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="of the worker, by cProfile")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(worker(*asked.worker, asked.layers, asked.hidden, asked.profile)))
        return
    rows = []
    for name in asked.models:
        found = {way: measure(name, way, asked) for way in asked.ways}
        for way, of_way in found.items():
            ratio = {"of torch.compile": of_way["step"] / found[STOCK]["step"]} if STOCK in found else {}
            rows.append({"model": name, "way": way, **of_way, **ratio})
            print(rows[-1], flush=True)
    table = to_markdown(rows, {"step": 1, "forward": 1, "of torch.compile": 2})
    print(table)
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows))
    if asked.docs is not None:
        fill(asked.docs / "gpu.md", {"host time": table})


if __name__ == "__main__":
    main()
