"""Trains with an engine in `optimum_memopt/engines/toy` that no other file names."""

import torch
from transformers import HfArgumentParser, Trainer

from optimum_memopt import MemOptTrainer, MemOptTrainingArguments, optimize
from optimum_memopt.commands.memopt import advice
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.engines.shared.registry import engine_names, factory


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).sum()}


parser = HfArgumentParser(MemOptTrainingArguments)
words = ["--output_dir", "out", "--report_to", "none", "--use_cpu", "--max_steps", "2", "--disable_tqdm", "true"]
(args,) = parser.parse_args_into_dataclasses([*words, "--memory_opt_engine", "toy", "--toy_step", "1"])
trainer = MemOptTrainer(model=Model(), args=args, train_dataset=[{"x": torch.ones(2), "labels": 0}] * 16)
assert isinstance(trainer, Trainer)
trainer.train()
assert trainer.memopt.options.toy_step == 1

model = Model()
engine = optimize(model, toy_step=3)
assert engine.name == "toy" and engine_of(model) is engine
model(torch.ones(1, 2))["loss"].backward()
assert engine.plans().header == ("3 forwards",)
engine.detach()

reports = [factory(name).environment_report() for name in engine_names()]
takes = [line for line in advice(reports) if "auto selects toy" in line]
print(f"toy trained {trainer.memopt.table.header[0]}; {'auto selects toy' if takes else 'not in auto'}")
