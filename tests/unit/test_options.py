"""Options as flags and from Python: an error is one line with the option and its allowed values."""

import copy
import json
import pickle
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

from optimum_memopt import MemOptError, MemOptOptions, MemOptTrainingArguments, PlanConfig, attach
from optimum_memopt.distributed import facts
from optimum_memopt.engines.compile.options import CompileOptions
from optimum_memopt.engines.ort.compat import installation
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.engines.shared.registry import create
from optimum_memopt.errors import excerpt
from optimum_memopt.options import from_keywords, resolve
from optimum_memopt.plans import grammar
from optimum_memopt.plans.grammar import ConfigError
from optimum_memopt.plans.plan_file import PlanFile

GIVEN = {"memory_opt_engine": "ort", "memory_opt_config": "Gelu+:1:-1", "memory_opt_strict": False}
GIVEN |= {"memory_opt_log_level": "devinfo", "memory_opt_log_steps": 5, "memory_opt_log_file": "found.jsonl"}
GIVEN |= {"log_memory_phases": True, "ort_fallback": False, "ort_cache_dir": "cache", "ort_opset": 15}


def arguments(folder, **options):
    return MemOptTrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory_opt_level": 5}, "--memory_opt_level 5: allowed: 0 (the config), 1 "),
        ({"memory_opt_level": 1, "memory_opt_config": "Gelu+:1:-1"}, "--memory_opt_level 1 together with"),
        # With a level, ORT ignores the config, even if its file is missing.
        ({"memory_opt_level": 2, "memory_opt_config": "missing.json"}, "--memory_opt_level 2 together with"),
        ({"memory_opt_budget": "24"}, "--memory_opt_budget 24: a number needs a unit, such as 24GiB or 24%"),
        ({"memory_opt_budget": 24}, "--memory_opt_budget 24: a number needs a unit, such as 24GiB or 24%"),
        ({"memory_opt_budget": True}, "--memory_opt_budget True: allowed: strings"),
        ({"memory_opt_budget": "24GiB", "memory_opt_level": 1}, "24GiB together with --memory_opt_level 1: a"),
        ({"memory_opt_budget": "auto", "memory_opt_config": "Gelu+:1:-1"}, "with --memory_opt_config: a budget"),
        ({"memory_opt_plan": "missing.json"}, "plan file missing.json: No such file"),
        (
            {"memory_opt_plan": "plan.json", "memory_opt_level": 1},
            "--memory_opt_plan together with --memory_opt_level 1: a plan",
        ),
        ({"memory_opt_budget": "90%", "memory_opt_engine": "ort"}, "--memory_opt_budget 90% with the ort engine:"),
        ({"memory_opt_variants": 4}, "--memory_opt_variants 4: allowed: whole numbers from 1 to 3"),
        ({"memory_opt_variants": 0, "memory_opt_budget": "auto"}, "--memory_opt_variants 0: allowed: whole"),
        ({"memory_opt_batch": "8", "memory_opt_budget": "auto"}, "--memory_opt_batch 8: allowed: auto"),
        ({"memory_opt_batch": "auto"}, "--memory_opt_batch auto without --memory_opt_budget: "),
        ({"memory_opt_variants": 2, "memory_opt_level": 1}, "--memory_opt_variants 2 without --memory_opt_budget: "),
        ({"memory_opt_variants": 2, "memory_opt_engine": "ort"}, "--memory_opt_variants 2 with the ort engine: only"),
        ({"memory_opt_config": "Gelu+:1"}, 'column 1: "Gelu+:1" has 2 fields instead of 3'),
        ({"memory_opt_config": "Gelu+:1:-1,Gelu+:2:-1"}, "contradicts"),
        ({"memory_opt_config": "missing.json"}, "config file missing.json: No such file"),
        ({"memory_opt_config": "Gelu+:1:3", "memory_opt_engine": "ort"}, "Gelu+:1:3: count 3 is not available on the"),
        ({"memory_opt_config": "Gelu+:3:-1", "memory_opt_engine": "ort"}, "strategy 3 (offload) is not available"),
        ({"memory_opt_config": "Gelu+:4:-1", "memory_opt_engine": "ort"}, "strategy 4 (compress) is not available"),
        ({"memory_opt_compress": "fp8", "memory_opt_engine": "ort"}, "--memory_opt_compress fp8 with the ort engine"),
        ({"memory_opt_compress": "int8"}, "--memory_opt_compress int8: allowed: fp8"),
        ({"memory_opt_report": "no/page.html"}, "--memory_opt_report no/page.html: no such folder; create it first"),
        ({"memory_opt_report": "."}, "--memory_opt_report .: is a folder; give a file in it"),
        ({"memory_opt_report": 3}, "--memory_opt_report 3: allowed: paths and strings"),
        ({"memory_opt_log_steps": -1}, "--memory_opt_log_steps -1: allowed: whole numbers from 0 up"),
        ({"memory_opt_engine": "tvm"}, "--memory_opt_engine tvm: allowed: auto, ort"),
        ({"memory_opt_log_level": "debug"}, "--memory_opt_log_level debug: allowed: warning, info, devinfo,"),
        ({"memory_opt_engine": "compile", "ort_arena": True}, "--ort_arena with the compile engine: only the ort"),
        ({"memory_opt_engine": "compile", "ort_opset": 15, "ort_fallback": False}, "--ort_fallback False, --ort_"),
        (
            {"memory_opt_engine": "ort", "memory_opt_compiler": "inductor", "ort_fallback": False},
            "--memory_opt_compiler inductor with the ort engine",
        ),
        ({"ort_opset": 21}, "--ort_opset 21: "),
        ({"ort_save_onnx": "no/such/folder"}, "--ort_save_onnx no/such/folder: no such folder"),
    ],
    ids=str,
)
def test_a_bad_option_is_one_line_before_anything_is_loaded(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    for make in (lambda: MemOptOptions(**options).check(), lambda: arguments(tmp_path, **options)):
        with pytest.raises(MemOptError, match=re.escape(message)) as error:
            make()
        assert "\n" not in str(error.value)


def test_a_plan_file_says_itself_what_is_compressed(tmp_path):
    PlanFile("level 1", "plain", {}, ()).save(tmp_path / "plan.json")
    options = MemOptOptions(memory_opt_compress="fp8", memory_opt_plan=str(tmp_path / "plan.json"))
    with pytest.raises(MemOptError, match="--memory_opt_compress fp8 with --memory_opt_plan: the file already says"):
        options.check()


def test_a_folder_or_a_bad_file_as_config(tmp_path):
    (tmp_path / "not.json").write_text("{Gelu+")
    for path, reason in ((tmp_path, "directory"), (tmp_path / "not.json", "not JSON")):
        with pytest.raises(ConfigError, match=reason):
            MemOptOptions(memory_opt_config=str(path)).check()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_opt_level": 2},
        {"memory_opt_config": "Gelu+:1:-1"},
        {"memory_opt_config": "Gelu+:1:0", "memory_opt_engine": "ort"},
        {"memory_opt_config": "Gelu+:1:1,Add+:3:-1", "memory_opt_engine": "compile"},
        # An engine other than ort may support these, so `auto` cannot refuse them yet.
        {"memory_opt_config": "Gelu+:1:3,Add+:3:-1"},
        {"ort_opset": 17, "memory_opt_log_steps": 100},
    ],
    ids=str,
)
def test_good_options_pass(options):
    MemOptOptions(**options).check()


