"""No layer is recomputed before its backward begins, whatever a compiler would run first."""

import pytest
from torch import fx

from optimum_memopt.engines.compile.graph.joint import is_view
from optimum_memopt.engines.compile.graph.saved_activations import layer_of
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.train.engine import CompileEngine
from tests.compiled import selection
from tests.model_zoo import ZOO
from tests.rotation import nightly


def ancestors(node: fx.Node) -> set[str]:
    found: set[str] = set()
    todo = [node]
    while todo:
        for read in todo.pop().all_input_nodes:
            if read.name not in found:
                found.add(read.name)
                todo.append(read)
    return found


@pytest.mark.parametrize("name", nightly(["roberta", "gpt2", "albert"], but=["roberta"]))
@pytest.mark.parametrize("asked", ["level 1", "{gelu}+:1:-1"])
def test_what_a_layer_is_recomputed_from_waits_for_the_layer_behind_it(name, asked, request):
    captured = request.getfixturevalue(name)
    parts = captured.split(asked.format(gelu="Gelu" if name == "roberta" else "FastGelu"))
    recomputed = set(parts.recomputed(captured.joint))
    nodes = {node.name: node for node in parts.backward.graph.nodes}
    copies = [nodes[name] for name in recomputed if layer_of(nodes[name]) and not is_view(nodes[name])]
    first, second = sorted({layer_of(node) for node in copies})
    gradients = {
        node.name
        for node in nodes.values()
        if node.op == "call_function"
        and node.name not in recomputed
        and layer_of(node) == second
        and not is_view(node)
    }
    saved = {node.name for node in parts.saved_for_backward}
    checked = 0
    for node in copies:
        before = ancestors(node)
        if layer_of(node) == first and before & saved:
            assert gradients <= before, node
            checked += 1
    assert checked and len(gradients) > 10


@pytest.mark.nightly
@pytest.mark.skipif(not dynamo.inductor_works("cpu"), reason="there is no C++ compiler")
def test_inductor_holds_what_the_graph_would():
    model = ZOO["deberta-v2-classification"].build(num_hidden_layers=4)
    batch = ZOO["deberta-v2-classification"].batch(8, 60, seed=1)
    held = []
    for compiler in ("aot_eager", "inductor"):
        engine = CompileEngine(selection("level 1"), compiler, dynamic=False)
        engine.attach(model)
        model(**batch).loss.backward()
        held.append(engine.predictor.activations())
        assert not engine.predictor.caveat
        engine.detach()
    graph, program = held
    assert program < graph
