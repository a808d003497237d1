"""Implements `optimum-cli memopt plan`; arguments are checked before anything is traced or run."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from optimum_memopt.cache_files import write_file
from optimum_memopt.commands import flags
from optimum_memopt.commands.flags import PLAIN, MeasureFlags
from optimum_memopt.engines.api.predictions import StepTimeline, Way, fits_cell
from optimum_memopt.engines.shared.registry import choose_engines, factory, predicting_engine
from optimum_memopt.errors import MemOptError, excerpt, path_excerpt, reason_of
from optimum_memopt.logs import get_logger
from optimum_memopt.measure import Case, spawn, sweep
from optimum_memopt.memory.capacity import Capacity
from optimum_memopt.option_values import check_page, check_written
from optimum_memopt.options import MemOptOptions, resolve
from optimum_memopt.plans.grammar import parse
from optimum_memopt.predict.workload import Workload, warn_of_precision
from optimum_memopt.report import charts
from optimum_memopt.sizes import AUTO, gib_text
from optimum_memopt.step_settings import (
    COUNTS,
    MEASURED,
    ModelSettings,
    PlanSettings,
    StepSpec,
    engine_options,
    flags_of,
)

_OF_PLAN = tuple(flags_of(PlanSettings))
# Flags that need a single batch size, and why.
_OF_ONE_SIZE = {
    **dict.fromkeys(("budget", "budget_curve", "html"), "each size has its own plan"),
    "at_peak": "each size has its own peak",
}
# Flags that only a prediction takes: about a device and its peak, and about the step (`_OF_STEP`).
_OF_DEVICE = ("device", "budget_curve", "html", "at_peak")
_MEASURED = {*MEASURED, "device", "compiler"}
_OF_STEP = [name for kind in (StepSpec, ModelSettings) for name in flags_of(kind) if name not in _MEASURED]
# Flags that conflict with --ways plain, and with --measure.
_OF_ENGINE = (*_OF_PLAN, "loss", "compiler", "budget_curve", "output", "measure", "fsdp")
_OF_PREDICTION = (*(name for name in _OF_PLAN if name not in ("level", "config")), "compiler", *_OF_DEVICE)
_NUMBER = re.compile(r"[1-9][0-9]*")
# Longer numbers of --batch_size are rejected at once; shorter ones reach the error about a step of too many tokens.
_MOST_DIGITS = 19


def case_of(args: Any) -> Case:
    """Returns the case to measure or predict, after all checks that need no model.

    Raises:
        MemOptError: a check fails; the message is one line.
    """
    sizes = batch_sizes(args.batch_size)
    workload, given = flags.workload_of(args, max(sizes)), flags.given_flags(args)
    flags.spec_of(args)
    _check(args, sizes, given)
    engine = args.engine
    asks_for_prediction = len(sizes) > 1 or args.ways == PLAIN or given.keys() & {*_OF_DEVICE, *_OF_STEP}
    if engine == AUTO and not args.measure and asks_for_prediction:
        engine = predicting_engine()
    (name, *_), _ = choose_engines(engine, flags.checked_options(args, engine))
    if args.measure or not factory(name).predicts:
        _check_measured(args, name, sizes, given)
    elif args.steps is not None:
        raise MemOptError(
            f"--steps {args.steps}: the {name} engine predicts without running steps; leave it out, or add --measure"
        )
    return Case(workload, {"memory_opt_engine": name, **engine_options(vars(args))}, steps=args.steps or 2)


def _refuse(given: Mapping[str, str], names: Iterable[str], why: str) -> None:
    """Raise a MemOptError for the first of these flags that was given."""
    for name in names:
        if name in given:
            raise MemOptError(f"--{name}{why}")


def _check_measured(args: Any, engine: str, sizes: Sequence[int], given: Mapping[str, str]) -> None:
    """Reject flags that only a prediction takes. Raises MemOptError."""
    _refuse(given, _OF_DEVICE, f": the {engine} engine is measured on this machine, not predicted; leave it out")
    for name in _OF_STEP:
        if name in given:
            raise MemOptError(f"{given[name]}: used only in predictions, and this step is measured; leave it out")
    if len(sizes) > 1:
        raise MemOptError(f"--batch_size {args.batch_size}: several sizes can only be predicted; give one")
    if args.symbolic:
        raise MemOptError(f"--symbolic: only the {predicting_engine()} engine predicts formulas; leave it out")


def batch_sizes(text: str | int) -> tuple[int, ...]:
    """Returns the numbers of `--batch_size`, in ascending order.

    Raises:
        MemOptError: one is not a positive whole number, or is far too large.
    """
    numbers = [part.strip() for part in str(text).split(",")]
    if not all(_NUMBER.fullmatch(number) for number in numbers):
        raise MemOptError(f"--batch_size {excerpt(text)}: allowed: {COUNTS}, several as 1,2,4,8")
    if max(map(len, numbers)) > _MOST_DIGITS:
        raise MemOptError(f"--batch_size {excerpt(text)}: allowed: {COUNTS}")
    return tuple(sorted({int(number) for number in numbers}))


def _check(args: Any, sizes: Sequence[int], given: Mapping[str, str]) -> None:
    """Reject conflicting arguments, and files that cannot be written. Raises MemOptError."""
    flags.check_numbers(args, MeasureFlags)
    if args.max_runs is not None and not args.measure:
        raise MemOptError(f"--max_runs {args.max_runs} needs --measure, whose processes it limits; leave it out")
    if args.ways == PLAIN:
        _refuse(given, _OF_ENGINE, " with --ways plain: it applies only to an engine; leave out one of them")
        if args.symbolic or len(sizes) > 1:
            several = "--symbolic" if args.symbolic else f"--batch_size {args.batch_size}"
            raise MemOptError(
                f"{several} with --ways plain: plain PyTorch is predicted for one batch size; leave out one of them"
            )
    for name, reason in _OF_ONE_SIZE.items():
        if len(sizes) > 1 and name in given:
            raise MemOptError(
                f"--batch_size {args.batch_size} with --{name}: {reason}; give one size, or compare sizes with "
                "optimum-cli memopt advise"
            )
    if args.measure and args.level:
        raise MemOptError(f"--level {args.level} with --measure: both levels are measured anyway; leave it out")
    if args.output and not (given.keys() & {*_OF_PLAN, "measure"} - {"plan"}):
        raise MemOptError(
            "--output: no plan is selected to write; give --config, --level, --budget, --compress or --measure"
        )
    if args.measure:
        _refuse(given, _OF_PREDICTION, " with --measure: rows and levels are measured on this machine; leave it out")
    if args.budget_curve is not None and given.keys() & {*_OF_PLAN}:
        raise MemOptError(
            "--budget_curve covers all budgets; leave out --config, --level, --budget, --plan and --compress"
        )
    if args.budget_curve:
        check_written("--budget_curve", args.budget_curve)
        charts.check(Path(args.budget_curve))
    if args.output is not None:
        check_written("--output", args.output)
    if args.html is not None:
        check_page("--html", args.html)


@dataclass(frozen=True)
class PlanOutput:
    """The results of the command.

    Attributes:
        config: the plans that are on, or the best ones measured.
        estimate: the prediction; None if measured, or if only plain PyTorch is predicted.
        ways: the ways to train that were compared.
    """

    report: dict[str, Any] | list[dict[str, Any]]
    text: str
    config: str
    estimate: Any = None
    ways: Sequence[Way] = ()


def table_of(args: Any) -> PlanOutput:
    case = case_of(args)
    options = MemOptOptions(**(case.options or {}))
    if factory(options.memory_opt_engine).predicts:
        return _estimated(case.workload, options, args)
    run = spawn(case)
    _log_once(run.remarks)
    report = {
        "table": asdict(run.engine_table),
        "peak_mib": run.peak_mib,
        "method": run.method,
        "step_seconds": run.step_seconds,
    }
    line = f"Measured peak of a step: {run.peak_mib:.1f} MiB ({run.method}), {run.step_seconds:.3f} s"
    return PlanOutput(report, f"{run.engine_table.to_text()}\n{line}", ",".join(sorted(run.applied)))


def _estimated(workload: Workload, options: MemOptOptions, args: Any) -> PlanOutput:
    resolved = resolve(options)
    sizes = batch_sizes(args.batch_size)
    spec = flags.spec_of(args)
    engine = factory(resolved.engine)
    device = engine.planned_device(spec.device)
    warn_of_precision(device, spec.autocast, workload)
    # Plain PyTorch is simulated on one device only.
    has_plain = len(sizes) == 1 and spec.fsdp == 1
    plain = engine.plain_ways(workload, spec) if has_plain else ()
    header = _header(workload, spec)
    if args.ways == PLAIN:
        only: dict[str, Any] = {"ways": _ways_dict(plain, device.memory)}
        text = _ways_text(plain, header, device.memory)
        if args.at_peak:
            text += _at_peak(only, plain[0].timeline, plain[0].peak)
        return PlanOutput(only, text, "", ways=plain)
    estimate = engine.estimate(
        workload,
        resolved.selection,
        spec,
        symbolic=args.symbolic,
        with_curve=args.budget_curve is not None or args.html is not None,
        with_ways=bool(plain),
        batch_sizes=sizes,
    )
    config = ",".join(plan.config for plan in estimate.table.enabled)
    if estimate.batches:
        return PlanOutput([asdict(batch) for batch in estimate.batches], estimate.to_text(), config, estimate)
    ways = (*plain, *estimate.ways)
    report = estimate.to_dict() | ({"ways": _ways_dict(ways, device.memory)} if ways else {})
    shown = _ways_text(ways, header, device.memory) if ways else header
    if spec.fsdp > 1:
        twice = engine.estimate(workload, resolved.selection, replace(spec, fsdp=2 * spec.fsdp))
        shown += f"\n{ranks_text(spec.fsdp, estimate.peak, twice.peak)}"
        report["twice_the_ranks"] = {"ranks": 2 * spec.fsdp, "peak": twice.peak}
    text = f"{shown}\n\n{estimate.to_text()}"
    if args.at_peak:
        text += _at_peak(report, estimate.timeline, estimate.peak)
    return PlanOutput(report, text, config, estimate, ways)


def _at_peak(report: dict[str, Any], timeline: StepTimeline | None, peak: int) -> str:
    """Add the tensors at the peak to a report; returns their table as text, empty if there is no timeline."""
    if timeline is None:
        return ""
    report["at_peak"] = [{**asdict(group), "where": group.where} for group in timeline.at_peak(peak)]
    return f"\n\n{timeline.peak_text(peak)}"


def ranks_text(ranks: int, peak: int, of_twice: int) -> str:
    """Returns a line that compares `ranks` and twice as many ranks; peaks are bytes per rank."""
    less = peak - of_twice
    change = f"{gib_text(abs(less))} {'less' if less > 0 else 'more'} than" if less else "the same as"
    return f"{2 * ranks} ranks: predicted peak {gib_text(of_twice)} per rank, {change} with {ranks}"


def _header(workload: Workload, spec: StepSpec) -> str:
    tokens = f" of {workload.seq_len} tokens" if workload.tokens else ""
    padding = "" if workload.padding or not tokens else " without padding"
    autocast = f", autocast to {spec.autocast}" if spec.autocast else ""
    adapter = f", adapter {workload.peft}" if workload.peft else ""
    quantized = f" quantized to {workload.quantize}" if workload.quantize else ""
    sharded = f", one of {spec.fsdp} ranks under FSDP2" if spec.fsdp > 1 else ""
    if sharded and autocast:
        sharded += ", trainable parameters held in float32"
    micro_batches = (
        f", {spec.gradient_accumulation_steps} micro-batches" if spec.gradient_accumulation_steps > 1 else ""
    )
    weights = f"weights in {workload.weights_dtype}{quantized}{adapter}{autocast}{sharded}"
    return (
        f"{workload.task}, {workload.batch_size} rows{tokens}{padding}{micro_batches}, {weights}, {spec.optim}, on "
        f"{spec.device or 'this machine'}:"
    )


def _ways_text(ways: Sequence[Way], header: str, memory: Capacity) -> str:
    """Returns a table with a row for each way to train, and the memory that the first one holds at its peak."""
    has_reserved = any(way.reserved is not None for way in ways)
    has_time = any(way.seconds is not None for way in ways)
    rows = [
        {
            "way to train": way.plan.name,
            "loss": "chunked" if way.plan.chunks_loss else "plain",
            "predicted peak": "-" if way.note else gib_text(way.peak),
            **fits_cell(memory, None if way.note else way.peak),
            **({"reserved": "-" if way.reserved is None else gib_text(way.reserved)} if has_reserved else {}),
            **({"time": "-" if way.seconds is None else f"{1000 * way.seconds:.0f} ms"} if has_time else {}),
            "flags": " ".join(way.plan.flags) or "-",
        }
        for way in ways
    ]
    grid = tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True)
    notes = [f"{way.plan.name}: {way.note}" for way in ways if way.note]
    first = ways[0]
    held = () if first.timeline is None else ("", first.timeline.held_text(first.plan.name))
    return "\n".join((header, grid, *notes, *held))


def _ways_dict(ways: Sequence[Way], memory: Capacity) -> list[dict[str, Any]]:
    """Returns the ways to train for JSON, in bytes and seconds."""
    return [
        {
            "name": way.plan.name,
            "chunked_loss": way.plan.chunks_loss,
            "peak": way.peak or None,
            "fits": None if way.note else way.peak <= memory.available,
            "reserved": way.reserved,
            "seconds": way.seconds,
            "flags": list(way.plan.flags),
            "note": way.note,
        }
        for way in ways
    ]


def measured(args: Any) -> PlanOutput:
    """Run a sweep over plans; returns its results and the winner's config."""
    case = replace(case_of(args), options={"memory_opt_engine": args.engine})
    max_runs = args.max_runs or 60
    with tqdm(total=max_runs, unit="run", desc="measuring", file=sys.stderr) as bar:

        def show(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        result = sweep(case, args.config, max_runs, show)
    _log_once(remark for run in result.runs if run.measurement for remark in run.measurement.remarks)
    return PlanOutput(result.to_dict(), result.to_text(), ",".join(sorted(result.winner.measured.applied)))


def _log_once(remarks: Iterable[str]) -> None:
    for remark in dict.fromkeys(remarks):
        get_logger().info(remark)


def _save_page(args: Any, result: PlanOutput) -> None:
    # Imported here, since it imports transformers' Trainer, see `engines/shared/label_smoothing.py`.
    from optimum_memopt.report.page import of_estimate, of_way, render

    data = of_way(result.ways[0], args.model) if args.ways == PLAIN else of_estimate(result.estimate, args.model)
    render(data).save(args.html)


def run(args: Any) -> None:
    with flags.short_flags():
        result = measured(args) if args.measure else table_of(args)
    print(json.dumps(result.report, indent=2) if args.json else result.text)
    if args.budget_curve:
        charts.draw(result.estimate.frontier, Path(args.budget_curve))
    if args.html:
        _save_page(args, result)
    # A level in fp8 recomputes some activations of an id and compresses others, which a config cannot express.
    if args.output and (args.budget or args.compress):
        result.estimate.plan.save(args.output)
    elif args.output:
        _write(args.output, result.config)


def _write(path: str, config: str) -> None:
    if not config:
        raise MemOptError(f"--output {path}: nothing to write, since no plan is enabled")
    try:
        write_file(path, f"{parse(config).to_json()}\n".encode())
    except (OSError, ValueError) as error:
        raise MemOptError(
            f"--output {path_excerpt(path)}: not written: {reason_of(error)}; the enabled plans are {config}"
        ) from error
