"""`optimum-cli memopt advise`: which micro-batch and which plan train a model fastest within a budget.

Nothing heavy is imported before `run()`: optimum imports this module whenever any of its commands starts.
"""

import json
from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand

_DESCRIPTION = (
    "Predicts samples a second and the peak of a training step for several plans, each at its best micro-batch, and "
    "recommends one. The model is traced from its config; no training step is run. Without --device the speed of "
    "single operators is measured on this machine; with it, it is estimated from the device's data sheet."
)
_HERE = "here"


class AdviseCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.description = _DESCRIPTION
        parser.add_argument(
            "--model", required=True, help="Folder with a config.json, path of a config file, or name on the hub."
        )
        parser.add_argument("--task", required=True, help="text-classification, fill-mask, text-generation, …")
        parser.add_argument("--seq_len", type=int, default=128, help="Tokens per row, without padding (default: 128).")
        parser.add_argument(
            "--global_batch",
            type=int,
            help="Rows of an optimizer step on one device, divided into equal micro-batches. Default: each "
            "micro-batch is a step, of any size.",
        )
        parser.add_argument(
            "--device",
            default=_HERE,
            help="The device whose memory and speed count, as h100 or 'rtx 4090', or a JSON file (docs/budget.md). "
            "Default: here, this machine.",
        )
        parser.add_argument(
            "--budget", default="auto", help="As --memory_opt_budget takes it (default: auto, what is free)."
        )
        precision = parser.add_mutually_exclusive_group()
        precision.add_argument("--bf16", action="store_true", help="Under autocast, as Trainer's --bf16.")
        precision.add_argument("--fp16", action="store_true", help="Under autocast, as Trainer's --fp16.")
        parser.add_argument(
            "--optim",
            default="adamw_torch_fused",
            help="The optimizer, as Trainer's --optim takes it (default: adamw_torch_fused).",
        )
        parser.add_argument(
            "--compiler",
            help="As --memory_opt_compiler takes it (default: the one that would train, inductor with --device).",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")

    def run(self) -> None:
        from optimum_memopt.script import run

        run(self._run)

    def _run(self) -> None:
        from optimum_memopt.engines.api.run import StepSpec
        from optimum_memopt.engines.shared.registry import engine_names, factory
        from optimum_memopt.errors import MemOptError
        from optimum_memopt.options import MemOptOptions
        from optimum_memopt.predict.advise import advise, to_dict, to_text
        from optimum_memopt.predict.workload import Workload

        args = self.args
        workload = Workload(args.model, args.task, seq_len=args.seq_len)
        workload.check()
        if args.global_batch is not None and args.global_batch < 1:
            raise MemOptError(f"--global_batch {args.global_batch}: allowed are numbers from 1 on")
        name = next(name for name in engine_names() if factory(name).predicts)
        options = MemOptOptions(
            memory_opt_engine=name, memory_opt_budget=args.budget, memory_opt_compiler=args.compiler
        )
        try:
            options.check()
        except MemOptError as error:
            # The same options have shorter names here.
            raise MemOptError(str(error).replace("--memory_opt_", "--")) from error
        device = None if args.device == _HERE else args.device
        autocast = "bfloat16" if args.bf16 else "float16" if args.fp16 else ""
        steps = factory(name).predict_steps(workload, options, StepSpec(device, args.compiler, autocast, args.optim))
        found = advise(steps, args.global_batch)
        print(json.dumps(to_dict(found, steps), indent=2) if args.json else to_text(found, steps))
