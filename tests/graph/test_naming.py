"""Cluster ids: their names, that equal clusters have equal ids, and ONNX Runtime's own ids beside them."""

from collections import Counter

import pytest
import torch

from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.compile.graph.candidates import recompute_chain
from optimum_memopt.engines.compile.graph.naming import (
    CUT_ELSEWHERE,
    LAYOUTS,
    MODULES,
    OPERATORS,
    cluster_id,
    translate,
)
from optimum_memopt.engines.shared.registry import create
from optimum_memopt.options import MemOptOptions, resolve
from optimum_memopt.plans.grammar import parse
from optimum_memopt.plans.matching import operators
from tests.captured import Captured, capture
from tests.compiled import DROPOUT, GPT2_DROPOUT
from tests.gradients import accumulate
from tests.model_zoo import ZOO

ROBERTA = {
    "Dropout+": 6,
    "FusedMatMul+Add+": 2,
    "FusedMatMul+Add+Dropout+": 4,
    "FusedMatMul+Add+Dropout+Add+": 4,
    "FusedMatMul+Add+Reshape+Transpose+": 6,
    "Gather+Add+Gather+Add+": 1,
    "Gelu+": 2,
    "Gemm+LogSoftmax+": 1,
    "Gemm+Tanh+": 1,
    "LayerNormalization+": 3,
    "LayerNormalization+Dropout+": 2,
    "LayerNormalization+Gather+Dropout+": 2,
    "MatMul+Mul+Add+Softmax+": 2,
    "MatMul+Transpose+Reshape+": 2,
}
# In fixed sizes these are too small for a row.
SMALL = {"Gemm+LogSoftmax+", "Gemm+Tanh+", "LayerNormalization+Gather+Dropout+"}
GPT2 = {
    "Dropout+": 4,
    "FastGelu+": 6,
    "FastGelu+Reshape+": 2,
    "FusedMatMul+Reshape+LogSoftmax+": 1,
    "Gather+Add+Dropout+": 2,
    "Gemm+Reshape+": 2,
    "Gemm+Reshape+Dropout+": 4,
    "Gemm+Reshape+Dropout+Add+": 4,
    "Gemm+Reshape+Split+Reshape+Transpose+": 6,
    "LayerNormalization+": 1,
    "LayerNormalization+Reshape+": 4,
    "MatMul+Mul+Add+Softmax+": 2,
    "MatMul+Transpose+Reshape+": 2,
}
# Operators on integers: positions and labels, some of them computed differently than by ONNX Runtime's exporter.
INDICES = ("Range", "CumSum", "GatherElements", "Pad", "Slice")


def ids(captured: Captured) -> dict[str, int]:
    """Returns the number of recompute candidates of each id, without those that compute indices."""
    counts = Counter(c.cluster_id for c in captured.candidates if c.chain is not None)
    return {name: count for name, count in counts.items() if not set(operators(name)) & set(INDICES)}


def test_ids_of_roberta(roberta):
    assert ids(roberta) == ROBERTA


def test_ids_of_gpt2(gpt2):
    assert ids(gpt2) == GPT2


def test_the_same_layer_has_the_same_ids(roberta, gpt2, albert):
    for captured in (roberta, gpt2, albert):
        layers = sorted({candidate.activation.layer for candidate in captured.candidates} - {""})
        assert len(layers) == 2
        for row, candidates in captured.rows.items():
            # An activation that leaves a layer is also named by its reader: the next layer, or the head.
            activations = [candidate.activation for candidate in candidates]
            inside = [activation.layer for activation in activations if not activation.leaves_layer]
            counts = [inside.count(layer) for layer in layers]
            assert counts[0] == counts[1], row


def test_ids_are_the_same_for_other_batches(roberta, roberta_of_another_batch):
    assert roberta_of_another_batch.configs == roberta.configs


def test_ids_are_the_same_in_fixed_sizes():
    case = ZOO["roberta-classification"]
    fixed = capture(case.build(**DROPOUT).forward, dynamic=False, **case.batch(8, 32))
    assert ids(fixed).keys() == ROBERTA.keys() - SMALL


def test_no_id_is_longer_than_a_person_types(roberta, gpt2, albert):
    for captured in (roberta, gpt2, albert):
        for candidate in captured.candidates:
            assert len(operators(candidate.cluster_id)) <= 10
            parse(candidate.row)


def test_a_long_id_keeps_what_is_nearest_to_the_activation():
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = ((x + 1).neg() * 2).abs()
        return x.sin().sum()

    captured = capture(function, torch.randn(3, 4, requires_grad=True))
    chain = recompute_chain(captured.joint, captured.activations[-1], ())
    assert len(chain.nodes) == 16
    assert cluster_id(chain) == "Mul+Abs+Add+Neg+Mul+Abs+"


