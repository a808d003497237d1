import pytest

from optimum_memopt.engines.ort.session.graph_plans import residual_normalizations

onnx = pytest.importorskip("onnx")
node = onnx.helper.make_node


def graph(*nodes):
    return onnx.helper.make_graph(list(nodes), "training", [], [])


def post_norm(operator="LayerNormalization", layers=2):
    """BERT: x = Norm(x + Layer(x))."""
    nodes, stream = [], "x0"
    for number in range(1, layers + 1):
        nodes += [
            node("MatMul", [stream, "w"], [f"h{number}"]),
            node("Add", [stream, f"h{number}"], [f"s{number}"]),
            node(operator, [f"s{number}", "scale", "bias"], [f"x{number}", f"mean{number}", f"deviation{number}"]),
        ]
        stream = f"x{number}"
    return nodes


def pre_norm(operator="LayerNormalization", layers=2):
    """GPT-2: x = x + Layer(Norm(x)), and a last Norm."""
    nodes, stream = [], "x0"
    for number in range(1, layers + 1):
        nodes += [
            node(operator, [stream, "scale", "bias"], [f"n{number}", f"mean{number}", f"deviation{number}"]),
            node("MatMul", [f"n{number}", "w"], [f"h{number}"]),
            node("Add", [stream, f"h{number}"], [f"x{number}"]),
        ]
        stream = f"x{number}"
    return [*nodes, node(operator, [stream, "scale", "bias"], ["last"]), node("MatMul", ["last", "w"], ["logits"])]


@pytest.mark.parametrize("operator", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_in_post_norm_models_the_normalization_is_the_residual_stream(operator):
    assert residual_normalizations(graph(*post_norm(operator))) == {operator}


@pytest.mark.parametrize("operator", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_in_pre_norm_models_the_stream_passes_beside_it(operator):
    assert residual_normalizations(graph(*pre_norm(operator))) == frozenset()


def test_one_layer_is_not_a_chain():
    assert residual_normalizations(graph(*post_norm(layers=1))) == frozenset()


def test_the_backward_s_additions_of_gradients_do_not_count():
    backward = [node("YieldOp", ["logits"], ["g"]), node("Add", ["n1", "g"], ["g1"])]
    assert residual_normalizations(graph(*pre_norm(), *backward)) == frozenset()
    assert residual_normalizations(graph(*post_norm(), *backward)) == {"LayerNormalization"}


def test_additions_to_statistics_do_not_count():
    statistics = node("Add", ["mean1", "one"], ["shifted"])
    assert residual_normalizations(graph(*pre_norm(), statistics)) == frozenset()


def test_each_kind_of_normalization_is_judged_by_itself():
    other = [
        node("SimplifiedLayerNormalization", ["logits", "scale"], ["r"]),
        node("MatMul", ["r", "w"], ["out"]),
    ]
    assert residual_normalizations(graph(*post_norm(), *other)) == {"LayerNormalization"}
    assert residual_normalizations(graph()) == frozenset()
