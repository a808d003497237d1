"""What `optimum-cli memopt plan` found: one prediction, one measurement, or a sweep over plans."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tqdm import tqdm

from optimum_memopt.commands.plan_checks import autocast_of, batch_sizes, case_of
from optimum_memopt.engines.registry import factory
from optimum_memopt.logs import get_logger
from optimum_memopt.measure.measure_case import spawn
from optimum_memopt.measure.sweep import sweep
from optimum_memopt.measure.workload import Workload
from optimum_memopt.memory.optimizers import DEFAULT
from optimum_memopt.options import MemOptOptions, resolve


@dataclass(frozen=True)
class Found:
    """What the command found.

    Attributes:
        report: for JSON.
        text: for a terminal.
        config: the plans that are on, or that won.
        plan: the same as a plan file, where there is one.
        curve: what budgets cost.
        costs: where the curve's times are from.
        estimate: all that was predicted.
    """

    report: dict[str, Any] | list[dict[str, Any]]
    text: str
    config: str
    plan: Any = None
    curve: Sequence[Any] = ()
    costs: str = ""
    estimate: Any = None


def table_of(args: Any) -> Found:
    """One measurement, or one prediction."""
    case, options = case_of(args)
    if factory(options["memory_opt_engine"]).predicts:
        return _estimated(case.workload, MemOptOptions(**options), args)
    found = spawn(case)
    _log_once(found.remarks)
    report = {
        "table": asdict(found.engine_table),
        "peak_mib": found.peak_mib,
        "method": found.method,
        "step_seconds": found.step_seconds,
    }
    line = f"Measured peak of a step: {found.peak_mib:.1f} MiB ({found.method}), {found.step_seconds:.3f} s"
    return Found(report, f"{found.engine_table.to_text()}\n{line}", ",".join(sorted(found.applied)))


def _estimated(workload: Workload, options: MemOptOptions, args: Any) -> Found:
    resolved = resolve(options)
    with_curve = args.budget_curve is not None or args.html is not None
    found = factory(resolved.engine).estimate(
        workload,
        resolved.selection,
        symbolic=args.symbolic,
        device=args.device,
        with_curve=with_curve,
        compiler=args.compiler,
        autocast=autocast_of(args),
        optim=args.optim or DEFAULT,
        gradient_accumulation_steps=args.gradient_accumulation_steps or 1,
        batch_sizes=batch_sizes(args.batch_size),
    )
    config = ",".join(plan.config for plan in found.table.enabled)
    report: Any = [asdict(batch) for batch in found.batches] or found.to_dict()
    return Found(report, found.to_text(), config, found.plan, found.curve, found.costs, found)


def measured(args: Any) -> Found:
    """A sweep over plans, and the winner's config."""
    case, _ = case_of(args)
    case = replace(case, options={"memory_opt_engine": args.engine})
    max_runs = args.max_runs or 60
    with tqdm(total=max_runs, unit="run", desc="measuring", file=sys.stderr) as bar:

        def show(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        found = sweep(case, args.config, max_runs, show)
    _log_once(remark for run in found.runs if run.measurement for remark in run.measurement.remarks)
    return Found(found.to_dict(), found.to_text(), ",".join(sorted(found.winner.measured.applied)))


def _log_once(remarks: Iterable[str]) -> None:
    for remark in dict.fromkeys(remarks):
        get_logger().info(remark)
