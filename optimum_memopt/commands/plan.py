"""`optimum-cli memopt plan`: the plan table of a model, and with `--measure` the measured saving of each row.

Nothing heavy is imported before `run()`: optimum imports this module whenever any of its commands starts.
"""

import json
import os
import sys
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand

_DESCRIPTION = (
    "Shows the memory plans of a model, given its config. The compile engine traces the model without running it and "
    "predicts the peak of a step with AdamW. With any other engine or --measure a new process trains the model for a "
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
        parser.add_argument("--batch_size", type=int, default=8, help="Rows per step (default: 8).")
        parser.add_argument("--seq_len", type=int, default=128, help="Tokens per row, without padding (default: 128).")
        parser.add_argument("--engine", default="auto", help="As --memory_opt_engine takes it (default: auto).")
        parser.add_argument(
            "--symbolic",
            action="store_true",
            help="compile engine: show savings as formulas in batch size and sequence length; several times slower.",
        )
        parser.add_argument("--config", help="Plans to turn on, as --memory_opt_config takes them.")
        parser.add_argument("--level", type=int, default=0, help="As --memory_opt_level takes it.")
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
            help="Write the plans that are on, or the best ones measured, as a JSON list for --memory_opt_config.",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")

    def run(self) -> None:
        from optimum_memopt.script import run

        run(self._run)

    def _run(self) -> None:
        report, text, config = _measured(self.args) if self.args.measure else _table(self.args)
        print(json.dumps(report, indent=2) if self.args.json else text)
        if self.args.output:
            _write(self.args.output, config)


def _case(args: Any) -> Any:
    """What to measure; checks everything that needs no model.

    Raises:
        MemOptError: one line.
    """
    from optimum_memopt.engines.base import choose_engines, engine_names, factory
    from optimum_memopt.errors import MemOptError, path_excerpt
    from optimum_memopt.measure.measure_case import Case
    from optimum_memopt.measure.workload import Workload
    from optimum_memopt.options import MemOptOptions

    workload = Workload(args.model, args.task, args.batch_size, args.seq_len)
    workload.check()
    for name in ("steps", "max_runs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise MemOptError(f"--{name} {getattr(args, name)}: allowed are numbers from 1 on")
    if args.max_runs is not None and not args.measure:
        raise MemOptError(f"--max_runs {args.max_runs}: only --measure starts so many processes; leave it out")
    if args.measure and args.level:
        raise MemOptError(f"--level {args.level} with --measure: both levels are measured anyway; leave it out")
    if args.output and not args.measure and not (args.config or args.level):
        raise MemOptError("--output writes the plans that are on; give --config, --level or --measure")
    if args.output and not os.path.isdir(os.path.dirname(args.output) or os.curdir):
        raise MemOptError(f"--output {path_excerpt(args.output)}: no such folder")
    if args.output and os.path.isdir(args.output):
        raise MemOptError(f"--output {path_excerpt(args.output)}: is a folder; name a file in it")
    options = {
        "memory_opt_engine": args.engine,
        "memory_opt_config": args.config,
        "memory_opt_level": args.level,
    }
    try:
        MemOptOptions(**options).check()
    except MemOptError as error:
        # The same options have shorter names here.
        raise MemOptError(str(error).replace("--memory_opt_", "--")) from error
    (name, *_), _ = choose_engines(args.engine)
    predicts = factory(name).predicts and not args.measure
    if args.symbolic and not predicts:
        predicting = ", ".join(name for name in engine_names() if factory(name).predicts)
        raise MemOptError(f"--symbolic is for predictions of the {predicting} engine; leave it out")
    if args.steps is not None and predicts:
        raise MemOptError(
            f"--steps {args.steps}: the {name} engine predicts without a step; leave it out, or add --measure"
        )
    return Case(workload, options, steps=args.steps or 2)


def _table(args: Any) -> tuple[dict[str, Any], str, str]:
    """One measurement, or one prediction: report, text, and the config of the plans that are on."""
    from optimum_memopt.engines.base import choose_engines, factory
    from optimum_memopt.measure.measure_case import spawn

    case = _case(args)
    (name, *_), _ = choose_engines(args.engine)
    if factory(name).predicts:
        return _estimated(case, name, args.symbolic)
    found = spawn(case)
    _log_once(found.remarks)
    report = {
        "table": asdict(found.engine_table),
        "peak_mib": found.peak_mib,
        "method": found.method,
        "step_seconds": found.step_seconds,
    }
    line = f"Measured peak of a step: {found.peak_mib:.1f} MiB ({found.method}), {found.step_seconds:.3f} s"
    return report, f"{found.engine_table.to_text()}\n{line}", ",".join(sorted(found.applied))


def _estimated(case: Any, engine: str, symbolic: bool) -> tuple[dict[str, Any], str, str]:
    from optimum_memopt.engines.base import Selection, factory
    from optimum_memopt.options import MemOptOptions

    options = MemOptOptions(**case.options)
    selection = Selection(options.plan_config, options.memory_opt_level)
    found = factory(engine).estimate(case.workload, selection, symbolic)
    return found.to_dict(), found.to_text(), ",".join(plan.config for plan in found.table.enabled)


def _measured(args: Any) -> tuple[dict[str, Any], str, str]:
    """A sweep over plans: report, text, and the winner's config."""
    from dataclasses import replace

    from tqdm import tqdm

    from optimum_memopt.measure.sweep import sweep

    case = _case(args)
    case = replace(case, options={"memory_opt_engine": args.engine})
    max_runs = args.max_runs or 60
    with tqdm(total=max_runs, unit="run", desc="measuring", file=sys.stderr) as bar:

        def show(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        found = sweep(case, args.config, max_runs, show)
    _log_once(remark for run in found.runs if run.measurement for remark in run.measurement.remarks)
    return found.to_dict(), found.to_text(), ",".join(sorted(found.winner.measured.applied))


def _log_once(remarks: Any) -> None:
    from optimum_memopt.logs import get_logger

    for remark in dict.fromkeys(remarks):
        get_logger().info(remark)


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
