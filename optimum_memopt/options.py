"""Every option of the package, once: the flags of the command line, the arguments of `attach` and of `optimize`.

`resolve` decides, once for a run, what they come to on this machine.
"""

import copy
import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from optimum_memopt import option_values
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.shared.registry import (
    AUTO,
    check_flags_of_others,
    choose_engines,
    engine_names,
    factory,
    given_flags,
    registrations,
)
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.logs import LOG_LEVELS, get_logger, set_log_level
from optimum_memopt.option_values import Numbers
from optimum_memopt.plans.grammar import ConfigSource, PlanConfig, to_text
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.sizes import Budget, parse_budget
from optimum_memopt.training.optimizers import OPTIMIZERS

ON_OOM = EXPLAIN, REPLAN = ("explain", "replan")
_LEVELS = Numbers(0, 2, "0 (the config), 1 (recompute in each layer) and 2 (also with compromised saving)")
_ENGINES = ", ".join(f"{engine.name} ({engine.summary})" for engine in registrations())
_OPTIMIZER_NEEDS = "; ".join(
    f"{name} needs {optimizer.needs}" for name, optimizer in OPTIMIZERS.items() if optimizer.needs
)


@dataclass
class PlanOptions:
    """What every engine reads: which engine trains the model under which plan, and what is shown of it.

    From Python `memory_opt_config` is also a list of `cluster_id:strategy:count`, a dict of cluster id to strategy
    (`{"Gelu+": 1}`, all occurrences) or to `strategy:count` (`{"Gelu+": "1:4"}`), the `Path` of a file, or a
    `PlanConfig`; `MemOptOptions.check` makes the flag's text of it.
    """

    memory_opt_engine: str = field(
        default="auto",
        metadata={
            "choices": (AUTO, *engine_names()),
            "help": f"What trains the model: {_ENGINES}, or auto: the first of them that works here.",
        },
    )
    memory_opt_config: ConfigSource | None = field(
        default=None,
        metadata={
            "help": "Plans to turn on, cluster_id:strategy:count separated by commas, or a JSON file with a list of "
            "such strings. Strategy: 0 none, 1 recompute, 2 recompute with compromised saving, 3 offload to the host "
            "(compile engine). Count: -1 all, 0 off, N the first N (compile engine). Example: Gelu+:1:-1. The plan "
            "table lists the cluster ids of your model."
        },
    )
    memory_opt_level: Annotated[int, _LEVELS] = field(
        default=0,
        metadata={
            "help": "0: the plans of --memory_opt_config. 1: all recomputable plans inside each transformer layer, "
            "less those that would raise the peak. 2: also those with compromised saving. Not together with a config."
        },
    )
    memory_opt_strict: bool = field(
        default=True,
        metadata={"help": "Stop at a cluster id that the model does not have; false: warn and go on without it."},
    )
    memory_opt_log_level: str = field(
        default="info",
        metadata={
            "choices": tuple(LOG_LEVELS),
            "help": "info: the plan table, on rank 0. devinfo: also each node as the engine sees it, on all ranks, "
            "and a line for each memory phase. verbose: also the engine's own log.",
        },
    )
    log_input_density: bool = field(
        default=False,
        metadata={"help": "Log the share of input and label tokens that is not padding, for each step that is shown."},
    )
    log_memory_phases: bool = field(
        default=False,
        metadata={
            "help": "Log memory held and peak memory before and after forward and backward and after the optimizer."
        },
    )
    memory_opt_log_steps: Annotated[int, Numbers(0)] = field(
        default=0,
        metadata={
            "help": "Steps of which trackers and the log file get density and phases: 0 for steps 0-9 and then powers "
            "of two (the console shows 0, 1, 2, 4, 8, ...), or every N."
        },
    )
    memory_opt_log_file: os.PathLike | str | None = field(
        default=None, metadata={"help": "Also append all findings to this file, one JSON object a line."}
    )
    memory_opt_report: os.PathLike | str | None = field(
        default=None,
        metadata={
            "help": "When training ends, however it ends, write a page about its memory to this HTML file: the step "
            "operator by operator, predicted beside measured phases, the plan table. Measures memory phases as "
            "--log_memory_phases does. Needs the extra report."
        },
    )
    memory_opt_optim: str | None = field(
        default=None,
        metadata={
            "choices": tuple(OPTIMIZERS),
            "help": "AdamW of another library, with Trainer's learning rate, betas, epsilon and weight decay, instead "
            f"of --optim. {_OPTIMIZER_NEEDS}.",
        },
    )
    memory_opt_on_oom: str = field(
        default=EXPLAIN,
        metadata={
            "choices": ON_OOM,
            "help": "When a training step runs out of memory. explain: log what was held and what would have fit, "
            "write memory_report.json into --output_dir, and stop with the same error. replan: plan for what there "
            "is, run the same step again and go on, at most three times; compile engine, not with DeepSpeed.",
        },
    )
    group_by_complexity: bool = field(
        default=False,
        metadata={
            "help": "Give all ranks samples of nearly the same length in each step, so that none waits for the "
            "slowest. Lengths: the column --length_column_name, else attention_mask, else input_ids."
        },
    )


if TYPE_CHECKING:
    from optimum_memopt.engines.compile.options import CompileOptions
    from optimum_memopt.engines.ort.options.flags import OrtOptions

    @dataclass
    class _EngineOptions(OrtOptions, CompileOptions, PlanOptions):
        pass
else:
    # Fields of the last base come first, in `--help` too.
    _bases = (*(registration.options for registration in registrations()), PlanOptions)
    _EngineOptions = make_dataclass("_EngineOptions", (), bases=_bases)


