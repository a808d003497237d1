import onnx

from optimum_memopt.engines.ort.graph_fixes import gradients
from optimum_memopt.engines.ort.session import session
from optimum_memopt.engines.shared.auto import create
from optimum_memopt.options import MemOptOptions, resolve
from tests.gradients import assert_same_step
from tests.model_zoo import ZOO
from tests.ort.helpers import needs_ort

pytestmark = needs_ort


def expanded_for_gradients(graph) -> list[bool]:
    """For each GatherElementsGrad of indices that were expanded: whether that happens in the backward."""
    end = next(position for position, node in enumerate(graph.node) if node.op_type == "YieldOp")
    expanded = {node.output[0]: position for position, node in enumerate(graph.node) if node.op_type == "Expand"}
    gradients = [node for node in graph.node if node.op_type == "GatherElementsGrad"]
    return [expanded[node.input[2]] > end for node in gradients if node.input[2] in expanded]


def trained(name: str):
    engine = create(
        resolve(MemOptOptions(memory_opt_engine="ort", ort_fallback=False, memory_opt_log_level="warning"))
    )
    model = ZOO[name].build()
    engine.attach(model)
    return engine, model


def test_indices_are_expanded_in_the_backward_and_gradients_are_those_of_torch():
    engine, model = trained("deberta-v2-mlm")
    plain = ZOO["deberta-v2-mlm"].build()
    for shape in ((4, 12), (3, 7)):
        assert_same_step(model, plain, ZOO["deberta-v2-mlm"].batch(*shape))
    in_backward = expanded_for_gradients(engine.graph)
    # Both terms of the relative attention, in each of two layers.
    assert len(in_backward) >= 4 and all(in_backward)


def test_without_it_they_are_stashed(monkeypatch):
    """Fails when ONNX Runtime learns it, and this can go."""
    monkeypatch.setattr(session, "expand_indices_in_backward", lambda graph: None)
    engine, model = trained("deberta-v2-mlm")
    model(**ZOO["deberta-v2-mlm"].batch()).loss.backward()
    assert not any(expanded_for_gradients(engine.graph))


def test_other_graphs_are_left_alone():
    gather = onnx.helper.make_node("GatherElementsGrad", ["dy", "shape", "indices"], ["dx"])
    graph = onnx.helper.make_graph([gather], "graph", [], [])
    gradients.expand_indices_in_backward(graph)
    assert [node.op_type for node in graph.node] == ["GatherElementsGrad"]
