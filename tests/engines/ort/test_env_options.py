"""Each ORT option has its effect, or is refused with one line that says what to do."""

import copy
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import optimum_memopt
from optimum_memopt import MemOptError, MemOptOptions, UnsupportedModelError
from optimum_memopt.engines.ort import compat_options, env_option_checks, extensions, missing
from optimum_memopt.engines.ort.env_options import ENV_OPTIONS, KNOWN, from_environment
from optimum_memopt.engines.ort.options import OrtOptions
from tests.gradients import TOLERANCE, accumulate, assert_same_step
from tests.model_zoo import ZOO

needs_ort = pytest.mark.skipif(bool(missing()), reason="no onnxruntime-training")
MLM = ZOO["roberta-mlm"]
DOCUMENT = Path(__file__).parents[3] / "docs" / "ort.md"


@pytest.fixture
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ORTMODULE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def with_cuda(monkeypatch, clean_environment):
    """A machine with a GPU, its build of onnxruntime-training and the built extensions, as far as arguments tell."""
    monkeypatch.setattr(extensions, "cuda_missing", lambda: "")
    monkeypatch.setattr(extensions, "find", lambda: {})


def refused(**options):
    with pytest.raises(MemOptError) as error:
        MemOptOptions(**options).check()
    assert "\n" not in str(error.value)
    return str(error.value)


def optimize(model, **options):
    return optimum_memopt.optimize(model, **{"memory_opt_engine": "ort", "ort_fallback": False, **options})


def variables():
    return {name: value for name, value in os.environ.items() if name.startswith("ORTMODULE_")}


# The environment.


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
        ({"ONNX_OPSET_VERSION": "abc"}, "ORTMODULE_ONNX_OPSET_VERSION=abc in the environment: allowed are whole numb"),
        ({"ONNX_OPSET_VERSION": "3"}, "--ort_opset 3: .* (from the environment: ORTMODULE_ONNX_OPSET_VERSION=3)"),
        ({"ENABLE_COMPUTE_OPTIMIZER": "yes"}, "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER=yes in .* allowed are 0 and 1"),
        ({"MEMORY_OPT_LEVEL": "3"}, "ORTMODULE_MEMORY_OPT_LEVEL=3 in the environment: allowed are 0, 1 and 2"),
        ({"MEMORY_OPT_CONFIG": "Gelu+:1"}, 'column 1: "Gelu+:1" has 2 .*ORTMODULE_MEMORY_OPT_CONFIG=Gelu+:1'),
        ({"MEMORY_OPT_CONFIG": "Gelu+:1:-1", "MEMORY_OPT_LEVEL": "1"}, "together with .*MEMORY_OPT_CONFIG=Gelu+:1:-1"),
        ({"LOG_LEVEL": "debug"}, "allowed are VERBOSE, DEVINFO, INFO, WARNING, ERROR, FATAL"),
        ({"FALLBACK_POLICY": "never"}, "ORTMODULE_FALLBACK_POLICY=never in the environment: allowed are FALLBACK_DIS"),
        ({"FALLBACK_POLICY": "FALLBACK_FORCE_TORCH_FORWARD"}, "the forced policies are for ONNX Runtime's own tests"),
        ({"SKIPCHECK_POLICY": "all"}, "--ort_skip_check all: allowed are SKIP_CHECK_DISABLED, or of SKIP_CHECK_DEV"),
        ({"ENABLE_CUSTOM_AUTOGRAD": "1"}, f"build them with: {extensions.BUILD_COMMAND} (from the environment: ORTM"),
        ({"USE_TRITON": "1"}, "--ort_triton needs CUDA, .*; leave it out (from the environment: ORTMODULE_USE_TRITON"),
        ({"ATEN_SDPA_FALLBACK": "1"}, "ORTMODULE_ATEN_SDPA_FALLBACK=1 in the environment: .* needs CUDA"),
    ],
    ids=str,
)
def test_a_bad_value_in_the_environment_is_one_line_at_argument_time(
    variables, message, monkeypatch, clean_environment
):
    for name, text in variables.items():
        monkeypatch.setenv(f"ORTMODULE_{name}", text)
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), refused())


