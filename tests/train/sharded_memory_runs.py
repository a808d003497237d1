"""Steps under FSDP2 on two gloo ranks: `sharded_memory_runs.py FOUND.json NAME…`, with `test_sharded_memory.CASES`.

Writes for each case the saved bytes and the peak, measured on the first rank and predicted, and the table's header.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from optimum_memopt import optimize
from tests.fresh_process import fork_ranks
from tests.train.test_sharded_memory import CASES, ENGINE, masked_batch, measured_step, sharded

STEPS = 5


def main(found: Path, names: list[str]) -> None:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    steps: dict[str, dict[str, Any]] = {}
    for name in names:
        case, batch = dict(CASES[name]), masked_batch()
        wanted = case.pop("plan", {})
        with sharded(**case, group=contextlib.nullcontext(mesh)) as model:
            engine = optimize(model, **ENGINE, **wanted)
            # gloo's threads may hold transferred tensors a while longer.
            measured = min(measured_step(model, batch) for _ in range(STEPS))
            predicted = engine.predictor.saved(), engine.predictor.footprint().activations
            steps[name] = {"measured": measured, "predicted": predicted, "header": engine.plans().header[0]}
    if os.environ["RANK"] == "0":
        found.write_text(json.dumps(steps))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(2, timeout=500)
    main(Path(sys.argv[1]), sys.argv[2:])
