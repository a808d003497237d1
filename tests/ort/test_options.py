import re

import pytest
import torch

import optimum_memopt
from optimum_memopt import MemOptOptions, UnsupportedModelError
from optimum_memopt.engines.ort import options
from optimum_memopt.engines.ort.compat import extensions, installation
from optimum_memopt.engines.ort.compat.installation import missing
from optimum_memopt.engines.ort.options import ENV_OPTIONS, KNOWN, OrtOptions, from_environment
from tests.gradients import accumulate, assert_same_step
from tests.ort.helpers import MLM, ROOT, environment_variables, needs_ort, optimize, refusal


def from_variables(options=None, **variables):
    return from_environment(MemOptOptions(**(options or {})), {f"ORTMODULE_{k}": v for k, v in variables.items()})


@pytest.mark.parametrize(
    "variable, text, option, value",
    [
        ("MEMORY_OPT_LEVEL", "2", "memory_opt_level", 2),
        ("MEMORY_OPT_CONFIG", "Gelu+:1:-1", "memory_opt_config", "Gelu+:1:-1"),
        ("LOG_LEVEL", "VERBOSE", "memory_opt_log_level", "verbose"),
        ("LOG_LEVEL", "FATAL", "memory_opt_log_level", "warning"),
        ("FALLBACK_POLICY", "FALLBACK_DISABLE", "ort_fallback", False),
        ("FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA", "ort_fallback", True),
        ("SAVE_ONNX_PATH", ".", "ort_save_onnx", "."),
        ("CACHE_DIR", "cache", "ort_cache_dir", "cache"),
        ("ENABLE_CUSTOM_AUTOGRAD", "0", "ort_custom_autograd", False),
        ("ONNX_OPSET_VERSION", "15", "ort_opset", 15),
        ("ENABLE_COMPUTE_OPTIMIZER", "0", "ort_compute_optimizer", False),
        ("ENABLE_LABEL_SPARSE_OPTIMIZER", "0", "ort_label_sparse_optimizer", False),
        ("ENABLE_EMBEDDING_SPARSE_OPTIMIZER", "0", "ort_embedding_sparse_optimizer", False),
        ("DEEPCOPY_BEFORE_MODEL_EXPORT", "0", "ort_deepcopy_before_export", False),
        ("SKIPCHECK_POLICY", "SKIP_CHECK_DEVICE", "ort_skip_check", "SKIP_CHECK_DEVICE"),
    ],
)
def test_a_variable_in_the_environment_wins_and_is_reported(variable, text, option, value):
    given = MemOptOptions()
    effective, remarks = from_environment(given, {f"ORTMODULE_{variable}": text})
    assert getattr(effective, option) == value
    assert remarks == (f"ORTMODULE_{variable}={text} in the environment is used, as --{option} {value}",)
    assert given == MemOptOptions()


@pytest.mark.parametrize(
    "variable, option, value",
    [
        ("ALLOW_AUTOGRAD_CHECKPOINT", "ort_allow_autograd_checkpoint", True),
        ("ENABLE_MEM_EFFICIENT_GRAD_MGMT", "ort_mem_efficient_grad_mgmt", True),
        ("USE_EFFICIENT_ATTENTION", "ort_efficient_attention", True),
        ("ENABLE_TUNING", "ort_tuning", True),
    ],
)
def test_a_variable_for_what_this_machine_lacks_wins_elsewhere(variable, option, value, with_cuda):
    effective, _ = from_variables(**{variable: "1"})
    assert getattr(effective, option) is value


def test_the_flag_that_a_variable_overrides_is_named():
    effective, remarks = from_variables({"ort_opset": 16, "ort_fallback": False}, ONNX_OPSET_VERSION="15")
    assert (effective.ort_opset, effective.ort_fallback) == (15, False)
    assert remarks == ("ORTMODULE_ONNX_OPSET_VERSION=15 in the environment is used, not --ort_opset 16",)