@dataclass
class MemOptOptions(_EngineOptions):
    """Every option of the package: `PlanOptions` and the options of each engine.

    Raises:
        MemOptError: from `check`; nothing is read but a config file, and that once.
    """

    @property
    def plan_config(self) -> PlanConfig | None:
        """`memory_opt_config`, read; a file is read the first time.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.memory_opt_config is None:
            return None
        text = to_text(self.memory_opt_config)
        return self._read(f"config {text}", lambda: PlanConfig.load(text))

    @property
    def plan_file(self) -> PlanFile | None:
        """`memory_opt_plan`, read the first time.

        Raises:
            MemOptError: it cannot be read.
        """
        path = self.memory_opt_plan
        return None if path is None else self._read(f"plan {path}", lambda: PlanFile.load(Path(path)))

    def _read(self, name: str, read: Callable[[], Any]) -> Any:
        # No field, so that it is neither a flag nor serialised; shallow copies share it.
        found: dict[str, Any] = vars(self).setdefault("_files", {})
        if name not in found:
            found[name] = read()
        return found[name]

    @property
    def budget(self) -> Budget | None:
        """`memory_opt_budget`, read.

        Raises:
            MemOptError: it is no size, share or `auto`.
        """
        return None if self.memory_opt_budget is None else parse_budget(self.memory_opt_budget)

    def check(self, environ: Mapping[str, str] = os.environ) -> None:
        """Find everything that is wrong before a model or data is loaded.

        Raises:
            MemOptError: one line that names the option, or an engine's variable in the environment, and what is
                allowed.
        """
        self.check_values()
        for name in self._engines:
            factory(name).in_force(self, environ)

    def check_values(self) -> None:
        """`check` without the environment."""
        config = self.memory_opt_config
        option_values.check(self, MemOptOptions)
        if config is not None:
            self.memory_opt_config = to_text(config)
        self._check_one_chooses()
        if self.memory_opt_report is not None:
            option_values.check_page("--memory_opt_report", str(self.memory_opt_report))
        # A mistake in them is an error whichever engine trains.
        _ = self.plan_config, self.plan_file
        if self.memory_opt_engine != AUTO:
            check_flags_of_others(self, self.memory_opt_engine)
        for name in self._engines:
            factory(name).check_options(self)

    def _check_one_chooses(self) -> None:
        given = (
            ("a plan file", "--memory_opt_plan", self.memory_opt_plan is not None),
            ("a budget", f"--memory_opt_budget {self.memory_opt_budget}", self.budget is not None),
            ("a level", f"--memory_opt_level {self.memory_opt_level}", bool(self.memory_opt_level)),
            ("a config", "--memory_opt_config", self.memory_opt_config is not None),
        )
        chosen = [(kind, flag) for kind, flag, is_given in given if is_given]
        if len(chosen) > 1:
            (kind, flag), (_, other), *_ = chosen
            raise MemOptError(f"{flag} together with {other}: {kind} chooses the plans itself; give one of the two")

    @property
    def _engines(self) -> tuple[str, ...]:
        """Those that may train the model."""
        return engine_names() if self.memory_opt_engine == AUTO else (self.memory_opt_engine,)


@dataclass(frozen=True)
class Resolved:
    """What trains the model under which plan: decided once, the same for everyone who asks later.

    Attributes:
        engine: its name.
        reason: why this one.
        options: those in force: the user's, as the engine's variables in the environment change them.
        config: the plans that were asked for by name.
        remarks: a line for each variable of the environment that counts; not logged yet.
        given: flags of this engine alone that the user gave.
        then: what takes over if this engine turns out unable to train the model; None: nothing.
    """

    engine: str
    reason: str
    options: MemOptOptions
    config: PlanConfig | None
    remarks: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    then: "Resolved | None" = None

    @property
    def selection(self) -> Selection:
        """The plans, for the engine."""
        options = self.options
        return Selection(
            self.config, options.memory_opt_level, options.memory_opt_strict, options.budget, options.plan_file
        )

    def log(self) -> None:
        """Log the remarks, at the log level that is in force from now on."""
        set_log_level(self.options.memory_opt_log_level)
        for remark in self.remarks:
            get_logger().warning(remark)


def resolve(options: MemOptOptions, environ: Mapping[str, str] = os.environ) -> Resolved:
    """Decide what trains the model under which plan; `options`, which are checked already, stay as they are.

    Raises:
        MemOptError: no engine that works here does what the options ask for.
    """
    names, reason = choose_engines(options.memory_opt_engine, options)
    check_flags_of_others(options, names[0])
    following = _resolved(names[1], "", options, environ, None) if len(names) > 1 else None
    return _resolved(names[0], reason, options, environ, following)


def _resolved(
    name: str, reason: str, options: MemOptOptions, environ: Mapping[str, str], then: Resolved | None
) -> Resolved:
    in_force, remarks = factory(name).in_force(copy.copy(options), environ)
    given = tuple(given_flags(options, name))
    return Resolved(name, reason, in_force, in_force.plan_config, remarks, given, then)


def from_keywords(**options: Any) -> MemOptOptions:
    """The options of `attach` and `optimize`, not yet checked.

    Raises:
        MemOptError: a name that is no field of `MemOptOptions`; near names come with it.
    """
    names = [option.name for option in fields(MemOptOptions)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; see optimum_memopt.MemOptOptions"
            raise MemOptError(f"there is no option {excerpt(name)}{hint}")
    return MemOptOptions(**options)
