"""Defines every option of the package: the command-line flags, and the arguments of `attach` and `optimize`.

`resolve` decides, once for a run, which engine and plan they select on this machine.
"""

import copy
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

from optimum_memopt import option_values
from optimum_memopt.engines.api.run import AUTO, EngineOptions, Resolved, Selection
from optimum_memopt.engines.shared.optimizers import OPTIMIZERS
from optimum_memopt.engines.shared.registry import (
    check_flags_of_others,
    choose_engines,
    engine_names,
    factory,
    given_flags,
    predicting_factory,
    registrations,
)
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.option_values import Numbers, flag
from optimum_memopt.plans.grammar import to_text

_ENGINES = ", ".join(f"{engine.name} ({engine.summary})" for engine in registrations())
_OPTIMIZER_NEEDS = "; ".join(f"{name} needs {each.needs}" for name, each in OPTIMIZERS.items() if each.needs)


@dataclass
class RunOptions(EngineOptions):
    """The options of a Trainer: logs, callbacks, optimizer, sampler."""

    log_input_density: bool = flag(
        False, "Log the share of input and label tokens that is not padding, for each reported step."
    )
    log_memory_phases: bool = flag(
        False, "Log memory held and peak memory before and after forward and backward and after the optimizer."
    )
    memory_opt_log_steps: Annotated[int, Numbers(0)] = flag(
        0,
        "Steps whose density and phases go to trackers and the log file. 0: steps 0-9 and then powers of two (the "
        "console shows 0, 1, 2, 4, 8, ...); N: every N steps.",
    )
    memory_opt_log_file: os.PathLike | str | None = flag(
        None, "Also append all results to this file, one JSON object per line."
    )
    memory_opt_optim: str | None = flag(
        None,
        "AdamW of another library, with Trainer's learning rate, betas, epsilon and weight decay, instead "
        f"of --optim. {_OPTIMIZER_NEEDS}.",
        choices=tuple(OPTIMIZERS),
    )
    memory_opt_dry_run: str | None = flag(
        None,
        "Do not train: show the memory of each phase of the run with plain PyTorch on this device, such as h100 or a "
        "JSON file, and end the script. Needs no GPU.",
    )
    group_by_complexity: bool = flag(
        False,
        "Give all ranks samples of nearly the same length in each step, so that none waits for the slowest. Lengths: "
        "column --length_column_name, else attention_mask, else input_ids.",
    )


if TYPE_CHECKING:
    from optimum_memopt.engines.compile.options import CompileOptions

    # A type checker does not know the flags of other engines.
    @dataclass
    class _AllOptions(CompileOptions, RunOptions, Any):
        pass
else:
    # Fields of the last base come first, in `--help` too.
    _bases = (*(registration.options for registration in registrations()), RunOptions)
    _AllOptions = make_dataclass("_AllOptions", (), bases=_bases)


@dataclass
class MemOptOptions(_AllOptions):
    """Every option of the package, including those of each engine; `check` validates them."""

    memory_opt_engine: str = flag(
        AUTO,
        f"The engine that trains the model: {_ENGINES}, or auto: the first that works here.",
        choices=(AUTO, *engine_names()),
    )

    def check(self, environ: Mapping[str, str] = os.environ) -> None:
        """Validate all options before a model or data is loaded.

        Raises:
            MemOptError: an invalid option or environment variable of an engine; one line with its name and what is
                allowed.
        """
        self.check_values()
        for name in self._engines:
            factory(name).in_force(self, environ)

    def check_values(self) -> None:
        """Validate all options, but not the environment."""
        config = self.memory_opt_config
        option_values.check(self, MemOptOptions)
        if config is not None:
            self.memory_opt_config = to_text(config)
        self._check_one_chooses()
        if self.memory_opt_report is not None:
            option_values.check_page("--memory_opt_report", str(self.memory_opt_report))
        if self.memory_opt_dry_run is not None:
            try:
                predicting_factory().planned_device(self.memory_opt_dry_run)
            except MemOptError as error:
                raise MemOptError(f"--memory_opt_dry_run: {error}") from error
            if self.memory_opt_batch is not None:
                raise MemOptError(
                    f"--memory_opt_dry_run with --memory_opt_batch {self.memory_opt_batch}: a dry run shows the "
                    "micro-batch of --per_device_train_batch_size, in plain PyTorch; leave out one of them"
                )
        # Parse both: a mistake in them is an error whichever engine trains.
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
            raise MemOptError(f"{flag} together with {other}: {kind} chooses the plans itself; give only one")

    @property
    def _engines(self) -> tuple[str, ...]:
        return engine_names() if self.memory_opt_engine == AUTO else (self.memory_opt_engine,)


def resolve(options: MemOptOptions, environ: Mapping[str, str] = os.environ) -> Resolved[MemOptOptions]:
    """Decide which engine trains the model under which plan; the options, already checked, are not changed.

    Raises:
        MemOptError: no engine that works here supports the options.
    """
    names, reason = choose_engines(options.memory_opt_engine, options)
    check_flags_of_others(options, names[0])

    def resolved(name: str, reason: str, then: Resolved[MemOptOptions] | None) -> Resolved[MemOptOptions]:
        chosen, remarks = factory(name).in_force(copy.copy(options), environ)
        level, strict = chosen.memory_opt_level, chosen.memory_opt_strict
        compress = chosen.memory_opt_compress
        selection = Selection(chosen.plan_config, level, strict, chosen.budget, chosen.plan_file, compress)
        return Resolved(name, reason, chosen, selection, remarks, tuple(given_flags(options, name)), then)

    return resolved(names[0], reason, resolved(names[1], "", None) if len(names) > 1 else None)


def from_keywords(**options: Any) -> MemOptOptions:
    """Returns the options of `attach` and `optimize`, not yet checked.

    Raises:
        MemOptError: a name is no field of `MemOptOptions`; suggests similar names.
    """
    names = [option.name for option in fields(MemOptOptions)]
    for name in options:
        if name not in names:
            prefixed = f"memory_opt_{name}"
            near = [prefixed] if prefixed in names else difflib.get_close_matches(name, names, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; see optimum_memopt.MemOptOptions"
            raise MemOptError(f"there is no option {excerpt(name)}{hint}")
    return MemOptOptions(**options)