def test_what_is_unknown_or_not_used_is_said():
    _, remarks = from_variables(MEMORY_OPT_LEVL="1", PRINT_INPUT_DENSITY="1", PRINT_MEMORY_STATS="1", TRITON_DEBUG="1")
    assert remarks[0].endswith("ONNX Runtime has no such variable; the nearest is ORTMODULE_MEMORY_OPT_LEVEL")
    assert "not used; --log_input_density" in remarks[1]
    assert "not used; --log_memory_phases" in remarks[2]
    assert "for all models of this process" in remarks[3]
    _, remarks = from_variables(FALLBACK_RETRY="1", JSON_CONFIG_PATH="a.json", IS_DETERMINISTIC="1")
    assert [line.split(": ")[1][:8] for line in remarks] == ["not used", "not used", "no varia"]


def test_a_variable_without_a_value_is_not_set():
    assert from_variables(USE_TRITON="", NO_SUCH="") == (MemOptOptions(), ())


@needs_ort
def test_every_variable_that_onnxruntime_reads_is_known():
    package = extensions.onnxruntime_dir() / "training"
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
    before = variables()
    model = MLM.build()
    engine = optimize(model, ort_opset=17)
    assert_same_step(model, MLM.build(), MLM.batch())
    engine.detach()
    assert variables() == before
    said = capfd.readouterr()
    assert "ORTMODULE_ONNX_OPSET_VERSION=15 in the environment is used, not --ort_opset 17" in said.err
    assert "ORTMODULE_PRINT_MEMORY_STATS in the environment: not used; --log_memory_phases" in said.err
    assert "rank-0" not in said.out
    assert [plan.config for plan in from_table(engine, model)] == ["Gelu+:1:-1"]


def from_table(engine, model):
    engine.attach(model)
    accumulate(model, [MLM.batch()])
    enabled = engine.plans().enabled
    engine.detach()
    return enabled


# Arguments.


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
    assert refused(**options) == f"{written} needs CUDA, and torch sees no CUDA device; leave it out"
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
    monkeypatch.setattr(extensions, "onnxruntime_build", lambda: {"package_name": "onnxruntime-training-cpu"})
    assert "the installed onnxruntime-training is its CPU build; leave it out" in refused(ort_tuning=True)


@pytest.mark.parametrize(
    "option", ["ort_custom_autograd", "ort_mem_efficient_grad_mgmt", "ort_allow_autograd_checkpoint"]
)
def test_what_needs_the_extensions_is_refused_without(option, monkeypatch):
    monkeypatch.setattr(extensions, "find", lambda: None)
    expected = f"--{option} needs ONNX Runtime's torch extensions; build them with: {extensions.BUILD_COMMAND}"
    assert refused(**{option: True}) == expected


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
        ({"ort_tuning_results": __file__}, "test_env_options.py: not JSON"),
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
    assert message in refused(**options)


@pytest.mark.parametrize(
    "version, message", [("0.19.8", "of DeepSpeed up to 0.13.1, and 0.19.8 is"), (None, "not in")]
)
def test_stage_3_support_names_the_deepspeed_that_it_needs(version, message, monkeypatch, with_cuda):
    found = version and ("deepspeed", version)
    monkeypatch.setattr(env_option_checks, "installed_version", lambda names: found)
    assert message in refused(ort_zero_stage3=True)
    monkeypatch.setattr(env_option_checks, "installed_version", lambda names: ("deepspeed", "0.13.1"))
    MemOptOptions(ort_zero_stage3=True).check()


# Effects.


