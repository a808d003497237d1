"""A step with another optimizer, accumulation, frozen parameters and other batch sizes, against real steps."""

from dataclasses import asdict

import pytest
import torch
from allocations import allocated
from transformers import Trainer, TrainingArguments

from optimum_memopt.engines.api.run import Selection, StepSpec
from optimum_memopt.engines.compile.predict.estimate import estimate
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import MemOptError
from optimum_memopt.predict.workload import Workload
from tests.rotation import nightly
from tests.saved_configs import save

# Weights that take more than activations, so that the optimizer's step is a peak too.
WIDE = {"n_embd": 128, "n_layer": 1}
RUNS = {
    "adafactor": ("adafactor", 1, ()),
    "accumulated": ("adamw_torch", 2, ()),
    "frozen": ("sgd", 2, ("mlp", "ln_f")),
}


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
    # Left out: a step count for each parameter.
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
    assert header.startswith("GPT2LMHeadModel on cpu")
    assert titles.split("  ")[-1] == "saved for backward" and "allocated" not in titles
    assert [row.split()[0] for row in rows] == ["3", "8"]


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
    with pytest.raises(MemOptError, match="--optim lomo: its memory is not known"):
        estimate(Workload(folder, "text-generation", 2, 8), Selection(), StepSpec(optim="lomo"))


def test_plain_names_of_sizes() -> None:
    from optimum_memopt.engines.compile.graph.symbols import plain_sizes

    known = {"inputs_input_ids_dim0": 8, "inputs_input_ids_dim1": 24, "inputs_labels_dim1": 7}
    assert plain_sizes(known, 64, None) == {"inputs_input_ids_dim0": 64}
    assert plain_sizes(known, None, 128) == {"inputs_input_ids_dim1": 128}
    assert plain_sizes(known, None, None) == {}
    with pytest.raises(MemOptError, match="^seq_len=3: no size that can be changed; those are inputs_pixels_dim0$"):
        plain_sizes({"inputs_pixels_dim0": 8}, 4, 3)
