"""CPU time that the observing callbacks add to a training step, with and without log lines.

    python benchmarks/observers.py
    python benchmarks/observers.py --cases "both, shown" --steps 1000

Each case trains the same tiny RoBERTa with a Trainer of its own, in a thread of this process. The threads take turns,
one step each, so that other load on the machine affects all of them. A step runs from one `on_step_begin` to the next
and is measured in CPU time of its thread. The overhead of a case is the median difference to the step without
observers in the same round.
"""

import argparse
import concurrent.futures
import contextlib
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from transformers import RobertaConfig, RobertaForMaskedLM, Trainer, TrainerCallback, TrainingArguments

from optimum_memopt import InputDensityCallback, MemoryPhasesCallback

WARM_UP = 5
NEVER = 10**9  # shows only step 0, which is a warm-up step
# By name: callbacks, `log_steps`, whether results are also written to a file, and trackers.
CASES = {
    "none": ((), NEVER, False, "none"),
    "density, not shown": ((InputDensityCallback,), NEVER, False, "none"),
    "phases, not shown": ((MemoryPhasesCallback,), NEVER, False, "none"),
    "both, not shown": ((InputDensityCallback, MemoryPhasesCallback), NEVER, False, "none"),
    "both, shown": ((InputDensityCallback, MemoryPhasesCallback), 1, False, "none"),
    "both, shown, log file": ((InputDensityCallback, MemoryPhasesCallback), 1, True, "none"),
    "both, shown, log file, TensorBoard": ((InputDensityCallback, MemoryPhasesCallback), 1, True, "tensorboard"),
}


class Turn(TrainerCallback):
    """Makes several Trainers take turns, one step each.

    Attributes:
        steps: CPU milliseconds of each step.
    """

    def __init__(self) -> None:
        self.mine = threading.Semaphore(0)
        self.following = self
        self.steps: list[float] = []
        self._began: float | None = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._began is not None:
            self.steps.append(1000 * (time.thread_time() - self._began))
            self.following.mine.release()
        self.mine.acquire()
        self._began = time.thread_time()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.following.mine.release()


def make_trainer(case: str, turn: Turn, steps: int, folder: str) -> Trainer:
    kinds, log_steps, writes, trackers = CASES[case]
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
    )
    rows = torch.randint(3, 50, (64, 32))
    path = Path(folder, "observed.jsonl") if writes else None
    return Trainer(
        model=RobertaForMaskedLM(config),
        args=TrainingArguments(
            folder,
            use_cpu=True,
            report_to=trackers,
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=NEVER,
            per_device_train_batch_size=8,
            max_steps=WARM_UP + steps + 1,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[turn, *(kind(log_steps, path) for kind in kinds)],
    )


def measure(cases: list[str], steps: int, folder: str) -> dict[str, list[float]]:
    """Returns the CPU milliseconds of each case's steps after the warm-up."""
    turns = [Turn() for _ in cases]
    for turn, following in zip(turns, [*turns[1:], turns[0]], strict=True):
        turn.following = following
    trainers = [make_trainer(case, turn, steps, folder) for case, turn in zip(cases, turns, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(len(trainers)) as pool:
        runs = [pool.submit(trainer.train) for trainer in trainers]
        turns[0].mine.release()
        for run in runs:
            run.result()
    return {case: turn.steps[WARM_UP:] for case, turn in zip(cases, turns, strict=True)}


def main() -> None:
    """Measure all cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=300, help="steps of each case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = list(dict.fromkeys(["none", *arguments.cases]))
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as null, contextlib.redirect_stderr(null):
        os.environ["TENSORBOARD_LOGGING_DIR"] = folder
        measured = measure(cases, arguments.steps, folder)
    rows = []
    for case in cases:
        more = [step - none for step, none in zip(measured[case], measured["none"], strict=True)]
        low, median, high = statistics.quantiles(more, n=4)
        rows.append(
            {
                "observers": case,
                "CPU ms/step": f"{statistics.median(measured[case]):.2f}",
                "more than none": f"{median:.2f}",
                "quartiles": f"{low:.2f} to {high:.2f}",
            }
        )
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
