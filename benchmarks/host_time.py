"""Host time of a training step: CPU milliseconds spent on launching a step's kernels, by the way to train.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --models llama --layers 12 --level 1 --json host_time.json

On the stand-in for a device (built by `make test-cuda`) kernels do nothing, so only the host's share remains. Each way
of first_step.py runs in a process of its own, with one thread. Shown are the median of later steps and its ratio to
`torch.compile` of the whole model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from first_step import MODELS, STEPS, STOCK, WAYS, attach
from shared import to_markdown

WARM = 5


def worker(name: str, way: str, layers: int, hidden: int, level: int) -> dict[str, float]:
    """Returns the CPU milliseconds of a forward and of a step."""
    import torch
    from gpu.steps import Shape, batch_of, build, forward

    torch.set_num_threads(1)
    # cuDNN's attention needs device queries that the stand-in does not implement.
    torch.backends.cuda.enable_cudnn_sdp(False)
    shape = Shape(layers, hidden, hidden // 64, 4 * hidden, vocabulary=8192, batch=8, length=128)
    model, batch = build(name, shape), batch_of(shape)
    # Without padding no mask is needed; plain PyTorch would synchronize with the device on it.
    del batch["attention_mask"]
    attach(model, way, "inductor", level)
    parameters = list(model.parameters())

    def step() -> tuple[float, float]:
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
    forwards, steps = zip(*(step() for _ in range(STEPS)), strict=True)
    return {"forward": 1000 * statistics.median(forwards), "step": 1000 * statistics.median(steps)}


def measure(name: str, way: str, asked: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", json.dumps([name, way, asked.layers, asked.hidden, asked.level])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--level", type=int, default=0, help="level of the engine's plan")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(worker(*json.loads(asked.case))))
        return
    rows = []
    for name in asked.models:
        found = {way: measure(name, way, asked) for way in asked.ways}
        for way, of_way in found.items():
            ratio = {"of torch.compile": of_way["step"] / found[STOCK]["step"]} if STOCK in found else {}
            rows.append({"model": name, "way": way, **of_way, **ratio})
    print(to_markdown(rows, {"step": 1, "forward": 1, "of torch.compile": 2}))
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
