"""Defines `optimum-cli memopt`: the command group, its commands and their arguments.

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

from optimum_memopt.commands import flags
from optimum_memopt.step_settings import StepSpec

if TYPE_CHECKING:
    from optimum_memopt.engines.api.factory import Report

_ADVISE_DESCRIPTION = (
    "Predicts samples per second and the peak memory of a training step for several plans, each at its best "
    "micro-batch, and recommends one. The model is traced from its config; no training step runs. Without --device, "
    "the speed of single operators is measured on this machine; with it, estimated from the device's data sheet."
)
# The value of --device that means this machine.
_HERE = "here"


class AdviseCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.description = _ADVISE_DESCRIPTION
        flags.add_flags(parser, flags.OF_ADVISE, without=flags.CHOSEN_BY_ADVISE)
        parser.epilog = (
            "--optim all also compares the memory of all known optimizers; plans are compared with the default one."
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
        workload = flags.workload_of(args)
        flags.check_numbers(args, flags.AdviseFlags)
        optimizers = args.optim == flags.ALL
        if optimizers:
            args.optim = StepSpec.optim
        if args.device == _HERE:
            args.device = None
        spec = flags.spec_of(args)
        if spec.fsdp > 1 and spec.device is None:
            raise MemOptError(f"--fsdp {spec.fsdp}: ranks are predicted only for a named device; add --device h100")
        # The rows of plain PyTorch are simulated without ranks.
        for flag in ("keep_outputs", "no_padding"):
            if spec.fsdp > 1 and flag in flags.given_flags(args):
                raise MemOptError(f"--{flag} with --fsdp: plain PyTorch on one device only; leave out one of them")
        name = predicting_engine()
        warn_of_precision(factory(name).planned_device(spec.device), spec.autocast, workload)
        options = flags.checked_options(args, name)
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
            help="Build the engines' optional C++ extensions in the user's cache (1 to 3 minutes).",
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
    """Returns the engines' reports merged, with versions of shared packages; None for one that is not installed."""
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
    """Returns lines that say when to use which engine, and which one `auto` selects."""
    from optimum_memopt.engines.api.run import AUTO
    from optimum_memopt.engines.shared.registry import choose_engines
    from optimum_memopt.errors import MemOptError

    try:
        (name, *_), reason = choose_engines(AUTO)
        default = f"--memory_opt_engine auto selects {name} ({reason})"
    except MemOptError as error:
        default = str(error)
    given = (report.advice for report in reports if report.advice)
    # Lines that recommend an engine come first.
    return [*sorted(given, key=lambda line: not line.startswith("recommended")), default]


def to_text(report: Mapping[str, Any]) -> str:
    """Returns a `report_of` report as text for a terminal."""
    from tabulate import tabulate

    abilities, extensions = report["works"], report["extensions"]
    installed = [(name, version or "-") for name, version in report["installed"].items()]
    works = [(each["what"], "yes" if each["works"] else "no", each["why"]) for each in abilities]
    lists = {
        "torch extensions": extensions.values(),
        "to install what is missing": [f"{each['what']}: {each['command']}" for each in abilities if each["command"]],
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
    "predicts the peak of a step. With any other engine, or with --measure, a new process trains the model for a few "
    "steps with random weights and data; these steps are a forward and a backward, without the optimizer's states, "
    "which add the same memory under every plan."
)


class PlanCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.description = _PLAN_DESCRIPTION
        flags.add_flags(parser, flags.OF_PLAN)

    def run(self) -> None:
        from optimum_memopt.compat.installed import without_kernel_warning
        from optimum_memopt.memory import process

        with process.fewer_collections(), without_kernel_warning():
            from optimum_memopt.commands import plan
            from optimum_memopt.errors import run

            run(lambda: plan.run(self.args))


_DRY_RUN_DESCRIPTION = (
    "Runs a script until it calls train() of a Trainer (stock, TRL's or a subclass). Then runs the Trainer's own "
    "training step and evaluation on tensors without data, sized by the longest rows of the data, and shows the "
    "memory of each phase of the run. Needs neither a GPU nor weights: models are created from their configs."
)


class DryRunCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.description = _DRY_RUN_DESCRIPTION
        parser.add_argument("--device", required=True, help="The GPU to predict for, such as h100, or a JSON file.")
        parser.add_argument("--budget", help="Memory limit of a phase, such as 24GiB. Default: all of the device.")
        parser.add_argument("script", help="The training script.")
        parser.add_argument("arguments", nargs=REMAINDER, help="Its arguments.")

    def run(self) -> None:
        from optimum_memopt.errors import run

        run(self._run)

    def _run(self) -> None:
        from optimum_memopt.commands.flags import short_flags
        from optimum_memopt.sizes import parse_budget
        from optimum_memopt.training.fake_run import run_script

        args = self.args
        with short_flags():
            budget = None if args.budget is None else parse_budget(args.budget)
        run_script(args.script, args.arguments, args.device, budget)


class MemOptCommand(BaseOptimumCLICommand):
    """Prints its help; the work is in the subcommands."""

    COMMAND = CommandInfo(name="memopt", help="Inspect and reduce the memory of a training step.")
    SUBCOMMANDS = (
        CommandInfo(
            name="advise",
            help="Find the micro-batch and plan that train a model fastest within a budget.",
            subcommand_class=AdviseCommand,
        ),
        CommandInfo(
            name="dry-run",
            help="Predict the memory of a script's run, phase by phase, before it trains.",
            subcommand_class=DryRunCommand,
        ),
        CommandInfo(
            name="env", help="Show what is installed, what works and what is missing.", subcommand_class=EnvCommand
        ),
        CommandInfo(name="plan", help="Show a model's memory plans and their savings.", subcommand_class=PlanCommand),
    )
