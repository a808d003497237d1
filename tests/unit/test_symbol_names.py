import pytest
import sympy
import torch

from optimum_memopt import optimize
from optimum_memopt.engines.compile.graph.symbols import input_sizes, symbol_names

BATCH = {"input_ids_dim0": 8, "input_ids_dim1": 32, "labels_dim0": 8, "labels_dim1": 32}
BATCH |= {"attention_mask_dim0": 8, "attention_mask_dim1": 32}
SYMBOL = sympy.Symbol("s0")


@pytest.mark.parametrize(
    ("source", "size", "name"),
    [
        ("L['kwargs']['labels'].size()[1]", 32, "labels_dim1"),
        ("L['___stack0'].size()[1]", 32, "input_ids_dim1"),
        ("L['___stack0'][0].size()[0]", 8, "input_ids_dim0"),
        # Equal to a size of another dimension, as no size of the same dimension is equal.
        ("L['hidden'].size()[2]", 32, "input_ids_dim1"),
        ("L['hidden'].size()[1]", 256, None),
        ("L['window']", 32, None),
        # A submodule has an argument of this name with another shape.
        ("L['labels'].size()[1]", 8, "labels_dim0"),
        ("L['labels'].size()[1]", 5, None),
        # A layer's four-dimensional mask.
        ("L['attention_mask'].size()[3]", 32, "input_ids_dim1"),
    ],
)
def test_a_size_is_that_of_an_input_or_equal_to_one(source, size, name):
    assert symbol_names({SYMBOL: [source]}, {SYMBOL: size}, BATCH).get(SYMBOL) == name


def test_inputs_in_mappings_have_names_too():
    sizes = input_sizes({"batch": {"x": torch.zeros(3, 5)}, "y": torch.zeros(3), "scale": 2.0})
    assert sizes == {"x_dim0": 3, "x_dim1": 5, "y_dim0": 3}


class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))

    def forward(self, input_ids):
        first, second = self.layers
        x = torch.nn.functional.gelu(first(self.embed(input_ids)))
        torch._dynamo.graph_break()
        return (torch.nn.functional.gelu(second(x)) ** 2).mean()


def test_the_prediction_of_another_batch_counts_graphs_behind_a_break():
    peaks = []
    for rows, tokens in ((6, 40), (9, 70)):
        model = Broken()
        engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=0)
        model(input_ids=torch.zeros(rows, tokens, dtype=torch.long)).backward()
        peaks.append(engine.predictor.footprint(batch_size=9, seq_len=70).activations)
    assert peaks[0] == peaks[1]
