"""A prediction without a run equals the one that the first step is planned with."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from allocations import allocated
from transformers import LlamaConfig, Trainer, TrainingArguments

import optimum_memopt
from optimum_memopt.engines.api.run import Run, Selection
from optimum_memopt.engines.compile.capture.capture import Capture
from optimum_memopt.engines.compile.predict.estimate import estimate, plain_ways
from optimum_memopt.engines.compile.predict.micro_batches import of_workload
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import DoesNotFitError, MemOptError
from optimum_memopt.plans.grammar import parse
from optimum_memopt.plans.table import PlanRow, PlanTable
from optimum_memopt.predict.workload import Workload
from optimum_memopt.sizes import parse_budget
from optimum_memopt.step_settings import StepSpec
from tests.rotation import in_turn, nightly
from tests.saved_configs import save

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
# Model, changes to its config, task, plans. Attention is transformers' default, which depends on dropout.
CASES = {
    "roberta": ("roberta-mlm", DROPOUT, "fill-mask", Selection(level=1)),
    "deberta": ("deberta-v2-mlm", DROPOUT, "text-classification", Selection(config=parse("Gelu+:1:1"))),
    "vit": ("vit", {"num_hidden_layers": 1}, "image-classification", Selection()),
    "gpt2": ("gpt2", {}, "text-generation", Selection(level=2)),
    "t5": ("t5", {}, "text2text-generation", Selection()),
}


@pytest.mark.parametrize("name", nightly(CASES, but=["vit"]))
def test_a_prediction_is_what_a_real_step_is_planned_with(tmp_path, name):
    model, changes, task, selection = CASES[name]
    workload = Workload(save(tmp_path, model, **changes), task, 32, 40)
    symbolic = name == "roberta"
    found = estimate(workload, selection, symbolic=symbolic)

    real, batch = workload.build()
    if "attention_mask" in batch:
        # A workload is predicted with padding, but the batch that it builds has none.
        batch["attention_mask"][-1, -1] = 0
    engine = CompileEngine(selection, compiler="aot_eager")
    engine.outputs_read_by = lambda: ""
    engine.attach(real)
    real(**batch).loss.backward()
    table = engine.plans()
    # An image's height and width are not symbolic in a real run.
    assert table.symbols.items() <= found.table.symbols.items()
    # T5's loss is chunked by default.
    planned = [row for row in found.table.enabled if not row.config.startswith("Loss")]
    assert bool(planned) == (selection != Selection())
    if symbolic:
        assert replace(found.table, header=()) == replace(table, header=())
        assert table.symbols == {"inputs_input_ids_dim0": 32, "inputs_input_ids_dim1": 40}
    else:
        check_fixed_sizes(found.table, table)

    footprint = engine.predictor.footprint()
    kept = ("activations", "parameters", "buffers", "batch", "optimizer", "gradients")
    assert {part: found.parts[part] for part in kept} == {part: getattr(footprint, part) for part in kept}
    assert found.attention == real.config._attn_implementation


@in_turn
def test_a_loop_that_holds_outputs_is_planned_as_it_trains(tmp_path: Path) -> None:
    workload = Workload(save(tmp_path, "llama"), "text-generation", 32, 40)
    spec, level = StepSpec(compiler="aot_eager", keep_outputs=True), Selection(level=1)
    found = estimate(workload, level, spec)
    model, batch = workload.build()
    batch["attention_mask"][-1, -1] = 0
    engine = CompileEngine(level, "aot_eager")
    engine.attach(model)
    for _ in range(2):
        out = model(**batch)
        out.loss.backward()
    assert out.logits.nbytes <= found.parts["outputs"] <= out.logits.nbytes + 64
    for part in ("activations", "outputs"):
        assert found.parts[part] == getattr(engine.predictor.footprint(), part)
    dropped = estimate(workload, level, replace(spec, keep_outputs=False, loss="plain"))
    assert found.parts["activations"] > dropped.parts["activations"]


def check_fixed_sizes(found: PlanTable, expected: PlanTable) -> None:
    """Check for the same rows, without formulas and without occurrences that are too small with fixed sizes."""
    rows = {plan.config: plan for plan in found.plans}
    assert rows.keys() <= {plan.config for plan in expected.plans}
    assert len(rows) > 3 and not any(plan.saving_symbolic for plan in found.plans)
    for plan in expected.plans:
        row = rows.get(plan.config, PlanRow(plan.config, 0, 0, ""))
        small = plan.frequency - row.frequency
        assert 0 <= plan.saving_bytes - row.saving_bytes < 4096 * small or (small, plan.saving_bytes) == (
            0,
            row.saving_bytes,
        )
        if not small:
            assert (row.requested_count, row.applied_count) == (plan.requested_count, plan.applied_count)


def test_nothing_is_allocated_and_nothing_left_behind(tmp_path):
    from optimum_memopt.memory.peak_monitor import PeakMonitor

    sizes = {"hidden_size": 8192, "intermediate_size": 8192, "num_hidden_layers": 1, "vocab_size": 1000}
    monitor = PeakMonitor()
    monitor.start_run()
    before = monitor.read().resident
    found = estimate(Workload(save(tmp_path, "roberta-mlm", **sizes), "fill-mask", 2, 8), Selection())
    assert found.parts["parameters"] > 1.5 * 2**30
    assert monitor.run_peak - before < 800
    assert found.peak_mib > 4 * found.parts["parameters"] / 2**20
    assert type(torch.ones(1)) is torch.Tensor
    assert found.timeline.peak == round(found.peak_mib * 2**20)
    assert "Predicted, not run: attention is " in found.to_text()


@in_turn
def test_a_model_that_looks_into_its_data_says_so(tmp_path, monkeypatch):
    from transformers import RobertaForMaskedLM

    original = RobertaForMaskedLM.forward

    def forward(self, input_ids=None, **kwargs):
        if input_ids.sum().item() < 0:
            return None
        return original(self, input_ids, **kwargs)

    monkeypatch.setattr(RobertaForMaskedLM, "forward", forward)
    with pytest.raises(MemOptError, match="RobertaForMaskedLM cannot be traced on fake tensors .*--measure"):
        estimate(Workload(save(tmp_path, "roberta-mlm"), "fill-mask", 2, 8), Selection())


def offload_row(table: PlanTable) -> PlanRow:
    return next(plan for plan in table.enabled if ":3:" in plan.config)


@pytest.mark.nightly
def test_offload_counts_for_a_device_that_is_not_here(tmp_path):
    workload = Workload(save(tmp_path, "roberta-mlm", intermediate_size=512, num_hidden_layers=1), "fill-mask", 32, 40)
    kept, offloaded = (
        estimate(workload, Selection(config=parse(config)), StepSpec(device="h100", compiler="aot_eager"))
        for config in ("Gelu+:3:0", "Gelu+:3:-1")
    )
    row = offload_row(offloaded.table)
    assert row.applied_saving_bytes > 0
    assert offloaded.peak_mib < kept.peak_mib or "saves nothing at the peak" in row.note
    assert any(line.startswith("Predicted for the host: ") for line in offloaded.table.header)
    here = estimate(workload, Selection(config=parse("Gelu+:3:-1")), StepSpec(compiler="aot_eager"))
    assert offload_row(here.table).applied_saving_bytes == 0
    assert not any("for the host" in line for line in here.table.header)


# Weights are larger than activations, so that the optimizer's step is a peak, too.
WIDE = {"n_embd": 128, "n_layer": 1}
RUNS = {
    "adafactor": ("adafactor", 1, ()),
    "accumulated": ("adamw_torch", 2, ()),
    "frozen": ("sgd", 2, ("mlp", "ln_f")),
}


def test_all_micro_batches_of_a_step_are_held(tmp_path: Path) -> None:
    """Trainer fetches them together, which counts for images."""
    folder = save(tmp_path, "vit", num_hidden_layers=2, image_size=64)
    workload = Workload(folder, "image-classification", 2)
    specs = {count: StepSpec("h100", "aot_eager", gradient_accumulation_steps=count) for count in (2, 6)}
    batch = estimate(workload, Selection(), specs[2]).parts["batch"] // 2
    few, many = (estimate(workload, Selection(), spec, with_ways=True) for spec in specs.values())
    assert many.parts["batch"] == 6 * batch
    assert many.peak_mib - few.peak_mib == pytest.approx(4 * batch / 2**20, rel=1e-3)
    few, many = (dict(zip("ab", plain_ways(workload, spec), strict=True)) for spec in specs.values())
    for name in few:
        assert many[name].peak - few[name].peak == pytest.approx(4 * batch, abs=2**12)
    steps = of_workload(workload, parse_budget("1GiB"), specs[2])
    for plan in steps.plans:
        assert steps.step(plan, 2, 6).peak - steps.step(plan, 2, 2).peak == 4 * batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("model"), "gpt2", **WIDE)


@pytest.mark.parametrize("name", nightly(RUNS, but=["frozen"]))
def test_the_step_is_the_one_that_trains(name: str, folder: str, tmp_path) -> None:
    optim, micro_batches, patterns = RUNS[name]
    workload = Workload(folder, "text-generation", 4, 24, patterns)
    found = estimate(workload, Selection(), StepSpec(optim=optim, gradient_accumulation_steps=micro_batches))
    model, batch = workload.build()
    engine = CompileEngine(compiler="aot_eager", dynamic=False)
    engine.outputs_read_by = lambda: ""
    engine.run = lambda: Run(gradient_accumulation=micro_batches > 1)
    engine.attach(model)
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=optim, use_cpu=True, report_to=[])
    trainer = Trainer(model=model, args=arguments)
    optimizer = trainer.create_optimizer()

    def step() -> None:
        for _ in range(micro_batches):
            model(**batch).loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    peak, _, _ = allocated(lambda: (step(), step()))
    parts = found.parts
    held = parts["parameters"] + parts["buffers"] + parts["batch"] + parts["constant"]
    # The prediction leaves out a step count per parameter.
    assert found.peak_mib * 2**20 - held == pytest.approx(peak, rel=5e-3, abs=1024)
    assert parts["optimizer"] == sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert (parts["gradients"], parts["accumulated"]) == (trained, trained if micro_batches > 1 else 0)
    assert bool(patterns) == (trained < parts["parameters"])
    engine.detach()


def test_batch_sizes_are_predicted_from_one_trace(folder: str) -> None:
    found = estimate(Workload(folder, "text-generation", 8, 24), Selection(), batch_sizes=(3, 8))
    small, large = found.batches
    alone = estimate(Workload(folder, "text-generation", 3, 24), Selection())
    assert small.activations == pytest.approx(alone.parts["activations"], rel=5e-3)
    around = alone.peak_mib * 2**20 - alone.parts["constant"]
    assert small.peak - found.parts["constant"] == pytest.approx(around, rel=5e-3)
    assert (large.activations, large.peak) == (found.parts["activations"], round(found.peak_mib * 2**20))
    for point in found.batches:
        assert 0 < point.saved < point.activations
        assert (point.allocated, point.reserved) == (None, None)
    header, titles, _, *rows, _ = found.to_text().splitlines()
    assert header.startswith("GPT2LMHeadModel in float32 on cpu")
    assert titles.split("  ")[-1] == "saved for backward" and "allocated" not in titles
    assert [row.split()[0] for row in rows] == ["3", "8"]


@in_turn
def test_on_a_device_the_allocator_counts_too_and_the_step_is_foreachs(folder: str) -> None:
    workload = Workload(folder, "text-generation", 8, 24)
    spec = StepSpec("h100", "aot_eager", optim="adamw_torch")
    found = estimate(workload, Selection(), spec, batch_sizes=(4, 8))
    weights = found.parts["parameters"]
    assert 0.95 * weights < found.parts["step"] <= weights
    for point in found.batches:
        assert point.peak <= point.allocated <= point.reserved
    small, large = (asdict(point) for point in found.batches)
    assert all(small[name] <= large[name] for name in small)


def test_an_optimizer_that_is_not_known(folder: str) -> None:
    with pytest.raises(MemOptError, match="--optim lomo: its memory is unknown"):
        estimate(Workload(folder, "text-generation", 2, 8), Selection(), StepSpec(optim="lomo"))


def test_plain_names_of_sizes() -> None:
    from optimum_memopt.engines.compile.graph.symbols import plain_sizes

    known = {"inputs_input_ids_dim0": 8, "inputs_input_ids_dim1": 24, "inputs_labels_dim1": 7}
    assert plain_sizes(known, 64, None) == {"inputs_input_ids_dim0": 64}
    assert plain_sizes(known, None, 128) == {"inputs_input_ids_dim1": 128}
    assert plain_sizes(known, None, None) == {}
    with pytest.raises(MemOptError, match="^seq_len=3: no size that can be changed; those are inputs_pixels_dim0$"):
        plain_sizes({"inputs_pixels_dim0": 8}, 4, 3)


@pytest.mark.parametrize("padding", [True, False])
def test_a_module_is_planned_with_the_padding_of_its_config(tmp_path, padding):
    workload = Workload(save(tmp_path, "bert-mlm"), "fill-mask", 4, 16, padding=padding)
    of_config = optimum_memopt.plan(
        str(workload.model), "fill-mask", batch_size=4, seq_len=16, padding=padding, device="h100"
    )
    of_module = optimum_memopt.plan(
        workload.build()[0], "fill-mask", batch_size=4, seq_len=16, padding=padding, device="h100"
    )
    assert of_module.peak == of_config.peak
    assert of_module.plan.solved_for["padding"] is of_config.plan.solved_for["padding"] is padding


def test_a_sum_of_a_scalar_takes_no_workspace():
    class Scalar(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean().sum(dim=0)

    assert optimum_memopt.plan(Scalar(8, 8), example_inputs={"x": torch.randn(4, 8)}, device="h100").peak > 0


def test_an_error_names_no_command_that_refuses_the_settings(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("cannot be traced")

    monkeypatch.setattr(Capture, "run", fail)
    folder, ends = save(tmp_path, "gpt2", num_hidden_layers=1), "memopt plan --measure runs it"
    with pytest.raises(MemOptError, match=f"{ends}$"):
        optimum_memopt.plan(folder, "text-generation", batch_size=2, seq_len=8)
    for refused in ({"bf16": True}, {"dtype": "bfloat16"}, {"device": "h100"}, {"fsdp": 2}):
        with pytest.raises(MemOptError) as error:
            optimum_memopt.plan(folder, "text-generation", batch_size=2, seq_len=8, **refused)
        assert ends not in str(error.value)


@pytest.mark.nightly
def test_the_lowest_budget_that_an_error_names_fits_in_cuda_s_blocks() -> None:
    """So do budgets a little above it, where a margin for one plan's blocks leaves room for no other plan."""
    settings = {"batch_size": 8, "seq_len": 60, "device": "h100", "bf16": True, "compiler": "aot_eager"}
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=344,
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
        num_hidden_layers=3,
    )
    with pytest.raises(DoesNotFitError) as refused:
        optimum_memopt.plan(config, "text-generation", **settings, budget="50MiB")
    for more in (0, 30_000, 100_000):
        budget = (refused.value.lowest + more) / 2**20
        found = optimum_memopt.plan(config, "text-generation", **settings, budget=f"{budget:.4f}MiB")
        assert found.peak <= budget * 2**20
