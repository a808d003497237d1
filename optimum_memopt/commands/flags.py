"""Defines the command-line flags of `memopt plan` and `memopt advise`; step settings come from `step_settings`.

Nothing heavy is imported before a command runs.
"""

from argparse import ArgumentParser
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, Field, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

from optimum_memopt.errors import excerpt, flags_named
from optimum_memopt.option_values import Numbers, checked, flag, without_numbers
from optimum_memopt.sizes import AUTO
from optimum_memopt.step_settings import (
    COUNTS,
    ModelSettings,
    PlanSettings,
    StepSpec,
    engine_options,
    flags_of,
    setting_of,
)

if TYPE_CHECKING:
    from optimum_memopt.options import MemOptOptions
    from optimum_memopt.predict.workload import Workload

_COUNT = Annotated[int | None, COUNTS]
Settings = TypeVar("Settings")
ALL, PLAIN = "all", "plain"
# Flags that the help shows before all groups.
_FIRST = ("model", "batch_size", "device", "budget", "global_batch")


@dataclass(frozen=True)
class PlanFlags:
    """Engine and output of `memopt plan`."""

    engine: str = flag(AUTO, "Same values as --memory_opt_engine (default: auto).")
    ways: str = flag(
        ALL,
        "What to compare. plain: plain PyTorch and Trainer's checkpointing, in two seconds. all (default): also the "
        "compile engine without a plan, with level 1 and with the selected plan.",
        choices=(ALL, PLAIN),
    )
    symbolic: bool = flag(
        False, "compile engine: show savings as formulas in batch size and sequence length; several times slower."
    )
    budget_curve: str | None = flag(
        None,
        "Show the time cost of ten budgets, from the smallest possible to no plan; given the name of an .svg or .png "
        "file, also draw a picture (pip install optimum-memopt[report]).",
        nargs="?",
        const="",
        metavar="PICTURE",
    )
    at_peak: bool = flag(
        False,
        "compile engine: list the tensors at the predicted peak, by category, row of the plan table or operator, and "
        "module; their bytes add up to the peak.",
    )
    html: str | None = flag(
        None,
        "Also write an HTML page: memory of the step by operator, tensors at its peak, cost of ten budgets, and the "
        "plan table (pip install optimum-memopt[report]). Solves for each of these budgets.",
        metavar="FILE",
    )
    output: str | None = flag(
        None,
        "Write the enabled plans, or the best ones measured, as a JSON list for --memory_opt_config; with --budget "
        "or --compress, write a plan file for --memory_opt_plan.",
    )
    json: bool = flag(False, "Print JSON instead of tables.")


@dataclass(frozen=True)
class MeasureFlags:
    """Measurements of `memopt plan`."""

    measure: bool = flag(
        False,
        "Measure no plan, each row of the plan table and both levels, each in a fresh process, and search for the set "
        "of rows with the lowest peak. Takes minutes: 10 to 30 seconds per process.",
    )
    steps: _COUNT = flag(None, "Steps to measure after the first step, which compiles (default: 2).")
    max_runs: _COUNT = flag(None, "With --measure: maximum number of processes to start (default: 60).")


@dataclass(frozen=True)
class AdviseFlags:
    """Search and output of `memopt advise`."""

    budget: str = flag(AUTO, "Memory limit of a step, such as 24GiB or 90%% (default: auto, the free memory).")
    global_batch: _COUNT = flag(
        None,
        "Rows of an optimizer step on one device, divided into equal micro-batches. Default: micro-batches of any "
        "size, each its own optimizer step.",
    )
    compress: str | None = flag(
        None, "fp8: also compare plans that save activations in fp8 (inexact), like --memory_opt_compress."
    )
    json: bool = flag(False, "Print JSON instead of a table.")


# Dataclasses of flags, by the titles of their groups in the help.
_OF_STEP = {"model and batch": ModelSettings, "training": StepSpec}
OF_PLAN = {
    **_OF_STEP,
    "plan, instead of a budget": PlanSettings,
    "engine and output": PlanFlags,
    "measurement in fresh processes, instead of a prediction": MeasureFlags,
}
OF_ADVISE = {**_OF_STEP, "output": AdviseFlags}
CHOSEN_BY_ADVISE = ("batch_size", "gradient_accumulation_steps", "loss")


def add_flags(parser: ArgumentParser, kinds: Mapping[str, type], without: Collection[str] = ()) -> None:
    """Add the flags of dataclasses to a parser, except `without`; keys of `kinds` are the titles of groups."""
    for title, kind in kinds.items():
        titled = parser.add_argument_group(title)
        for name, field in flags_of(kind).items():
            given = {key: value for key, value in field.metadata.items() if key != "allowed"}
            if isinstance(field.default, bool):
                given["action"] = "store_false" if field.default else "store_true"
            else:
                given = {"type": int if _numbers(field) else str, "required": field.default is MISSING, **given}
            if name not in without:
                group: Any = parser if name in _FIRST else titled
                group.add_argument(f"--{name}", dest=field.name, default=field.default, **given)


def _numbers(field: "Field[Any]") -> Numbers | None:
    """Returns the range of a number field; None for other fields."""
    hint, numbers = without_numbers(field.type)
    return numbers if int in (get_args(hint) or (hint,)) else None


def given_flags(args: Any) -> dict[str, str]:
    """Returns the flags with other values than their defaults, by name, as text of the command line."""
    given = {}
    for name, field in (each for kind in OF_PLAN.values() for each in flags_of(kind).items()):
        value = getattr(args, field.name, field.default)
        if value != field.default:
            text = ",".join(value) if isinstance(value, tuple) else value
            given[name] = f"--{name}" if isinstance(value, bool) else f"--{name} {excerpt(text)}"
    return given


def read(kind: type[Settings], args: Any, **others: Any) -> Settings:
    """Returns an instance of `kind` with the values of its flags."""
    given = {field.name: getattr(args, field.name) for field in flags_of(kind).values() if hasattr(args, field.name)}
    return kind(**{**given, **others})


def check_numbers(args: Any, kind: type) -> None:
    """Raise a MemOptError for a number outside of its flag's range."""
    for name, field in flags_of(kind).items():
        value = getattr(args, field.name, None)
        if value is not None and _numbers(field) is not None:
            checked(f"--{name}", value, field.type)


def workload_of(args: Any, rows: int = 8) -> "Workload":
    """Returns the model and a batch of `rows` rows, checked without loading the model. Raises MemOptError."""
    from optimum_memopt.predict.workload import Workload

    return read(Workload, args, batch_size=rows).checked()


def spec_of(args: Any) -> StepSpec:
    """Returns the settings under which the step runs.

    Raises:
        MemOptError: an unknown optimizer, numbers out of range, or conflicting settings.
    """
    from optimum_memopt.memory import optimizers

    check_numbers(args, StepSpec)
    spec = read(StepSpec, args)
    spec.check("--")
    optimizers.check(spec.optim)
    return spec


def checked_options(args: Any, engine: str) -> "MemOptOptions":
    """Returns the engine options set by the flags.

    Raises:
        MemOptError: an invalid option; one line, with the command's shorter flag names.
    """
    from optimum_memopt.options import MemOptOptions

    chosen = MemOptOptions(memory_opt_engine=engine, **engine_options(vars(args)))
    with short_flags():
        chosen.check()
    return chosen


def short_flags() -> AbstractContextManager[None]:
    """Returns a context in which errors name options by the command's flags, without `memory_opt_`."""
    return flags_named(lambda flag: f"--{setting_of(flag)}")