def test_a_level_and_a_config_from_two_places():
    effective, remarks = from_variables({"memory_opt_config": "Gelu+:1:-1"}, MEMORY_OPT_LEVEL="1")
    assert (effective.memory_opt_level, effective.memory_opt_config) == (1, None)
    assert "ORTMODULE_MEMORY_OPT_LEVEL replaces --memory_opt_config Gelu+:1:-1" in remarks
    effective, remarks = from_variables({"memory_opt_level": 1}, MEMORY_OPT_CONFIG="Gelu+:1:-1")
    assert (effective.memory_opt_level, effective.memory_opt_config) == (0, "Gelu+:1:-1")
    assert "ORTMODULE_MEMORY_OPT_CONFIG replaces --memory_opt_level 1" in remarks
    effective, _ = from_variables({"memory_opt_config": "Gelu+:1:-1"}, MEMORY_OPT_LEVEL="0")
    assert effective.memory_opt_config == "Gelu+:1:-1"


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"ONNX_OPSET_VERSION": "abc"}, "ORTMODULE_ONNX_OPSET_VERSION=abc in the environment: allowed: whole numb"),
        ({"ONNX_OPSET_VERSION": "3"}, "--ort_opset 3: .* (from the environment: ORTMODULE_ONNX_OPSET_VERSION=3)"),
        ({"ENABLE_COMPUTE_OPTIMIZER": "yes"}, "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER=yes in .* allowed: 0 and 1"),
        ({"MEMORY_OPT_LEVEL": "3"}, "ORTMODULE_MEMORY_OPT_LEVEL=3 in the environment: allowed: 0, 1 and 2"),
        ({"MEMORY_OPT_CONFIG": "Gelu+:1"}, 'column 1: "Gelu+:1" has 2 .*ORTMODULE_MEMORY_OPT_CONFIG=Gelu+:1'),
        ({"MEMORY_OPT_CONFIG": "Gelu+:1:-1", "MEMORY_OPT_LEVEL": "1"}, "together with .*MEMORY_OPT_CONFIG=Gelu+:1:-1"),
        ({"LOG_LEVEL": "debug"}, "allowed: VERBOSE, DEVINFO, INFO, WARNING, ERROR, FATAL"),
        ({"FALLBACK_POLICY": "never"}, "ORTMODULE_FALLBACK_POLICY=never in the environment: allowed: FALLBACK_DIS"),
        ({"FALLBACK_POLICY": "FALLBACK_FORCE_TORCH_FORWARD"}, "the forced policies are for ONNX Runtime's own tests"),
        ({"SKIPCHECK_POLICY": "all"}, "--ort_skip_check all: allowed: SKIP_CHECK_DISABLED, or any of SKIP_CHE"),
        ({"ENABLE_CUSTOM_AUTOGRAD": "1"}, f"build them with: {extensions.BUILD_COMMAND} (from the environment: ORTM"),
        ({"USE_TRITON": "1"}, "--ort_triton needs CUDA, .*; leave it out (from the environment: ORTMODULE_USE_TRITON"),
        ({"ATEN_SDPA_FALLBACK": "1"}, "ORTMODULE_ATEN_SDPA_FALLBACK=1 in the environment: .* needs CUDA"),
    ],
    ids=str,
)
def test_a_bad_value_in_the_environment_is_one_line(variables, message, monkeypatch, clean_environment):
    for name, text in variables.items():
        monkeypatch.setenv(f"ORTMODULE_{name}", text)
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), refusal())


def test_what_is_unknown_or_not_used_is_said():
    _, remarks = from_variables(MEMORY_OPT_LEVL="1", PRINT_INPUT_DENSITY="1", PRINT_MEMORY_STATS="1", TRITON_DEBUG="1")
    assert remarks[0].endswith("ONNX Runtime has no such variable; the nearest is ORTMODULE_MEMORY_OPT_LEVEL")
    assert "not used; --log_input_density" in remarks[1]
    assert "not used; --log_memory_phases" in remarks[2]
    assert "for all models of this process" in remarks[3]
    _, remarks = from_variables(FALLBACK_RETRY="1", JSON_CONFIG_PATH="a.json", IS_DETERMINISTIC="1")
    assert [line.split(": ")[1][:8] for line in remarks] == ["not used", "not used", "not a va"]


def test_a_variable_without_a_value_is_not_set():
    assert from_variables(USE_TRITON="", NO_SUCH="") == (MemOptOptions(), ())


@needs_ort
def test_every_variable_that_onnxruntime_reads_is_known():
    package = installation.onnxruntime_dir() / "training"
    read = re.compile(r"""(?:getenv|environ|envvar|key|KEY)[^\n]*["'](ORTMODULE_[A-Z0-9_]+)["']""")
    found = {name for path in package.rglob("*.py") for name in read.findall(path.read_text())}
    assert len(found) > 25
    assert found <= set(KNOWN)


@needs_ort
def test_the_environment_decides_for_a_model_and_is_left_as_it_was(monkeypatch, capfd, clean_environment):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "15")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", "Gelu+:1:-1")
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "WARNING")
    monkeypatch.setenv("ORTMODULE_PRINT_MEMORY_STATS", "1")
    before = environment_variables()
    model = MLM.build()
    engine = optimize(model, ort_opset=17)
    assert_same_step(model, MLM.build(), MLM.batch())
    engine.detach()
    assert environment_variables() == before
    printed = capfd.readouterr()
    assert "ORTMODULE_ONNX_OPSET_VERSION=15 in the environment is used, not --ort_opset 17" in printed.err
    assert "ORTMODULE_PRINT_MEMORY_STATS in the environment: not used; --log_memory_phases" in printed.err
    assert "rank-0" not in printed.out
    assert [plan.config for plan in from_table(engine, model)] == ["Gelu+:1:-1"]