def test_the_parser_takes_every_flag(tmp_path):
    given = {**GIVEN, "ort_save_onnx": str(tmp_path)}
    flags = [f"--{name}={value}" for name, value in given.items()] + ["--log_input_density", "--ort_arena"]
    (parsed,) = HfArgumentParser(MemOptTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--report_to", "none", *flags]
    )
    changed = {
        name: getattr(parsed, name)
        for name in MemOptOptions.__dataclass_fields__
        if getattr(parsed, name) != getattr(MemOptOptions(), name)
    }
    assert changed == {**given, "log_input_density": True, "ort_arena": True}
    assert str(parsed.plan_config) == "Gelu+:1:-1"


def test_the_parser_refuses_what_is_no_choice(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        HfArgumentParser(MemOptTrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", str(tmp_path), "--memory_opt_engine", "tvm"]
        )
    assert stopped.value.code != 0
    assert "invalid choice: 'tvm'" in capsys.readouterr().err


def test_help_explains_every_flag():
    text = HfArgumentParser(MemOptTrainingArguments).format_help()
    for name, option in MemOptOptions.__dataclass_fields__.items():
        assert f"--{name}" in text
        shown = option.metadata["help"].replace("%%", "%").split(". ")[0].split()
        assert " ".join(shown[:4]) in " ".join(text.split()), name


@pytest.mark.parametrize("config", [None, "Gelu+:1:-1"])
def test_arguments_survive_json_pickle_and_copies(tmp_path, config):
    args = arguments(tmp_path, memory_opt_config=config, log_memory_phases=True)
    # What a Trainer saves with a checkpoint (training_args.bin) and reports to trackers.
    assert args.plan_config is None or str(args.plan_config) == config
    for again in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert type(again) is MemOptTrainingArguments
        assert again.to_dict() == args.to_dict()
        assert again.plan_config == args.plan_config
    as_json = json.loads(args.to_json_string())
    assert (as_json["memory_opt_config"], as_json["log_memory_phases"]) == (config, True)
    assert args.to_sanitized_dict()["memory_opt_engine"] == "auto"


def test_a_config_file_is_read_once(tmp_path, monkeypatch):
    file = tmp_path / "plans.json"
    file.write_text('["Gelu+:1:-1"]')
    read = []
    parse_file = grammar.parse_file
    monkeypatch.setattr(grammar, "parse_file", lambda path: read.append(path) or parse_file(path))
    args = arguments(tmp_path, memory_opt_config=str(file), memory_opt_engine="compile")
    file.unlink()
    trainer = Trainer(torch.nn.Linear(2, 2), args)
    attach(trainer)
    assert read == [file]
    assert str(trainer.memopt.engine.selection.config) == "Gelu+:1:-1"
    assert facts("compile", trainer.memopt.options)["--memory_opt_config"] == "Gelu+:1:-1"


def test_a_path_that_is_assigned_later_is_text_for_the_trainers_files(tmp_path):
    (tmp_path / "plans.json").write_text('["Gelu+:1:-1"]')
    args = arguments(tmp_path, memory_opt_engine="compile")
    args.memory_opt_config, args.memory_opt_log_file = tmp_path / "plans.json", tmp_path / "found.jsonl"
    attach(Trainer(torch.nn.Linear(2, 2), args), memory_opt_strict=False)
    assert json.loads(args.to_json_string())["memory_opt_config"] == str(tmp_path / "plans.json")
    assert args.memory_opt_log_file == str(tmp_path / "found.jsonl")
    assert args.memory_opt_strict, "an override is no change of the arguments"


def test_options_are_resolved_once_and_say_so_when_asked(monkeypatch, capsys):
    options = MemOptOptions(memory_opt_engine="ort", ort_opset=16)
    monkeypatch.setattr(installation, "missing", lambda: "")
    environ = {"ORTMODULE_MEMORY_OPT_LEVEL": "1", "ORTMODULE_ONNX_OPSET_VERSION": "15"}
    resolved = resolve(options, environ)
    assert (resolved.engine, resolved.reason, resolved.then) == ("ort", "requested", None)
    assert (resolved.options.memory_opt_level, resolved.options.ort_opset) == (1, 15)
    assert (options.memory_opt_level, options.ort_opset) == (0, 16)
    assert (resolved.selection.config, resolved.selection.level) == (None, 1)
    engine = create(resolved)
    assert engine.selection == resolved.selection
    assert capsys.readouterr().err == "", "nothing is logged while an engine is made"
    resolved.log()
    assert "ONNX_OPSET_VERSION=15 in the environment is used, not --ort_opset 16" in capsys.readouterr().err
    with pytest.raises(FrozenInstanceError):
        resolved.engine = "compile"


def test_auto_resolves_to_an_engine_and_the_one_behind_it(monkeypatch):
    monkeypatch.setattr(installation, "missing", lambda: "")
    resolved = resolve(MemOptOptions(memory_opt_config="Gelu+:1:-1", ort_arena=True), {})
    assert (resolved.engine, resolved.then.engine, resolved.given) == ("ort", "compile", ("--ort_arena",))
    assert str(resolved.selection.config) == str(resolved.then.selection.config) == "Gelu+:1:-1"
    assert not resolved.options.ort_fallback, "the other engine is the fallback"


def test_help_has_our_flags_first_and_those_of_an_engine_last():
    names = [field.name for field in fields(MemOptOptions)]
    assert names[:2] == ["memory_opt_engine", "memory_opt_config"]
    of_ort = [name for name in names if name.startswith("ort_")]
    assert names[-len(of_ort) :] == of_ort and names[-len(of_ort) - 2 : -len(of_ort)] == [
        "memory_opt_loss",
        "memory_opt_release_gradients",
    ]
    assert issubclass(MemOptTrainingArguments, (OrtOptions, CompileOptions, TrainingArguments))
    assert [field.name for field in fields(MemOptTrainingArguments)][-len(names) :] == names


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("memory_opt_log_steps", "3", "'3': allowed: whole numbers from 0 up"),
        ("memory_opt_log_steps", 2.0, "2.0: allowed: whole numbers from 0 up"),
        ("memory_opt_log_steps", True, "True: allowed: whole numbers from 0 up"),
        ("memory_opt_log_steps", 10**5000, "of type int: allowed: whole numbers from 0 up"),
        ("ort_opset", "17", "'17': allowed: 12 to 20, the opsets that ONNX Runtime 1.19 trains"),
        ("ort_tuning_duration_ms", 0, "0: allowed: whole numbers from 1 up"),
        ("memory_opt_level", "1", "'1': allowed: 0 (the config), 1 (recompute in each layer) and 2 (also "),
        ("memory_opt_strict", "false", "'false': allowed: true and false"),
        ("log_memory_phases", 1, "1: allowed: true and false"),
        ("ort_custom_autograd", "no", "'no': allowed: true and false"),
        ("memory_opt_engine", None, "None: allowed: auto, ort, compile"),
        ("memory_opt_engine", ["ort"], "['ort']: allowed: auto, ort, compile"),
        ("memory_opt_compiler", torch.nn.ReLU(), "ReLU(): allowed: inductor, aot_eager"),
        ("memory_opt_optim", "adam" * 50, "adamadam"),
        ("memory_opt_log_file", "", "'': allowed: paths and strings"),
        ("ort_cache_dir", "a\0b", r"a\x00b: allowed: paths and strings"),
        ("ort_save_onnx", "x" * 300, "xxx"),
        ("memory_opt_config", 5, "5: allowed: PlanConfig, dicts, lists, paths, strings and tuples"),
        ("memory_opt_config", np.zeros(3), "array([0., 0., 0.]): allowed: PlanConfig, dicts, "),
    ],
    ids=lambda value: excerpt(value)[:30],
)
def test_a_wrong_value_names_the_option_and_what_is_allowed(name, value, allowed):
    with pytest.raises(MemOptError, match=re.escape(f"--{name} {allowed}")) as caught:
        MemOptOptions(**{name: value}).check()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_integers_of_other_libraries_are_integers():
    (options := MemOptOptions(memory_opt_log_steps=np.int64(7), memory_opt_level=np.int32(2))).check()
    assert (options.memory_opt_log_steps, options.memory_opt_level) == (7, 2)
    assert type(options.memory_opt_log_steps) is int


