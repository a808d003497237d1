"""Failures of code that only reports on training never end it."""

import pytest
import torch

from optimum_memopt import optimize
from optimum_memopt.engines.compile.partition import partitioned_graph
from optimum_memopt.engines.compile.predict import table
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from tests.gradients import assert_bitwise_same_step
from tests.rotation import nightly
from tests.train.test_hooks import Net
from tests.trainer_runs import log_lines, make, weights


def fails(*args, **kwargs):
    raise IndexError("no such thing\nand more")


@pytest.mark.parametrize(
    ("owner", "name", "left_out"),
    nightly(
        [
            (partitioned_graph, "schedule", "the predicted peak"),
            (partitioned_graph, "symbol_names", "the names of sizes"),
            (table, "StepMemoryPredictor", "the predicted peak"),
            (StepMemoryPredictor, "footprint", "the predicted peak"),
            (StepMemoryPredictor, "note_forward", "the predicted peak"),
            (StepMemoryPredictor, "peak", "the predicted peak"),
            (table, "to_table", "the plan table"),
        ],
        but=[
            (partitioned_graph, "schedule", "the predicted peak"),
            (StepMemoryPredictor, "peak", "the predicted peak"),
            (table, "to_table", "the plan table"),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failure_is_one_warning(monkeypatch, owner, name, left_out):
    monkeypatch.setattr(owner, name, fails)
    ours, plain, batch = Net(), Net(), {"x": torch.randn(4, 8)}
    engine = optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    with log_lines() as lines:
        for _ in range(2):
            assert_bitwise_same_step(ours, plain, batch)
            peak = engine.predicted_peak_mib(None)
    expected = f"{left_out} is left out (IndexError: no such thing); training is not affected"
    assert [line for line in lines if "left out" in line] == [expected]
    assert (peak is None) == (left_out == "the predicted peak")
    assert bool(engine.plans().plans) == (name != "to_table")
    assert engine.plans().header


@pytest.mark.parametrize("name", nightly(["gpt2", "bert-classification", "llama"]))
def test_noisy_embeddings(tmp_path, name):
    """NEFTune trains bitwise as without an engine, although its noise splits the graph and one backward is empty."""
    found = []
    for own in ({"plain": True}, {"memory_opt_engine": "compile", "memory_opt_level": 1}):
        trainer = make(tmp_path, name, max_steps=2, neftune_noise_alpha=5.0, **own)
        trainer.train()
        found.append(weights(trainer.model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    shown = trainer.memopt.table
    assert len(shown.enabled) > 2 and any(line.startswith("Predicted peak") for line in shown.header)
