"""Training steps on a CUDA device, and what torch's allocator says of them."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

import optimum_memopt

_SIZES = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 600,
}


def roberta() -> torch.nn.Module:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_SIZES))


def deberta() -> torch.nn.Module:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256}
    return transformers.DebertaV2ForMaskedLM(
        transformers.DebertaV2Config(**_SIZES, **relative, norm_rel_ebd="layer_norm", share_att_key=True)
    )


def llama() -> torch.nn.Module:
    sizes = {**_SIZES, "intermediate_size": 2048, "num_key_value_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))


MODELS = {"roberta": roberta, "deberta": deberta, "llama": llama}
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Held:
    """Bytes at the peak of a step.

    Attributes:
        requested: of all tensors.
        allocated: of the blocks that they lie in.
        reserved: of the device's memory.
        activations: requested by the forward and backward over what was there before.
    """

    requested: int
    allocated: int
    reserved: int
    activations: int


@dataclass
class Training:
    """A model under the compile engine on a CUDA device, with AdamW.

    Attributes:
        model: that trains.
        engine: None for plain PyTorch.
        optimizer: fused AdamW.
        batch: of the forward.
        dtype: of autocast, None without.
    """

    model: torch.nn.Module
    engine: Any
    optimizer: torch.optim.Optimizer
    batch: dict[str, torch.Tensor]
    dtype: torch.dtype | None

    def step(self) -> Held:
        """One step, with nothing left of its loss."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = _requested("current")
        with torch.autocast("cuda", self.dtype, enabled=self.dtype is not None):
            loss = self.model(**self.batch).loss
        loss.backward()
        del loss
        activations = _requested("peak") - before
        self.optimizer.step()
        self.optimizer.zero_grad()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return Held(_requested("peak"), *peaks, activations)


def training(name: str, dtype: str, batch_size: int = 8, seq_len: int = 256, **options: Any) -> Training:
    """A model of `MODELS` with a batch.

    Args:
        options: of the compile engine.
    """
    torch.manual_seed(0)
    model = MODELS[name]().cuda().train()
    engine = None
    if options:
        # The stand-in finds no label, and a chunked loss would compute nothing.
        options = {"memory_opt_loss": "plain", "memory_opt_compiler": "aot_eager", **options}
        engine = optimum_memopt.optimize(model, memory_opt_engine="compile", **options)
        engine.outputs_read_by = lambda: ""
    ids = torch.randint(5, 8000, (batch_size, seq_len)).cuda()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Training(model, engine, optimizer, batch, DTYPES[dtype])


def _requested(kind: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]
