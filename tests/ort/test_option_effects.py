import copy

import pytest
import torch

from optimum_memopt import MemOptError
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.compat import internals
from optimum_memopt.engines.ort.options import OrtOptions
from tests.gradients import TOLERANCE, accumulate, assert_same_step
from tests.ort.helpers import MLM, Tagger, environment_variables, needs_ort, optimize, run_script
from tests.rotation import nightly

pytestmark = needs_ort


@pytest.mark.parametrize(
    "option",
    nightly(
        ["ort_compute_optimizer", "ort_embedding_sparse_optimizer", "ort_label_sparse_optimizer"],
        but=["ort_label_sparse_optimizer"],
    ),
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
    # Without the torch extensions nothing marks embeddings; with them, labels and compute shrink (see the last tests).
    assert (sizes[False] < sizes[None]) is (option != "ort_embedding_sparse_optimizer")


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(4, 4), []

    def forward(self, x):
        self.seen.append(x.dim())
        return self.linear(x).pow(2).mean()


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


def test_skipped_checks_are_said_and_show_on_other_keyword_arguments(capfd):
    with_mask = MLM.batch(length=9)
    without = {name: value for name, value in with_mask.items() if name != "attention_mask"}
    with_mask["attention_mask"][:, 3:] = 0
    losses = {}
    for policy in (None, "SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT|SKIP_CHECK_EXECUTION_AGENT"):
        model = MLM.build()
        engine = optimize(model, ort_skip_check=policy)
        printed = capfd.readouterr().err
        assert (f"--ort_skip_check {policy}: from the second step on " in printed) is bool(policy)
        assert ("changed keyword arguments or dtypes are ignored" in printed) is bool(
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


def test_what_this_build_of_onnxruntime_ignores_is_refused():
    from optimum_memopt.engines.ort.session.session import OrtSession

    before = environment_variables()
    with pytest.raises(MemOptError, match="this build of ONNX Runtime does not support --ort_triton True; leave"):
        OrtSession(Counting(), OrtOptions(ort_triton=True), Selection())
    assert environment_variables() == before


def test_graph_rewrites_belong_to_the_model_that_asked_for_them():
    from optimum_memopt.engines.ort.compat import ortmodule

    ortmodule.load()
    from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry

    def names():
        entries = (entry for entries in GraphOptimizerRegistry._OPTIMIZER_FUNCS.values() for entry in entries)
        return [function.__name__ for function, *_ in entries]

    with internals.select_graph_optimizers(efficient_attention=True, flash_attention=False, triton=False):
        assert names() == ["optimize_graph_for_aten_efficient_attention"]
    with internals.select_graph_optimizers(False, False, False):
        assert names() == []


@pytest.mark.extensions
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "script", ["label_sparsity.py", "custom_autograd.py", "activation_checkpointing.py", "grad_management_hooks.py"]
)
def test_options_that_need_the_extensions(script, environment_with_extensions, tmp_path):
    run_script(script, environment=environment_with_extensions, cwd=tmp_path)


@pytest.mark.extensions
@pytest.mark.timeout(1800)
def test_two_ranks_with_managed_gradients_stay_bitwise_equal(environment_with_extensions, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    output = run_script(
        "grad_management_ranks.py", tmp_path / "out", environment=environment_with_extensions, launcher=launcher
    )
    assert "rank 0 is done" in output and "rank 1 is done" in output


@pytest.mark.extensions
@pytest.mark.timeout(1800)
def test_the_peak_is_lower_when_managed_gradients_accumulate(environment_with_extensions):
    """Management saves a second set of gradients at the end of the backward; the parameters have 128 MiB."""
    plain, managed = (
        float(run_script("grad_management_peak.py", case, environment=environment_with_extensions).split()[-1])
        for case in ("plain", "managed")
    )
    assert managed < plain - 64
