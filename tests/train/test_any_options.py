"""Any options, as flags or keyword arguments, either work or raise a `MemOptError` of one line."""

import contextlib
import io
import os
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import HfArgumentParser, Trainer, TrainingArguments

from optimum_memopt import MemOptError, MemOptOptions, MemOptTrainingArguments, attach, optimize
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.logs import get_logger

GOOD = {
    "memory_opt_engine": ["auto", "ort", "compile"],
    "memory_opt_compiler": ["inductor", "aot_eager", None],
    "memory_opt_config": [
        "Gelu+:1:-1",
        "Gelu+:3:2",
        "Gelu+:4:1",
        "plans.json",
        {"Gelu+": 1},
        ["Gelu+:1:-1"],
        Path("plans.json"),
    ],
    "memory_opt_level": [0, 1, 2],
    "memory_opt_compress": ["fp8", None],
    "memory_opt_budget": ["24GiB", "90%", "auto"],
    "memory_opt_variants": [1, 2, 3],
    "memory_opt_batch": ["auto", None],
    "memory_opt_log_level": ["warning", "info", "devinfo", "verbose"],
    "memory_opt_log_steps": [0, 1, 100],
    "memory_opt_log_file": ["found.jsonl", Path("found.jsonl"), ".", "nowhere/found.jsonl"],
    "memory_opt_report": ["report.html", Path("report.html"), ".", "nowhere/report.html"],
    "memory_opt_optim": ["torch_fused_adamw", "deepspeed_cpu_adam", "ort_fused_adam"],
    "ort_cache_dir": ["cache", "plans.json"],
    "ort_save_onnx": [".", "nowhere"],
    "ort_opset": [12, 17, 20],
    "ort_skip_check": ["SKIP_CHECK_DISABLED", "SKIP_CHECK_DEVICE|SKIP_CHECK_BUILD_GRADIENT"],
}
NAMES = [field.name for field in fields(MemOptOptions)]
TEXTS = ["", "\x00", "�", "x" * 300, "-1", "1e9", "/", "nan", b"bytes", Path("x" * 300), Path()]
NUMBERS = [-1, 3, 10**30, 10**5000, 1.5, float("nan"), True, False]
OTHERS = [None, [], {}, [[]], {"Gelu+": None}, object(), torch.zeros(2), torch.nn.ReLU()]
HOSTILE = st.sampled_from([*TEXTS, *NUMBERS, *OTHERS])
VALUES = {name: st.sampled_from(GOOD.get(name, [True, False])) | HOSTILE for name in NAMES}
OPTIONS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)
# Only good values, so that the deeper checks are reached.
FITTING = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(GOOD.get(name, [True, False])) for name in names})
)


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """Change to a folder for the options' paths, and restore the folder and the log level afterwards."""
    before, level = Path.cwd(), get_logger().level
    os.chdir(tmp_path_factory.mktemp("options"))
    Path("plans.json").write_text('["Gelu+:1:-1"]')
    yield
    os.chdir(before)
    get_logger().setLevel(level)


@contextlib.contextmanager
def one_line():
    """Suppress a `MemOptError`, and check that its message is one printable line."""
    try:
        yield
    except MemOptError as error:
        assert str(error).isprintable() and 10 < len(str(error)) < 1500, str(error)


def flags(options) -> list[str]:
    given = []
    for name, value in options.items():
        with contextlib.suppress(ValueError):
            given += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return given


@given(OPTIONS | FITTING)
def test_any_flags(options):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), one_line():
        try:
            (parsed,) = HfArgumentParser(MemOptOptions).parse_args_into_dataclasses(flags(options))
        except SystemExit as stopped:
            assert stopped.code == 2 and ": error: " in errors.getvalue()
            return
        parsed.check()


@given(OPTIONS | FITTING)
def test_any_training_arguments_are_serialisable_or_refused(options):
    with one_line():
        MemOptTrainingArguments("out", report_to="none", use_cpu=True, **options).to_json_string()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


@given(OPTIONS | FITTING)
def test_any_keywords_of_optimize(options):
    model = Model()
    with one_line():
        optimize(model, **options).detach()
    assert engine_of(model) is None and "forward" not in vars(model)


@given(OPTIONS | FITTING)
def test_any_keywords_of_attach(options):
    arguments = TrainingArguments("out", report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(2)}])
    with one_line():
        attach(trainer, **options)
    assert engine_of(trainer.model) is None


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: attach(Model()), "attach takes a transformers Trainer, not Model; for a model without one: "),
        (lambda: attach(None), "attach takes a transformers Trainer, not NoneType; "),
        (lambda: optimize(None), "optimize takes a torch.nn.Module, not NoneType; for a Trainer: "),
        (lambda: optimize("roberta-base"), "optimize takes a torch.nn.Module, not str; "),
        (lambda: optimize(torch.nn.ReLU()), "ReLU has no parameters, so there is nothing to train"),
        (lambda: optimize(torch.nn.LazyLinear(2)), "weight has no shape before the first forward; run a batch"),
        (lambda: optimize(torch.nn.ReLU(), memory_opt_engine="compile"), "ReLU has no parameters, so "),
        (lambda: optimize(Model(), memory_opt_levl=1), "there is no option memory_opt_levl; did you mean "),
    ],
    ids=range(8),
)
def test_mixed_up_arguments(call, message):
    with pytest.raises(MemOptError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_optimize_of_a_trainer():
    trainer = Trainer(Model(), TrainingArguments("out", report_to="none", use_cpu=True))
    with pytest.raises(MemOptError, match=r"^optimize takes a torch.nn.Module, not Trainer; .*attach\(trainer"):
        optimize(trainer)
