"""Trains models that `fully_shard` has sharded in a custom loop on two ranks, with and without an engine.

    sharded_loops.py CASE …

Rank 0 prints a line of JSON for each case: the distance of the trained parameters and the table's header, or the
error.
"""

import functools
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import MistralConfig, MistralForCausalLM

from optimum_memopt import MemOptError, optimize
from tests.fresh_process import fork_ranks
from tests.model_zoo import VOCABULARY, ZOO
from tests.train.launchers.worker import saved
from tests.trainer_runs import distance

STEPS = 3
DIMENSIONS = ("replicate", "shard")
IMAGES = "qwen2-vl"
# Under a budget, one rank has padding, or rows as long as the window of local attention, in one step; all other
# batches have neither.
PADDING, WINDOW = "padding", "window"
# One rank has a different plan.
OTHER_PLAN = "other_plan"
TOKENS = 9


def sharded(
    mesh: tuple[int, ...] = (2,),
    tensor_parallel: bool = False,
    ignored: str = "",
    frozen: bool = False,
    model: torch.nn.Module | None = None,
    **how: Any,
) -> torch.nn.Module:
    torch.manual_seed(0)
    model = model if model is not None else ZOO["llama"].build(num_hidden_layers=3, use_cache=False)
    names = DIMENSIONS[-len(mesh) :]
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(ignored not in name)
    if tensor_parallel:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan = {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
        for layer in model.model.layers:
            parallelize_module(layer, device_mesh["shard"], plan)
        device_mesh = device_mesh["replicate"]
    if ignored:
        how["ignored_params"] = {parameter for name, parameter in model.named_parameters() if ignored in name}
    for layer in model.model.layers:
        fully_shard(layer, mesh=device_mesh, **how)
    fully_shard(model, mesh=device_mesh, **how)
    return model.train()


def of_local_attention() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 3, "num_key_value_heads": 2}
    config = MistralConfig(**sizes, **layers, sliding_window=TOKENS + 1, use_cache=False)
    return sharded(model=MistralForCausalLM(config))


def of_images() -> torch.nn.Module:
    """Returns a model whose vision tower and language model have sharded layers."""
    model = ZOO[IMAGES].build("sdpa")
    for layer in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(layer)
    fully_shard(model)
    return model.train()


def quantized(storage: torch.dtype) -> torch.nn.Module:
    """Returns an NF4 model with adapters. FSDP2 cannot shard weights packed into bytes (accelerate 1.15 says so, and
    leaves them whole), but shards those packed into another type."""
    peft, transformers = importlib.import_module("peft"), importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=storage
    )
    model = ZOO["llama"].build(**sizes, use_cache=False)
    with saved(model) as folder:
        model = type(model).from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    adapters = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(model, adapters)
    packed = {parameter for parameter in model.parameters() if not parameter.is_floating_point()}
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, ignored_params=packed)
    fully_shard(model, ignored_params=packed)
    return model.train()


def reduced(model: torch.nn.Module) -> None:
    """Average the gradients of parameters that FSDP2 does not manage."""
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            torch.distributed.all_reduce(parameter.grad)


def without_padding(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def train(model: torch.nn.Module, case: str) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(STEPS):
        name = IMAGES if hasattr(getattr(model, "model", None), "visual") else "llama"
        is_other = (step, torch.distributed.get_rank()) == (1, 1)
        length = TOKENS + 3 if case == WINDOW and is_other else TOKENS
        batch = ZOO[name].batch(4, length, seed=10 * step + torch.distributed.get_rank())
        if case == WINDOW or (case == PADDING and not is_other):
            batch = without_padding(batch)
        model(**batch).loss.backward()
        reduced(model)
        optimizer.step()
        optimizer.zero_grad()
    trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in trained.items()}
    return {name: each.clone() for name, each in whole.items()}


CASES: dict[str, Callable[[], torch.nn.Module]] = {
    "replicas": functools.partial(sharded, (2, 1)),
    "hybrid": functools.partial(sharded, (1, 2)),
    "offload": functools.partial(sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "ignored": functools.partial(sharded, ignored="mlp.up_proj"),
    "ignored_frozen": functools.partial(sharded, ignored="mlp.up_proj", frozen=True),
    "quantized": functools.partial(quantized, torch.uint8),
    "quantized_sharded": functools.partial(quantized, torch.float32),
    "images": of_images,
    PADDING: sharded,
    WINDOW: of_local_attention,
    OTHER_PLAN: sharded,
    "tensor_parallel": functools.partial(sharded, (1, 2), tensor_parallel=True),
}


def compared(case: str) -> dict[str, Any]:
    model, options = CASES[case](), {"memory_opt_compiler": "aot_eager", "memory_opt_loss": "plain"}
    is_other = case == OTHER_PLAN and torch.distributed.get_rank() == 1
    plan = {"memory_opt_budget": "90%"} if is_other or case in (PADDING, WINDOW) else {"memory_opt_level": 1}
    try:
        engine = optimize(model, memory_opt_engine="compile", **plan, **options)
        found = train(model, case)
    except MemOptError as error:
        return {"error": str(error)}
    expected = train(CASES[case](), case)
    table = engine.plans()
    assert table is not None
    return {"distance": distance(found, expected), "header": table.header}


def main() -> None:
    fork_ranks(2, timeout=600)
    torch.distributed.init_process_group("gloo")
    for case in sys.argv[1:]:
        line = json.dumps({"case": case, **compared(case)})
        if torch.distributed.get_rank() == 0:
            print(line, flush=True)


if __name__ == "__main__":
    main()