class Tagger(torch.nn.Module):
    """Has what the compute optimizer looks for: a loss module and labels that are mostly ignored."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = torch.nn.Embedding(97, 16), torch.nn.Linear(16, 16)
        self.head, self.loss = torch.nn.Linear(16, 97), torch.nn.CrossEntropyLoss()

    def forward(self, ids, labels):
        logits = self.head(torch.relu(self.hidden(self.embedding(ids))))
        return self.loss(logits.view(-1, 97), labels.view(-1))


@needs_ort
@pytest.mark.parametrize(
    "option", ["ort_compute_optimizer", "ort_embedding_sparse_optimizer", "ort_label_sparse_optimizer"]
)
def test_switches_that_crash_upstream_train(option):
    ids = torch.arange(48).reshape(4, 12)
    labels = ids.masked_fill(torch.arange(12) < 8, -100)
    sizes = {}
    for value in (None, False):
        model, plain = Tagger(), Tagger()
        engine = optimize(model, **({} if value is None else {option: value}))
        loss, expected = model(ids, labels), plain(ids, labels)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        sizes[value] = len(engine.graph.node)
        engine.detach()
    # Without the torch extensions nothing marks embeddings; with them labels and compute shrink, see the last tests.
    assert (sizes[False] < sizes[None]) is (option != "ort_embedding_sparse_optimizer")


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(4, 4), []

    def forward(self, x):
        self.seen.append(len(x))
        return self.linear(x).pow(2).mean()


@needs_ort
def test_without_the_deep_copy_the_model_itself_is_run_once_more_at_export():
    for deepcopy, runs in ((True, 1), (False, 2), (True, 1)):
        model = Counting()
        plain = copy.deepcopy(model)
        engine = optimize(model, ort_deepcopy_before_export=deepcopy)
        for rows in (2, 3):
            batch = torch.rand(rows, 4)
            model(batch).backward()
            plain(batch).backward()
        assert len(model.seen) == runs
        torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)
        engine.detach()


@needs_ort
def test_skipped_checks_are_said_and_show_on_other_keyword_arguments(capfd):
    with_mask = MLM.batch(length=9)
    without = {name: value for name, value in with_mask.items() if name != "attention_mask"}
    with_mask["attention_mask"][:, 3:] = 0
    losses = {}
    for policy in (None, "SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT|SKIP_CHECK_EXECUTION_AGENT"):
        model = MLM.build()
        engine = optimize(model, ort_skip_check=policy)
        said = capfd.readouterr().err
        assert (f"--ort_skip_check {policy}: from the second step on " in said) is bool(policy)
        assert ("other keyword arguments or dtypes than the first's are ignored" in said) is bool(
            policy and "BUILD_GRADIENT" in policy
        )
        accumulate(model, [without])
        shorter = {name: value[:, :7].contiguous() for name, value in without.items()}
        assert_same_step(model, MLM.build(), shorter)
        losses[policy] = [float(accumulate(model, [with_mask])[0]), float(accumulate(model, [without])[0])]
        engine.detach()
    right = [float(accumulate(MLM.build(), [batch])[0]) for batch in (with_mask, without)]
    assert abs(right[0] - right[1]) > 5e-4
    assert losses[None] == pytest.approx(right, rel=TOLERANCE)
    assert losses["SKIP_CHECK_DEVICE"] == pytest.approx(right, rel=TOLERANCE)
    skipped = losses["SKIP_CHECK_BUILD_GRADIENT|SKIP_CHECK_EXECUTION_AGENT"]
    assert skipped == pytest.approx([right[1], right[1]], rel=TOLERANCE)


@needs_ort
def test_two_models_of_a_process_have_their_own_opset_and_files(tmp_path):
    import onnx

    engines = []
    for opset in (14, 17):
        (folder := tmp_path / str(opset)).mkdir()
        model = MLM.build()
        engines.append((opset, folder, model, optimize(model, ort_opset=opset, ort_save_onnx=str(folder))))
    for opset, folder, model, _ in engines:
        assert_same_step(model, MLM.build(), MLM.batch())
        (exported,) = folder.glob("*torch_exported*.onnx")
        versions = {entry.domain: entry.version for entry in onnx.load(exported).opset_import}
        assert versions[""] == opset
        assert list(folder.glob("*execution_model*.onnx"))
    for *_, engine in engines:
        engine.detach()


@needs_ort
def test_determinism_is_followed_when_it_is_turned_on_later(monkeypatch):
    from onnxruntime.training import ortmodule

    model = MLM.build()
    engine = optimize(model, memory_opt_config="Gelu+:1:-1")
    accumulate(model, [MLM.batch()])
    assert not ortmodule.ORTMODULE_IS_DETERMINISTIC
    torch.use_deterministic_algorithms(True)
    try:
        accumulate(model, [MLM.batch()])
        assert ortmodule.ORTMODULE_IS_DETERMINISTIC
        assert [plan.applied_count for plan in engine.plans().enabled] == [3]
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_step(model, MLM.build(), MLM.batch())
    engine.detach()


@needs_ort
def test_what_this_build_of_onnxruntime_ignores_is_refused():
    from optimum_memopt.engines.ort.session import Hooks, OrtSession

    hooks = Hooks(choose=lambda text, rows: (), report=lambda text: None, phase=lambda phase: None)
    before = variables()
    with pytest.raises(MemOptError, match="this build of ONNX Runtime does not do --ort_triton True; leave it out"):
        OrtSession(Counting(), OrtOptions(ort_triton=True), layerwise=False, recompute=False, hooks=hooks)
    assert variables() == before


@needs_ort
def test_graph_rewrites_belong_to_the_model_that_asked_for_them():
    from optimum_memopt.engines.ort import compat

    compat.load()
    from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry

    def names():
        entries = (entry for entries in GraphOptimizerRegistry._OPTIMIZER_FUNCS.values() for entry in entries)
        return [function.__name__ for function, *_ in entries]

    with compat_options.select_graph_optimizers(OrtOptions(ort_efficient_attention=True)):
        assert names() == ["optimize_graph_for_aten_efficient_attention"]
    with compat_options.select_graph_optimizers(OrtOptions()):
        assert names() == []


# With the torch extensions, in a process of its own.


def run(script: str, environment: dict[str, str], *, cwd: Path) -> str:
    """The output of a script that may import the tests' own modules."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**environment, "PYTHONPATH": str(Path(__file__).parents[3])},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


