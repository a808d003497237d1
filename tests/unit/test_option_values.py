"""Options given from Python: each wrong value is one line that names the option and what is allowed."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from optimum_memopt import MemOptError, MemOptOptions, MemOptTrainingArguments, PlanConfig
from optimum_memopt.errors import excerpt
from optimum_memopt.options import from_keywords


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("memory_opt_log_steps", "3", "'3': allowed are whole numbers from 0 on"),
        ("memory_opt_log_steps", 2.0, "2.0: allowed are whole numbers from 0 on"),
        ("memory_opt_log_steps", True, "True: allowed are whole numbers from 0 on"),
        ("memory_opt_log_steps", 10**5000, "of type int: allowed are whole numbers from 0 on"),
        ("ort_opset", "17", "'17': allowed are 12 to 20, the opsets that ONNX Runtime 1.19 trains"),
        ("ort_opset", 21, "21: allowed are 12 to 20, the opsets that ONNX Runtime 1.19 trains"),
        ("ort_tuning_duration_ms", 0, "0: allowed are whole numbers from 1 on"),
        ("memory_opt_level", "1", "'1': allowed are 0 (the config), 1 (recompute in each layer) and 2 (also "),
        ("memory_opt_level", None, "None: allowed are 0 (the config), 1 "),
        ("memory_opt_strict", "false", "'false': allowed are true and false"),
        ("log_memory_phases", 1, "1: allowed are true and false"),
        ("memory_opt_strict", None, "None: allowed are true and false"),
        ("ort_custom_autograd", "no", "'no': allowed are true and false"),
        ("memory_opt_engine", None, "None: allowed are auto, ort, compile"),
        ("memory_opt_engine", "ORT", "ORT: allowed are auto, ort, compile"),
        ("memory_opt_engine", ["ort"], "['ort']: allowed are auto, ort, compile"),
        ("memory_opt_compiler", torch.nn.ReLU(), "ReLU(): allowed are inductor, aot_eager"),
        ("memory_opt_optim", "adam" * 50, "adamadam"),
        ("memory_opt_log_file", 3, "3: allowed are paths and strings"),
        ("memory_opt_log_file", "", "'': allowed are paths and strings"),
        ("ort_cache_dir", "a\0b", r"a\x00b: allowed are paths and strings"),
        ("ort_save_onnx", "x" * 300, "xxx"),
        ("memory_opt_config", 5, "5: allowed are PlanConfig, dicts, lists, paths, strings and tuples"),
        ("memory_opt_config", np.zeros(3), "array([0., 0., 0.]): allowed are PlanConfig, dicts, "),
    ],
    ids=lambda value: excerpt(value)[:30],
)
def test_a_wrong_value_names_the_option_and_what_is_allowed(name, value, allowed):
    with pytest.raises(MemOptError, match=re.escape(f"--{name} {allowed}")) as caught:
        MemOptOptions(**{name: value}).check()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_integers_of_other_libraries_are_integers():
    options = MemOptOptions(memory_opt_log_steps=np.int64(7), memory_opt_level=np.int32(2))
    options.check()
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
    # A file that is there only when the config is read is a file all the same.
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
    with pytest.raises(MemOptError, match="there is no option zzz; see optimum_memopt.MemOptOptions"):
        from_keywords(zzz=1)