def test_a_subclass_s_own_fields_are_its_own_business(tmp_path):
    MemOptTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, logging_steps=0.5).check()


@pytest.mark.parametrize(
    "config, text",
    [
        (["Gelu+:1:-1", "Add+:2:0"], "Gelu+:1:-1,Add+:2:0"),
        ({"Gelu+": 1, "Add+": "2:0"}, "Gelu+:1:-1,Add+:2:0"),
        (PlanConfig.load("Gelu+:1:-1"), "Gelu+:1:-1"),
        (Path("plans.json"), "plans.json"),
        (Path("plans"), "./plans"),
    ],
    ids=str,
)
def test_arguments_with_any_form_of_a_config_stay_serialisable(tmp_path, monkeypatch, config, text):
    monkeypatch.chdir(tmp_path)
    Path("plans.json").write_text('["Gelu+:1:-1"]')
    # A file that exists only when the config is read still counts as a file.
    Path("plans").write_text('["Gelu+:1:-1"]')
    arguments = MemOptTrainingArguments(
        "out", report_to="none", use_cpu=True, memory_opt_config=config, memory_opt_log_file=Path("found.jsonl")
    )
    saved = json.loads(arguments.to_json_string())
    assert saved["memory_opt_config"] == arguments.to_dict()["memory_opt_config"]
    assert saved["memory_opt_config"] in (text, text.removeprefix("./"))
    assert saved["memory_opt_log_file"] == "found.jsonl"
    assert str(arguments.plan_config).startswith("Gelu+:1:-1")
    arguments.memory_opt_config = config
    assert str(arguments.plan_config).startswith("Gelu+:1:-1")


def test_an_unknown_option_is_told_with_near_ones():
    with pytest.raises(MemOptError, match="there is no option memory_opt_levl; did you mean memory_opt_level"):
        from_keywords(memory_opt_levl=1)
    with pytest.raises(MemOptError, match=r"there is no option level; did you mean memory_opt_level\?"):
        from_keywords(level=1)
    with pytest.raises(MemOptError, match="there is no option zzz; see optimum_memopt.MemOptOptions"):
        from_keywords(zzz=1)