SPARSITY = """
import torch
from tests.engines.ort.test_env_options import TOLERANCE, Tagger, optimize

ids = torch.arange(48).reshape(4, 12)
labels = ids.masked_fill(torch.arange(12) < 8, -100)
gathers = {}
for name, options in {
    "default": {},
    "label": {"ort_label_sparse_optimizer": True},
    "no label": {"ort_label_sparse_optimizer": False},
    "no embedding": {"ort_embedding_sparse_optimizer": False},
    "no compute": {"ort_compute_optimizer": False},
}.items():
    model, plain = Tagger(), Tagger()
    engine = optimize(model, **options)
    for offset in (0, 40):
        batch = (ids + offset, labels + offset * (labels > 0))
        loss, expected = model(*batch), plain(*batch)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    gathers[name] = sum(node.op_type == "ShrunkenGather" for node in engine.graph.node)
    engine.detach()
assert gathers == {"default": 2, "label": 2, "no label": 0, "no embedding": 2, "no compute": 0}, gathers
"""

CUSTOM_AUTOGRAD = """
import torch
from optimum_memopt import UnsupportedModelError
from tests.engines.ort.test_env_options import MLM, assert_same_step, optimize

class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return Tripled.apply(self.linear(x)).sum()

refused, trained, off = Model(), Model(), MLM.build()
engines = optimize(refused, ort_custom_autograd=False), optimize(trained), optimize(off, ort_custom_autograd=False)
for _ in range(2):
    try:
        refused(torch.ones(2, 3))
    except UnsupportedModelError as error:
        assert str(error).endswith(
            "torch extensions; leave out --ort_custom_autograd false, or give --memory_opt_engine compile"
        ), error
    else:
        raise AssertionError("trained with an inlined function")
trained(torch.ones(2, 3)).backward()
assert torch.equal(trained.linear.bias.grad, torch.full((3,), 6.0))
assert_same_step(off, MLM.build(), MLM.batch())
"""

CHECKPOINTING = """
from optimum_memopt import UnsupportedModelError
from tests.engines.ort.test_env_options import ZOO, accumulate, assert_same_step, optimize

def checkpointed(name, reentrant=True):
    model = ZOO[name].build()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model

def assert_refused(words, model, **options):
    try:
        optimize(model, **options)
        accumulate(model, [ZOO["llama"].batch()])
    except UnsupportedModelError as error:
        assert words in str(error), error
    else:
        raise AssertionError("trained")

case = ZOO["roberta-classification"]
model = checkpointed("roberta-classification")
engine = optimize(model, ort_allow_autograd_checkpoint=True)
masked = case.batch(3, 7, seed=1)
masked["attention_mask"][:, 4:] = 0
assert_same_step(model, case.build(), case.batch(), masked, case.batch(3, 7, seed=2))
operators = [node.op_type for node in engine.graph.node]
assert operators.count("PythonOp") == operators.count("PythonOpGrad") == 2
assert "Softmax" not in operators  # The layers are PyTorch's.

allowed = {"ort_allow_autograd_checkpoint": True}
assert_refused("is not re-entrant: the export would lose it", checkpointed("llama", reentrant=False), **allowed)
assert_refused("position_embeddings", checkpointed("llama"), **allowed)
"""


@pytest.mark.extensions
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "script", [SPARSITY, CUSTOM_AUTOGRAD, CHECKPOINTING], ids=("sparsity", "functions", "checkpoint")
)
def test_options_that_need_the_extensions(script, environment_with_extensions, tmp_path):
    run(script, environment_with_extensions, cwd=tmp_path)


def test_the_document_has_a_row_for_each_option():
    text = DOCUMENT.read_text()
    for env_option in ENV_OPTIONS:
        assert re.search(rf"`--{env_option.option}[^`]*`.*`{env_option.variable}`", text), env_option
    for variable in KNOWN:
        assert f"`{variable.removeprefix('ORTMODULE_')}`" in text, variable
