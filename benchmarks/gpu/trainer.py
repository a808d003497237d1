"""Trainer end to end, and DDP with one process, for the part `worth` of gpu/acceptance.py.

python benchmarks/gpu/trainer.py --backend nccl --quick      # started by `distributed`
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Works in a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from gpu.checks import ALONE, Figure, Setting, Turn, clean_up, within
from gpu.steps import BASE, TINY, Shape, adamw, batch_of, build, forward, planned

_WARM_UP = 5
# Allowed relative increase of a step's time, and relative error of losses under bf16.
_OBSERVERS, _LOSSES = 0.02, 2e-2
_RANKS_SECONDS = 220
_LAYERS = 2


class _Clock(transformers.TrainerCallback):
    """Measures the seconds of each step, including the device's work."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._begin = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self._begin = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.steps.append(time.perf_counter() - self._begin)


def _train(setting: Setting, shape: Shape, **options: Any) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step and the logged losses of a Trainer under bf16; without options a stock one."""
    import optimum_memopt

    steps = 8 if setting.quick else 50
    batch = {name: tensor.cpu() for name, tensor in batch_of(shape).items()}
    rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(shape.batch)] * steps
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            bf16=True,
            per_device_train_batch_size=max(1, shape.batch // 2),
            gradient_accumulation_steps=2,
            max_steps=steps,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = transformers.Trainer(
            model=build("roberta", shape), args=arguments, train_dataset=rows, callbacks=[clock]
        )
        if options:
            optimum_memopt.attach(trainer, memory_opt_engine="compile", memory_opt_log_level="warning", **options)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if options:
            trainer.memopt.detach()
    return clock.steps[_WARM_UP:], losses


def observers(setting: Setting) -> Iterator[Figure | Turn]:
    """Check that a Trainer with the engine has a stock Trainer's losses, and how much time all observers add."""
    shape = TINY if setting.quick else BASE
    yield ALONE
    cases: dict[str, dict[str, Any]] = {
        "stock": {},
        "level 1": {"memory_opt_level": 1},
        "level 1, all observers": {"memory_opt_level": 1, "log_input_density": True, "log_memory_phases": True},
    }
    medians, losses = {}, {}
    for name, options in cases.items():
        seconds, losses[name] = _train(setting, shape, **options)
        medians[name] = statistics.median(seconds)
        yield Figure(f"{name}, step", True, f"{medians[name] * 1000:.1f} ms", "", {"seconds": seconds})
        clean_up()
    apart = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(losses["stock"], losses["level 1"], strict=True)]
    yield within("losses", max(apart), _LOSSES, losses=losses)
    more = medians["level 1, all observers"] / medians["level 1"] - 1
    yield Figure("observers", setting.quick or more <= _OBSERVERS, f"{more:+.1%}", f"{_OBSERVERS:.0%}")


def distributed(setting: Setting) -> Iterator[Figure]:
    """Check in a separate process that DDP around the engine gives the same losses as the engine alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {
        **os.environ,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    backend = "gloo" if setting.quick else "nccl"
    command = [sys.executable, __file__, "--backend", backend, *["--quick"] * setting.quick]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_RANKS_SECONDS)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    apart = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(found["alone"], found["ddp"], strict=True)]
    yield within(f"{backend}, losses", max(apart), _LOSSES, **found)


def _rank(backend: str, quick: bool) -> None:
    """Train with and without DDP, and print the losses as JSON."""
    shape = TINY if quick else replace(BASE, layers=_LAYERS)
    if quick:
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.set_device(0)
    torch.distributed.init_process_group(backend)
    losses: dict[str, list[float]] = {}
    for name in ("alone", "ddp"):
        model = build("roberta", shape)
        engine = planned(model, compiler="aot_eager" if quick else "inductor", level=1)
        trained = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0]) if name == "ddp" else model
        optimizer = adamw(model)
        losses[name] = []
        for _ in range(4):
            loss = forward(trained, batch_of(shape), "bf16")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(float(loss.detach()))
        engine.detach()
    torch.distributed.destroy_process_group()
    print(json.dumps(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    _rank(asked.backend, asked.quick)
