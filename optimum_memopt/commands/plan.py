"""`optimum-cli memopt plan`: the plan table of a model, and with `--measure` the measured saving of each row.

Nothing heavy is imported before `run()`: optimum imports this module whenever any of its commands starts.
"""

import json
from argparse import ArgumentParser
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand

_DESCRIPTION = (
    "Shows the memory plans of a model, given its config. The compile engine traces the model without running it and "
    "predicts the peak of a step. With any other engine or --measure a new process trains the model for a "
    "few steps, with random weights and random data; there a step is forward and backward, and an optimizer's states "
    "come on top, the same for every plan."
)


class PlanCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.description = _DESCRIPTION
        parser.add_argument(
            "--model", required=True, help="Folder with a config.json, path of a config file, or name on the hub."
        )
        parser.add_argument("--task", required=True, help="text-classification, fill-mask, text-generation, …")
        parser.add_argument(
            "--batch_size",
            default="8",
            help="Rows of a (micro-)batch (default: 8); several, as 1,2,4,8, for a table over batch sizes from one "
            "trace of the largest.",
        )
        parser.add_argument("--seq_len", type=int, default=128, help="Tokens per row, without padding (default: 128).")
        parser.add_argument("--engine", default="auto", help="As --memory_opt_engine takes it (default: auto).")
        parser.add_argument(
            "--symbolic",
            action="store_true",
            help="compile engine: show savings as formulas in batch size and sequence length; several times slower.",
        )
        parser.add_argument("--config", help="Plans to turn on, as --memory_opt_config takes them.")
        parser.add_argument("--level", type=int, default=0, help="As --memory_opt_level takes it.")
        parser.add_argument("--budget", help="As --memory_opt_budget takes it.")
        parser.add_argument("--plan", help="A plan file, as --memory_opt_plan takes it.")
        parser.add_argument(
            "--device",
            help="compile engine: the device whose memory and speed count, as h100 or 'rtx 4090', or a JSON file "
            "(docs/budget.md); with its attention kernels, workspaces and allocator. Default: this machine.",
        )
        precision = parser.add_mutually_exclusive_group()
        precision.add_argument("--bf16", action="store_true", help="Under autocast, as Trainer's --bf16.")
        precision.add_argument("--fp16", action="store_true", help="Under autocast, as Trainer's --fp16.")
        parser.add_argument("--optim", help="The optimizer, as Trainer's --optim (default: adamw_torch_fused).")
        parser.add_argument(
            "--gradient_accumulation_steps",
            type=int,
            help="As Trainer's (default: 1): from 2 on gradients of earlier micro-batches are held in a forward.",
        )
        parser.add_argument(
            "--trainable",
            metavar="PATTERN[,PATTERN]",
            help="Train these parameters alone: parts of their names as PEFT's target_modules (query, classifier), "
            "globs or regular expressions. Default: all that the model trains.",
        )
        parser.add_argument(
            "--compiler",
            help="As --memory_opt_compiler takes it (default: the one that would train, inductor with --device).",
        )
        parser.add_argument(
            "--budget_curve",
            nargs="?",
            const="",
            metavar="PICTURE",
            help="Show what ten budgets cost, from the smallest that is possible to no plan; with the name of an .svg "
            "or .png file also as a picture (pip install optimum-memopt[report]).",
        )
        parser.add_argument(
            "--html",
            metavar="FILE",
            help="Also write a page: the step operator by operator, what is held at its peak, what budgets cost, the "
            "plan table (pip install optimum-memopt[report]). Solves for ten budgets, with a plan in a second trace.",
        )
        parser.add_argument(
            "--measure",
            action="store_true",
            help="Measure no plan, each row and both levels, each in a fresh process, and search for the set of rows "
            "with the lowest peak. Takes minutes: 10 to 30 seconds per process.",
        )
        parser.add_argument(
            "--steps", type=int, help="Steps to measure, after a first one that compiles (default: 2)."
        )
        parser.add_argument("--max_runs", type=int, help="With --measure: most processes to start (default: 60).")
        parser.add_argument(
            "--output",
            help="Write the plans that are on, or the best ones measured, as a JSON list for --memory_opt_config; "
            "with --budget a plan file for --memory_opt_plan.",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")

    def run(self) -> None:
        from optimum_memopt.script import run

        run(self._run)

    def _run(self) -> None:
        from optimum_memopt.commands.plan_results import measured, table_of

        found = measured(self.args) if self.args.measure else table_of(self.args)
        print(json.dumps(found.report, indent=2) if self.args.json else found.text)
        if self.args.budget_curve:
            from optimum_memopt.report.budget_curve import draw

            draw(found.curve, found.costs, Path(self.args.budget_curve))
        if self.args.html:
            from optimum_memopt.report.data import of_estimate
            from optimum_memopt.report.page import render

            render(of_estimate(found.estimate, self.args.model, self.args.task)).save(self.args.html)
        if self.args.output and self.args.budget:
            found.plan.save(self.args.output)
        elif self.args.output:
            _write(self.args.output, found.config)


def _write(path: str, config: str) -> None:
    from optimum_memopt.errors import MemOptError, path_excerpt
    from optimum_memopt.plans.grammar import parse

    if not config:
        raise MemOptError(f"--output {path}: not written, since no plan is on")
    try:
        Path(path).write_text(parse(config).to_json() + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MemOptError(f"--output {path_excerpt(path)}: not written: {reason}; the plans are {config}") from error
