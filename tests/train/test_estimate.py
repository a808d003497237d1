"""A prediction without a run is what the first step is planned with."""

from dataclasses import replace

import pytest
import torch

from optimum_memopt.engines.api.run import Selection, StepSpec
from optimum_memopt.engines.compile.predict.estimate import estimate
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import parse
from optimum_memopt.plans.table import PlanRow, PlanTable
from optimum_memopt.predict.workload import Workload
from tests.rotation import nightly
from tests.saved_configs import save

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
# Model, changes to its config, task, plans. Attention is transformers' default, and changes with dropout.
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
    engine = CompileEngine(selection, compiler="aot_eager")
    engine.outputs_read_by = lambda: ""
    engine.attach(real)
    real(**batch).loss.backward()
    table = engine.plans()
    # An image's height and width are no symbols in a real run.
    assert table.symbols.items() <= found.table.symbols.items()
    # T5's loss is chunked without being asked to.
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


def check_fixed_sizes(found: PlanTable, expected: PlanTable) -> None:
    """The same rows without formulas, and without occurrences too small to count in a model whose sizes are fixed."""
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
    shown = found._repr_html_()
    assert found.table._repr_html_() in shown and "Predicted, not run: attention is " in shown


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
