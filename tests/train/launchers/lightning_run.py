"""A rank of a Lightning run under FSDP2 with `ModelParallelStrategy`: `lightning_run.py FOLDER {plain,level 1}`.

The first rank writes the full weights, the losses and the table's header.
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from optimum_memopt import optimize
from tests.trainer_runs import build, collate, rows

MODEL, LAYERS = "llama", 4


class Shards(lightning.LightningModule):
    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.losses = build(MODEL, num_hidden_layers=LAYERS), []
        self.engine, self._is_plain = None, is_plain

    def configure_model(self) -> None:
        if isinstance(next(self.model.parameters()), DTensor):
            return
        if not self._is_plain:
            how = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_loss": "plain"}
            self.engine = optimize(self.model, memory_opt_level=1, **how)
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch, _):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.losses.append(self.model(**batch).loss.item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def main(folder: Path, way: str) -> None:
    module = Shards(way == "plain")
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **quiet,
    )
    train, validation = (
        torch.utils.data.DataLoader(rows(MODEL, count, seed=seed), batch_size=4, collate_fn=collate)
        for count, seed in ((16, 0), (8, 1))
    )
    trainer.fit(module, train, validation)
    # After a validation the model's own parameters may still be gathered.
    weights = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach()
        for name, each in module.model.named_parameters()
    }
    if trainer.global_rank == 0:
        save_file(weights, folder / f"{way}.safetensors")
        header = "" if module.engine is None else module.engine.plans().header[0]
        (folder / f"{way}.json").write_text(json.dumps({"losses": module.losses, "header": header}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