def test_operators_that_only_lay_out_have_one_name_in_both_engines():
    known = {name for names in OPERATORS.values() for name in names} | set(LAYOUTS.values()) | set(MODULES.values())
    assert all(name.isidentifier() and name[0].isupper() for name in known)
    for here in CUT_ELSEWHERE.values():
        for name in here:
            assert set(operators(name)) <= known | {"Add", "Mul", "Relu", "Transpose"}, name


# Rows of ONNX Runtime's table without a counterpart here, with the reason.
NOT_HERE = {
    "Cast+Add+": "positions are made in whole numbers",
    "Range+Unsqueeze+": "positions begin with the length of a cache, which is 0",
    "Reshape+": "labels in one dimension are a view of an input",
}


@pytest.fixture(scope="module", params=["roberta-classification", "gpt2"])
def ort_rows(request: pytest.FixtureRequest) -> tuple[str, dict[str, int]]:
    engine: Engine = create(resolve(MemOptOptions(memory_opt_engine="ort", ort_fallback=False)))
    case = ZOO[request.param]
    model = case.build(**(GPT2_DROPOUT if request.param == "gpt2" else DROPOUT))
    engine.attach(model)
    accumulate(model, [case.batch()])
    rows: dict[str, int] = {}
    for row in engine.plans().plans:
        for name in row.cluster_ids:
            rows[name] = max(rows.get(name, 0), row.frequency)
    engine.detach()
    return request.param, rows


def test_every_id_of_onnx_runtime_is_known_here(ort_rows, roberta, gpt2):
    name, rows = ort_rows
    here = {candidate.cluster_id for candidate in (gpt2 if name == "gpt2" else roberta).candidates}
    found = {asked: translate(asked, here) for asked in rows}
    assert {asked for asked, meant in found.items() if meant is None} <= set(NOT_HERE)
    renamed = {asked: meant for asked, meant in found.items() if meant not in (None, asked)}
    expected = {
        "Add+": "Gemm+Reshape+Dropout+Add+",
        "Gather+Gather+Add+Dropout+": "Gather+Add+Dropout+",
        "MatMul+Transpose+Reshape+Reshape+": "MatMul+Transpose+Reshape+",
    }
    if name != "gpt2":
        expected = {
            "Add+": "FusedMatMul+Add+Dropout+Add+",
            "Gather+Dropout+": "LayerNormalization+Gather+Dropout+",
            "Gather+Gather+Add+Gather+Add+": "Gather+Add+Gather+Add+",
        }
    assert renamed == expected
    assert len(set(filter(None, found.values()))) == len([meant for meant in found.values() if meant])


def test_the_same_id_occurs_as_often_in_both_engines(ort_rows, roberta, gpt2):
    name, rows = ort_rows
    here = ids(gpt2 if name == "gpt2" else roberta)
    # A dropout and its mask are one node there, and norms of other operators' inputs are separate views.
    same = (rows.keys() & here.keys()) - {"Dropout+", "LayerNormalization+"}
    assert len(same) >= 4
    assert {one: rows[one] for one in same} == {one: here[one] for one in same}


@pytest.mark.parametrize(
    "asked, meant",
    [
        *((asked, "Gelu+") for asked in ("Gelu+", "BiasGelu+")),
        *((asked, "MatMul+Mul+Add+Softmax+") for asked in ("Softmax+", "BiasSoftmax+")),
        *((asked, "Dropout+") for asked in ("BitmaskDropout+", "BitmaskBiasDropout+")),
        ("MatMul+Add+Dropout+", "FusedMatMul+Add+Dropout+"),
        ("FusedMatMul+Add+Unsqueeze+Transpose+Squeeze+", "FusedMatMul+Add+Reshape+Transpose+"),
        *((asked, None) for asked in ("FusedMatMul+BiasGelu+", "Reshape+", "Unsqueeze+Squeeze+", "Gellu+")),
        ("LayerNormalization+Gelu+", None),
    ],
)
def test_an_id_of_other_fusions_means_the_same_activation(asked, meant):
    assert translate(asked, ROBERTA) == meant


def test_two_candidates_are_none():
    assert translate("Gelu+Reshape+", {"Gelu+Squeeze+", "Gelu+Unsqueeze+"}) is None
    assert translate("Gelu+Reshape+", {"Gelu+Squeeze+", "Tanh+"}) == "Gelu+Squeeze+"
