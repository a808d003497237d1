"""ORT options that cannot work here, or together, are refused with one line that says what to do."""

import pytest
import torch

import optimum_memopt
from optimum_memopt import MemOptOptions, UnsupportedModelError
from optimum_memopt.engines.ort import missing
from optimum_memopt.engines.ort.compat import extensions, installation
from optimum_memopt.engines.ort.options import flags
from optimum_memopt.engines.ort.options.flags import OrtOptions
from tests.ort.helpers import MLM, needs_ort, refusal


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
        ({"ort_triton_config": "x.json"}, "--ort_triton_config x.json without --ort_triton does nothing"),
        ({"ort_flash_attention": True}, "--ort_flash_attention without --ort_triton does nothing"),
        ({"ort_tuning_duration_ms": 5}, "--ort_tuning_duration_ms 5 without --ort_tuning does nothing"),
        (
            {"ort_tuning_duration_ms": -5, "ort_tuning": True},
            "--ort_tuning_duration_ms -5: allowed are whole numbers from 1 on",
        ),
        ({"ort_tuning_results": "none.json"}, "--ort_tuning_results none.json: No such file"),
        (
            {"ort_tuning_results": "no/such.json", "ort_tuning": True},
            "--ort_tuning_results no/such.json: no such",
        ),
        ({"ort_tuning_results": __file__}, "test_env_option_checks.py: not JSON"),
        ({"ort_conv_search": "FAST"}, "--ort_conv_search FAST: allowed are HEURISTIC, EXHAUSTIVE"),
        (
            {"ort_mem_efficient_grad_mgmt": True, "ort_custom_autograd": False},
            "--ort_mem_efficient_grad_mgmt runs as a torch.autograd.Function; leave out --ort_custom_autograd false",
        ),
        (
            {"ort_label_sparse_optimizer": True, "ort_compute_optimizer": False},
            "--ort_label_sparse_optimizer is part of what --ort_compute_optimizer false turns off",
        ),
        ({"ort_skip_check": "SKIP_CHECK_DISABLED|SKIP_CHECK_DEVICE"}, "SKIP_CHECK_DISABLED turns all others off"),
        (
            {"ort_skip_check": "SKIP_CHECK_EXECUTION_AGENT"},
            "a new graph would run in the session of the old one;",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(options, message, with_cuda):
    assert message in refusal(**options)


@pytest.mark.parametrize(
    "version, message", [("0.19.8", "of DeepSpeed up to 0.13.1, and 0.19.8 is"), (None, "not in")]
)
def test_stage_3_support_names_the_deepspeed_that_it_needs(version, message, monkeypatch, with_cuda):
    found = version and ("deepspeed", version)
    monkeypatch.setattr(flags, "installed_version", lambda names: found)
    assert message in refusal(ort_zero_stage3=True)
    monkeypatch.setattr(flags, "installed_version", lambda names: ("deepspeed", "0.13.1"))
    MemOptOptions(ort_zero_stage3=True).check()
