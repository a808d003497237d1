"""Steps under ZeRO 3 on two gloo ranks, or on one of 8 ranks in torch's `fake` process group, which transfers and
allocates nothing, so a single process measures exactly the allocations of a rank.

    zero3_memory_runs.py CASES.json FOUND.json fake|gloo

Writes for each case the peaks of its last step and of the optimizer's step, measured and predicted.
"""

import contextlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import TensorCounter, allocated
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat import fully_shard
from optimum_memopt.sizes import parse_budget
from tests.compiled import below_recompute, hold_still
from tests.deepspeed_kernels import leave_out_shared_memory
from tests.fresh_process import fork_ranks

WIDTH = 128
SIZES = {"vocab_size": 512, "hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 4}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
# The values that a Trainer fills in, except that no parameters are kept on all ranks.
ZERO = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": WIDTH**2,
    "stage3_prefetch_bucket_size": int(0.9 * WIDTH**2),
}
AHEAD = "stage3_prefetch_bucket_size"


def steps(case: dict[str, Any], initialize: Any, allocated: Any) -> dict[str, Any]:
    """Run the steps of a case, and return the measurements and predictions of the last ones."""
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), **case.get("config", {})}))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.get("trained", "") in name)
    zero = {**ZERO, **case.get("zero", {})}
    plugin = types.SimpleNamespace(zero_stage=3, deepspeed_config={"zero_optimization": zero})
    budget = parse_budget(case["budget"]) if "budget" in case else None
    engine = CompileEngine(Selection(level=case.get("level"), budget=budget), "aot_eager", loss="plain")
    engine.check_arguments(
        types.SimpleNamespace(deepspeed_plugin=plugin, torch_compile=False, fsdp=[], n_gpu=1)  # type: ignore[arg-type]
    )
    if zero[AHEAD] == "auto":
        zero[AHEAD] = ZERO[AHEAD]
    # `measured` drops the outputs before the backward, as a Trainer does.
    engine.outputs_read_by = lambda: ""
    engine.attach(model)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.get("micro_batches", 1),
        "zero_optimization": zero,
        "bf16": {"enabled": case.get("bf16", False)},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=False)
    trainer = initialize(model=model, optimizer=optimizer, config=config)[0]
    found: dict[str, Any] = {}
    lengths = case.get("lengths", [64])
    # DeepSpeed knows the order of modules from the second step on.
    for turn, length in enumerate((*lengths, *(lengths[:1] * 4), *lengths)):
        held, update = measured(trainer, length, case.get("micro_batches", 1), allocated)
        if turn > len(lengths) + 2 and f"at_{length}" in found:
            # gloo's threads may hold transferred tensors a while longer.
            held = min(held, found[f"at_{length}"][0])
        predictor = engine.predictor
        assert predictor is not None
        predicted = predictor.footprint({"inputs_input_ids_dim1": length}, trainer.optimizer)
        found |= {
            f"at_{length}": [held, predicted.activations],
            "update": [update, predicted.gradients + predicted.step],
            "caveat": predictor.caveat,
            "peak": predicted.peak,
        }
    assert engine.predictor is not None
    found |= {
        "ahead": trainer.optimizer.parameter_offload._prefetch_bucket_sz,
        "table": list(engine.plans().header),
        "again": sum(engine.predictor.tape.repeated),
    }
    engine.detach()
    trainer.destroy()
    return found


def measured(trainer: Any, length: int, micro_batches: int, allocated: Any) -> tuple[int, int]:
    """Returns the peaks of a forward with its backward, and of the optimizer's step, over what was held before."""
    ids = torch.randint(3, 512, (4, length))
    mask = torch.ones_like(ids)
    mask[0, length - 14 :] = 0
    held = update = 0
    for _ in range(micro_batches):
        up, saved, loss = allocated(lambda: trainer(input_ids=ids, attention_mask=mask, labels=ids).loss)
        down, _, _ = allocated(lambda loss=loss: trainer.backward(loss))
        held = max(held, up, saved + down)
        update, _, _ = allocated(trainer.step)
        del loss
    return held, update


if __name__ == "__main__":
    cases, out = map(Path, sys.argv[1:3])
    os.environ["DS_ACCELERATOR"] = "cpu"
    hold_still(pytest.MonkeyPatch())
    if sys.argv[3] == "gloo":
        fork_ranks(2, timeout=500)
    else:
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        os.environ.update(place)
        fully_shard.fake_group(8)
    import deepspeed

    leave_out_shared_memory()
    deepspeed.ops.__compatible_ops__["deepspeed_ccl_comm"] = False
    deepspeed.init_distributed("gloo")
    measure = TensorCounter().allocated if sys.argv[3] == "gloo" else allocated
    wanted = json.loads(cases.read_text()).items()
    found = {}
    for name, case in wanted:
        with below_recompute(case["segments"]) if "segments" in case else contextlib.nullcontext():
            found[name] = steps(case, deepspeed.initialize, measure)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))
