"""`optimum-cli memopt`: the group of commands, and their arguments.

Nothing heavy is imported before `run()`: optimum imports this module whenever any of its commands starts.
"""

import json
import platform
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from optimum_memopt.commands import step

if TYPE_CHECKING:
    from optimum_memopt.engines.api.factory import Report

_ADVISE_DESCRIPTION = (
    "Predicts samples a second and the peak of a training step for several plans, each at its best micro-batch, and "
    "recommends one. The model is traced from its config; no training step is run. Without --device the speed of "
    "single operators is measured on this machine; with it, it is estimated from the device's data sheet."
)
_HERE = "here"
# Of --optim.
_ALL = "all"


class AdviseCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.description = _ADVISE_DESCRIPTION
        step.add_model(parser)
        parser.add_argument(
            "--device",
            default=_HERE,
            help="The device whose memory and speed count, as h100 or 'rtx 4090', or a JSON file (docs/budget.md). "
            "Default: here, this machine.",
        )
        parser.add_argument(
            "--budget",
            default="auto",
            help="Bytes that a step must not pass, as 24GiB or 90%% (default: auto, what is free).",
        )
        parser.add_argument(
            "--global_batch",
            type=int,
            help="Rows of an optimizer step on one device, divided into equal micro-batches. Default: each "
            "micro-batch is a step, of any size.",
        )
        step.add_arguments(parser)
        parser.add_argument_group("output").add_argument(
            "--json", action="store_true", help="Print JSON instead of a table."
        )
        parser.epilog = (
            "--optim all also compares the memory of all known optimizers, with --optim's default in force."
        )

    def run(self) -> None:
        from optimum_memopt.compat.installed import without_kernel_warning
        from optimum_memopt.errors import run
        from optimum_memopt.memory import process

        with process.fewer_collections(), without_kernel_warning():
            run(self._run)

    def _run(self) -> None:
        from optimum_memopt.engines.shared.registry import factory, predicting_engine
        from optimum_memopt.errors import MemOptError
        from optimum_memopt.logs import watched
        from optimum_memopt.predict.advise import (
            advise,
            compare_optimizers,
            optimizers_dict,
            optimizers_text,
            to_dict,
            to_text,
        )
        from optimum_memopt.predict.workload import warn_of_precision

        args = self.args
        workload = step.workload_of(args)
        step.check_counts(args, "global_batch")
        optimizers = args.optim == _ALL
        if optimizers:
            args.optim = None
        spec = step.spec_of(args, None if args.device == _HERE else args.device)
        if spec.fsdp > 1 and spec.device is None:
            raise MemOptError(f"--fsdp {spec.fsdp}: ranks are predicted for a device with a name; add --device h100")
        name = predicting_engine()
        warn_of_precision(factory(name).planned_device(spec.device), spec.autocast, workload)
        options = step.checked_options(
            memory_opt_engine=name, memory_opt_budget=args.budget, memory_opt_compiler=args.compiler
        )
        with watched("comparing plans and micro-batches"):
            steps = factory(name).predict_steps(workload, options, spec)
            advice = advise(steps, args.global_batch)
            compared = compare_optimizers(advice, steps, args.global_batch) if optimizers else ()
        report, text = to_dict(advice, steps), to_text(advice, steps)
        if optimizers:
            report |= optimizers_dict(compared)
            text += f"\n\n{optimizers_text(compared, advice, steps)}"
        print(json.dumps(report, indent=2) if args.json else text)


LIBRARIES = ("torch", "transformers", "accelerate", "optimum", "deepspeed")


class EnvCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument(
            "--build",
            action="store_true",
            help="Build the C++ extensions that engines can use into the user's cache (1 to 3 minutes).",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")

    def run(self) -> None:
        from optimum_memopt.engines.shared.registry import engine_names, factory
        from optimum_memopt.errors import MemOptError

        factories = [factory(name) for name in engine_names()]
        if self.args.build:
            try:
                for engine in factories:
                    engine.build()
            except MemOptError as error:
                sys.exit(f"error: {error}")
        report = report_of([engine.environment_report() for engine in factories])
        print(json.dumps(report, indent=2) if self.args.json else to_text(report))


def report_of(reports: "Sequence[Report]") -> dict[str, Any]:
    """The reports of all engines, and the versions of packages that they share; None for one that is not installed."""
    from optimum_memopt.compat.installed import installed_version

    versions = {name: version and version[1] for name in LIBRARIES for version in [installed_version((name,))]}
    own = {name: version for report in reports for name, version in report.installed.items()}
    return {
        "installed": {"python": platform.python_version(), **versions, "CUDA (of torch)": _cuda(), **own},
        "works": [asdict(ability) for report in reports for ability in report.abilities],
        "extensions": {name: path for report in reports for name, path in report.built.items()},
        "advice": advice(reports),
    }


def _cuda() -> str | None:
    import torch

    if torch.version.cuda is None:
        return None
    return f"{torch.version.cuda}, {torch.cuda.device_count()} device(s)"


def advice(reports: "Sequence[Report]") -> list[str]:
    """When to take which engine, and what `auto` takes."""
    from optimum_memopt.engines.api.run import AUTO
    from optimum_memopt.engines.shared.registry import choose_engines
    from optimum_memopt.errors import MemOptError

    try:
        (name, *_), reason = choose_engines(AUTO)
        default = f"--memory_opt_engine auto takes {name} ({reason})"
    except MemOptError as error:
        default = str(error)
    given = (report.advice for report in reports if report.advice)
    # A recommendation of the engine itself comes first.
    return [*sorted(given, key=lambda line: not line.startswith("recommended")), default]


def to_text(report: Mapping[str, Any]) -> str:
    """`report_of` for a terminal."""
    from tabulate import tabulate

    abilities, extensions = report["works"], report["extensions"]
    installed = [(name, version or "-") for name, version in report["installed"].items()]
    works = [(each["what"], "yes" if each["works"] else "no", each["why"]) for each in abilities]
    lists = {
        "torch extensions": extensions.values(),
        "to get what is missing": [f"{each['what']}: {each['command']}" for each in abilities if each["command"]],
        "which engine": report["advice"],
    }
    parts = [
        tabulate(installed, headers=("installed", "version")),
        tabulate(works, headers=("what", "works", "why"), maxcolwidths=(None, None, 70)),
        *("\n  ".join((f"{title}:", *lines)) for title, lines in lists.items() if lines),
    ]
    return "\n\n".join(parts)


_PLAN_DESCRIPTION = (
    "Shows the memory plans of a model, given its config. The compile engine traces the model without running it and "
    "predicts the peak of a step. With any other engine or --measure a new process trains the model for a "
    "few steps, with random weights and random data; there a step is forward and backward, and an optimizer's states "
    "come on top, the same for every plan."
)


class PlanCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.description = _PLAN_DESCRIPTION
        step.add_model(parser)
        parser.add_argument(
            "--batch_size",
            default="8",
            help="Rows of a (micro-)batch (default: 8); several, as 1,2,4,8, for a table over batch sizes from one "
            "trace of the largest.",
        )
        parser.add_argument(
            "--device",
            help="compile engine: the device whose memory and speed count, as h100 or 'rtx 4090', or a JSON file "
            "(docs/budget.md); with its attention kernels, workspaces and allocator. Default: this machine.",
        )
        parser.add_argument(
            "--budget", help="Bytes that the step must not pass, as 24GiB, 90%% or auto; the cheapest plan that fits."
        )
        plan = parser.add_argument_group("plan, instead of a budget")
        plan.add_argument("--level", type=int, default=0, help="As --memory_opt_level takes it.")
        plan.add_argument("--config", help="Plans to turn on, as --memory_opt_config takes them.")
        plan.add_argument("--plan", help="A plan file, as --memory_opt_plan takes it.")
        plan.add_argument("--compress", help="What the plan saves, as --memory_opt_compress takes it.")
        step.add_arguments(parser)
        engine = parser.add_argument_group("engine")
        engine.add_argument("--engine", default="auto", help="As --memory_opt_engine takes it (default: auto).")
        engine.add_argument("--loss", help="compile engine: as --memory_opt_loss takes it (default: auto).")
        engine.add_argument(
            "--gradient_accumulation_steps",
            type=int,
            help="As Trainer's (default: 1): from 2 on gradients of earlier micro-batches are held in a forward.",
        )
        output = parser.add_argument_group("output")
        output.add_argument(
            "--ways",
            choices=("all", "plain"),
            default="all",
            help="The ways to train that are compared: plain PyTorch and Trainer's checkpointing, which take two "
            "seconds, and all: also the compile engine without a plan, under level 1 and under what is selected "
            "(default).",
        )
        output.add_argument(
            "--symbolic",
            action="store_true",
            help="compile engine: show savings as formulas in batch size and sequence length; several times slower.",
        )
        output.add_argument(
            "--budget_curve",
            nargs="?",
            const="",
            metavar="PICTURE",
            help="Show what ten budgets cost, from the smallest that is possible to no plan; with the name of an .svg "
            "or .png file also as a picture (pip install optimum-memopt[report]).",
        )
        output.add_argument(
            "--at_peak",
            action="store_true",
            help="compile engine: list the tensors at the predicted peak, by category, row of the plan table or "
            "operator, and module; their bytes add up to the peak.",
        )
        output.add_argument(
            "--html",
            metavar="FILE",
            help="Also write a page: the step operator by operator, what is held at its peak, what budgets cost, the "
            "plan table (pip install optimum-memopt[report]). Solves for ten budgets.",
        )
        output.add_argument(
            "--output",
            help="Write the plans that are on, or the best ones measured, as a JSON list for --memory_opt_config; "
            "with --budget or --compress a plan file for --memory_opt_plan.",
        )
        output.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
        measured = parser.add_argument_group("measured in fresh processes, and not predicted")
        measured.add_argument(
            "--measure",
            action="store_true",
            help="Measure no plan, each row and both levels, each in a fresh process, and search for the set of rows "
            "with the lowest peak. Takes minutes: 10 to 30 seconds per process.",
        )
        measured.add_argument(
            "--steps", type=int, help="Steps to measure, after a first one that compiles (default: 2)."
        )
        measured.add_argument("--max_runs", type=int, help="With --measure: most processes to start (default: 60).")

    def run(self) -> None:
        from optimum_memopt.compat.installed import without_kernel_warning
        from optimum_memopt.memory import process

        with process.fewer_collections(), without_kernel_warning():
            from optimum_memopt.commands import plan
            from optimum_memopt.errors import run

            run(lambda: plan.run(self.args))


_DRY_RUN_DESCRIPTION = (
    "Runs a script until a Trainer's train(): stock, TRL's, a subclass. Then its own training step and evaluation run "
    "on tensors without data, with the longest rows of the data, and the memory of each phase of the run is shown. "
    "Neither a GPU nor weights are needed: models are made from their configs."
)


class DryRunCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.description = _DRY_RUN_DESCRIPTION
        parser.add_argument("--device", required=True, help="The GPU that the run is for, as h100, or a JSON file.")
        parser.add_argument("--budget", help="Bytes that no phase may pass, as 24GiB. Default: what the device has.")
        parser.add_argument("script", help="The script.")
        parser.add_argument("arguments", nargs=REMAINDER, help="Its arguments.")

    def run(self) -> None:
        from optimum_memopt.errors import run

        run(self._run)

    def _run(self) -> None:
        from optimum_memopt.sizes import parse_budget
        from optimum_memopt.training.fake_run import run_script

        args = self.args
        budget = None if args.budget is None else parse_budget(args.budget)
        run_script(args.script, args.arguments, args.device, budget)


class MemOptCommand(BaseOptimumCLICommand):
    """Prints its help; the work is in the subcommands."""

    COMMAND = CommandInfo(name="memopt", help="See and trade what a training step keeps in memory.")
    SUBCOMMANDS = (
        CommandInfo(
            name="advise",
            help="Which micro-batch and which plan train a model fastest within a budget.",
            subcommand_class=AdviseCommand,
        ),
        CommandInfo(
            name="dry-run",
            help="What a script's run takes, phase by phase, before it trains.",
            subcommand_class=DryRunCommand,
        ),
        CommandInfo(
            name="env", help="What is installed, what works here, what is missing.", subcommand_class=EnvCommand
        ),
        CommandInfo(name="plan", help="A model's memory plans, claimed and measured.", subcommand_class=PlanCommand),
    )
