"""A setting of a planned step is declared once; flags, keywords and the docs table have exactly these."""

import inspect
from argparse import ArgumentParser
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import optimum_memopt
from optimum_memopt import MemOptOptions
from optimum_memopt.commands import flags
from optimum_memopt.commands.memopt import AdviseCommand, PlanCommand
from optimum_memopt.memory import optimizers
from optimum_memopt.predict.workload import Workload
from optimum_memopt.step_settings import KEYWORDS, ModelSettings, PlanSettings, StepSpec, engine_options, flags_of

SETTINGS = {name: field for kind in (ModelSettings, StepSpec, PlanSettings) for name, field in flags_of(kind).items()}


def flags_in(command: type) -> set[str]:
    parser = ArgumentParser(add_help=False)
    command.parse_args(parser)
    return {flag.removeprefix("--") for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize(
    ("command", "kinds", "less"),
    [(PlanCommand, flags.OF_PLAN, ()), (AdviseCommand, flags.OF_ADVISE, flags.CHOSEN_BY_ADVISE)],
    ids=["plan", "advise"],
)
def test_a_command_has_the_flags_of_its_dataclasses(
    command: type, kinds: dict[str, type], less: tuple[str, ...]
) -> None:
    declared = {name for kind in kinds.values() for name in flags_of(kind)}
    assert flags_in(command) == declared - set(less)


def test_keywords_are_the_settings_with_their_defaults() -> None:
    parameters = dict(inspect.signature(optimum_memopt.plan).parameters)
    del parameters["example_inputs"]
    names = {field.name: KEYWORDS.get(field.name, field.name) for field in SETTINGS.values()}
    assert set(parameters) == set(names.values())
    for name, field in ((names[field.name], field) for field in SETTINGS.values()):
        # None: a module brings its own batch.
        assert parameters[name].default in (field.default, None) or field.default is MISSING, name
        assert field.metadata["help"] % () in (optimum_memopt.plan.__doc__ or ""), name


def test_the_page_has_every_setting() -> None:
    text = Path(flags.__file__).parents[2].joinpath("docs/plan.md").read_text(encoding="utf-8")
    assert [name for name in SETTINGS if f"| `--{name}` |" not in text] == []


def test_a_workload_and_an_engine_take_the_settings() -> None:
    assert [field.name for field in fields(Workload)] == [field.name for field in fields(ModelSettings)]
    taken = engine_options({field.name: None for field in SETTINGS.values()})
    assert taken.keys() <= {field.name for field in fields(MemOptOptions)} and len(taken) == 7
    assert StepSpec().optim == optimizers.DEFAULT
