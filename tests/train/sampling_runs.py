"""Runs that sample by complexity; as a script, runs on two ranks.

    sampling_runs.py FOLDER

Writes `RANK.json` to FOLDER: by case a rank's batches, those after resuming from a checkpoint, and its log lines.
"""

import json
import math
import os
import sys
from pathlib import Path

import torch

from tests.fresh_process import fork_ranks
from tests.trackers import tracked
from tests.trainer_runs import collate, log_lines, make, rows

NAME = "small"
CASES = {
    "fill": {},
    "drop-last": {"dataloader_drop_last": True, "gradient_accumulation_steps": 2},
    "split-batches": {"accelerator_config": {"split_batches": True}},
}


def recorded_run(folder, resume=None, **changes):
    """Train two epochs over 45 rows of lengths 5 to 9; returns the Trainer, this rank's batches and the log lines."""
    data = rows(NAME, 45)
    places = {id(row["input_ids"]): index for index, row in enumerate(data)}
    batches = []

    def record(examples):
        batches.append([places[id(example["input_ids"])] for example in examples])
        return collate(examples)

    # The checkpoint is in the middle of the second epoch.
    saving = {"save_strategy": "no"} if resume else {"save_strategy": "steps", "save_steps": 0.75}
    arguments = {"max_steps": -1, "num_train_epochs": 2, "seed": 3, **saving, **changes}
    with log_lines() as lines:
        trainer = make(folder, NAME, train_dataset=data, data_collator=record, group_by_complexity=True, **arguments)
        tracked(trainer).train(resume_from_checkpoint=resume)
    return trainer, batches, lines


def main(folder):
    found = {}
    for case, changes in CASES.items():
        whole, batches, lines = recorded_run(folder / case, **changes)
        step = math.ceil(0.75 * whole.state.global_step)
        whole.accelerator.wait_for_everyone()
        _, rest, _ = recorded_run(folder / case, str(folder / case / f"checkpoint-{step}"), **changes)
        found[case] = {"batches": batches, "rest": rest, "lines": lines}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(2)
    main(Path(sys.argv[1]))