def from_table(engine, model):
    engine.attach(model)
    accumulate(model, [MLM.batch()])
    enabled = engine.plans().enabled
    engine.detach()
    return enabled


def test_the_document_has_a_row_for_each_option():
    text = (ROOT / "docs" / "ort.md").read_text()
    for env_option in ENV_OPTIONS:
        assert re.search(rf"`--{env_option.option}[^`]*`.*`{env_option.variable}`", text), env_option
    for variable in KNOWN:
        assert f"`{variable.removeprefix('ORTMODULE_')}`" in text, variable


@pytest.mark.parametrize(
    "options",
    [
        {"ort_embedding_sparse_optimizer": True},
        {"ort_efficient_attention": True},
        {"ort_triton": True},
        {"ort_triton_config": "ops.json"},
        {"ort_flash_attention": True},
        {"ort_tuning": True},
        {"ort_tuning_duration_ms": 5},
        {"ort_tuning_results": "found.json"},
        {"ort_conv_search": "EXHAUSTIVE"},
        {"ort_zero_stage3": True},
    ],
    ids=str,
)
def test_what_needs_cuda_is_refused_without_and_for_a_model_on_the_cpu(options, monkeypatch):
    ((name, value),) = options.items()
    written = f"--{name}" if value is True else f"--{name} {value}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(**options) == f"{written} needs CUDA, and torch sees no CUDA device; leave it out"
    if not missing():
        engine = optimum_memopt.engines.ort.engine.OrtEngine(options=OrtOptions(**options))
        model = MLM.build()
        with pytest.raises(
            UnsupportedModelError, match=f"^{written} needs CUDA, and RobertaForMaskedLM is on the CPU"
        ):
            engine.attach(model)
        assert "forward" not in vars(model)


@needs_ort
def test_the_cpu_build_on_a_machine_with_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(installation, "onnxruntime_build", lambda: {"package_name": "onnxruntime-training-cpu"})
    assert "the installed onnxruntime-training is its CPU build; leave it out" in refusal(ort_tuning=True)


@pytest.mark.parametrize(
    "option", ["ort_custom_autograd", "ort_mem_efficient_grad_mgmt", "ort_allow_autograd_checkpoint"]
)
def test_what_needs_the_extensions_is_refused_without(option, monkeypatch):
    monkeypatch.setattr(extensions, "find", lambda: None)
    expected = f"--{option} needs ONNX Runtime's torch extensions; build them with: {extensions.BUILD_COMMAND}"
    assert refusal(**{option: True}) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ort_triton_config": "x.json"}, "--ort_triton_config x.json without --ort_triton has no effect"),
        ({"ort_flash_attention": True}, "--ort_flash_attention without --ort_triton has no effect"),
        ({"ort_tuning_duration_ms": 5}, "--ort_tuning_duration_ms 5 without --ort_tuning has no effect"),
        ({"ort_tuning_duration_ms": -5, "ort_tuning": True}, "--ort_tuning_duration_ms -5: allowed: whole"),
        ({"ort_tuning_results": "none.json"}, "--ort_tuning_results file none.json: No such file"),
        ({"ort_tuning_results": "no/such.json", "ort_tuning": True}, "--ort_tuning_results no/such.json: no such"),
        ({"ort_tuning_results": __file__}, "test_options.py: not JSON"),
        ({"ort_conv_search": "FAST"}, "--ort_conv_search FAST: allowed: HEURISTIC, EXHAUSTIVE"),
        ({"ort_mem_efficient_grad_mgmt": True, "ort_custom_autograd": False}, "runs as a torch.autograd.Function"),
        ({"ort_label_sparse_optimizer": True, "ort_compute_optimizer": False}, "is turned off by --ort_compute_opt"),
        ({"ort_skip_check": "SKIP_CHECK_DISABLED|SKIP_CHECK_DEVICE"}, "SKIP_CHECK_DISABLED turns all others off"),
        ({"ort_skip_check": "SKIP_CHECK_EXECUTION_AGENT"}, "a new graph would run in the session of the old one;"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(options, message, with_cuda):
    assert message in refusal(**options)


@pytest.mark.parametrize(
    "version, message", [("0.19.8", "of DeepSpeed up to 0.13.1, but 0.19.8 is"), (None, "not in")]
)
def test_stage_3_support_names_the_deepspeed_that_it_needs(version, message, monkeypatch, with_cuda):
    found = version and ("deepspeed", version)
    monkeypatch.setattr(options, "installed_version", lambda names: found)
    assert message in refusal(ort_zero_stage3=True)
    monkeypatch.setattr(options, "installed_version", lambda names: ("deepspeed", "0.13.1"))
    MemOptOptions(ort_zero_stage3=True).check()
