"""Strategy 3. The copies beside a GPU's computation run in `test_on_a_gpu` alone; where they stand in the graphs of a
GPU is looked at on any machine, in graphs whose tensors are said to be on one."""

import copy
from unittest import mock

import pytest
import torch
from torch import fx
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt.engines.compile.analysis.joint import is_tensor, value
from optimum_memopt.engines.compile.engine import CompileEngine
from optimum_memopt.engines.compile.memory.timeline import graph_timeline
from optimum_memopt.engines.compile.passes import host_copies
from optimum_memopt.engines.compile.strategies import offload
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import Strategy
from tests.engines.compile.compiled import DROPOUT, Run, assert_bitwise_same, run, selection
from tests.gradients import accumulate
from tests.model_zoo import ZOO

HIDDEN = 64
ROWS = 32
CASE = ZOO["roberta-classification"]


class Block(torch.nn.Module):
    """Saves the output of a gelu, a view of it, and all outputs of a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(HIDDEN, HIDDEN)
        self.norm = torch.nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gelu = torch.nn.functional.gelu(self.inner(x))
        return self.norm(x + gelu.transpose(0, 1).reshape(gelu.shape) @ gelu.T @ x / (HIDDEN * ROWS))


class Blocks(torch.nn.Module):
    """`loss` of five blocks, and the output of the second where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor, returns_second: bool = False) -> CausalLMOutput:
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return CausalLMOutput(loss=x.square().mean(), logits=outputs[1] if returns_second else None)


def on_cuda(module: fx.GraphModule) -> None:
    """Say that all tensors of a graph are a GPU's."""
    for node in module.graph.nodes:
        if is_tensor(node):
            tensor = value(node)
            with tensor.fake_mode:
                node.meta["val"] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda"
                )


def positions(module: fx.GraphModule, operator: str) -> dict[str, int]:
    """Where this operator stands, by the name of its first argument (a copy: of what is copied)."""
    found = {}
    for index, node in enumerate(module.graph.nodes):
        if getattr(node.target, "_opname", "") == operator:
            source = node.args[0] if operator != "wait" else node.args[1]
            found[source.name.removesuffix("_on_host")] = index
    return found


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))}


@pytest.fixture(scope="module")
def plain(blocks, batch) -> Run:
    """The blocks' step without a plan."""
    return run(blocks, "", batch)


@pytest.fixture(scope="module")
def gelus(plain) -> str:
    return plain.split.request("gelu", Strategy.OFFLOAD)


@pytest.fixture(scope="module")
def norms(plain) -> str:
    return plain.split.request("getitem", Strategy.OFFLOAD)


@pytest.mark.parametrize("strides", [(6, 1), (1, 3), (9, 2)], ids=["dense", "transposed", "gaps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_copies_are_the_tensors(strides, dtype):
    tensor = torch.arange(40).to(dtype).as_strided((3, 4), strides)
    host = torch.ops.optimum_memopt.offload(tensor)
    back = torch.ops.optimum_memopt.reload(host, tensor.device)
    torch.library.opcheck(host_copies.offload, (tensor,))
    torch.library.opcheck(host_copies.reload, (host, tensor.device))
    for copied in (host, back):
        assert copied.stride() == strides and copied.dtype == dtype and torch.equal(copied, tensor)
        assert copied.data_ptr() != tensor.data_ptr()
    assert torch.ops.optimum_memopt.wait(back, host).data_ptr() == back.data_ptr()


def test_activations_wait_on_the_host(blocks, batch, plain, gelus):
    """Roots of views, and outputs of operators that have several, beside activations that are recomputed."""
    norms = plain.split.request("getitem", Strategy.OFFLOAD, 2)
    reshapes = plain.split.request("clone", Strategy.RECOMPUTE, 3)
    ours = run(blocks, f"{gelus},{norms},{reshapes}", batch)
    assert_bitwise_same(ours, accumulate(blocks, [batch]))
    ours.split.check(ours.table)
    offloaded = {"gelu", "gelu_1", "gelu_2", "gelu_3", "gelu_4", "getitem", "getitem_3"}
    assert {name for name in ours.split.saved_for_backward if name.endswith("_on_host")} == {
        f"{name}_on_host" for name in offloaded
    }
    assert not offloaded & ours.split.saved_for_backward
    # What is recomputed reads what has been reloaded.
    assert {"clone", "clone_1", "clone_2"} < ours.split.run_in_backward
    assert not offloaded & ours.split.run_in_backward
    for module, copies in ((ours.split.forward, "offload"), (ours.split.backward, "reload")):
        assert positions(module, copies).keys() == positions(module, "wait").keys() == offloaded
    # On the CPU nothing stands between a copy and the wait for it.
    offloads = positions(ours.split.forward, "offload")
    assert all(at == offloads[name] + 1 for name, at in positions(ours.split.forward, "wait").items())
    reloads = positions(ours.split.backward, "reload")
    assert all(at == reloads[name] + 1 for name, at in positions(ours.split.backward, "wait").items())


def test_the_table_says_that_a_cpu_saves_nothing(blocks, batch, plain, gelus):
    table = run(blocks, plain.split.request("gelu", Strategy.OFFLOAD, 4), batch).table
    (row,) = table.enabled
    assert (row.config, row.frequency, row.requested_count, row.applied_count) == (gelus, 5, 4, 4)
    assert row.saving_bytes == row.applied_saving_bytes == table.claimed_saving_bytes == 0
    assert "offload; saves nothing on the CPU" in row.note
    # What can be recomputed is not listed a second time, unless it is asked for.
    assert [plan.config for plan in table.plans if ":3:" in plan.config] == [gelus]


def test_what_the_forward_returns_stays(blocks, batch, norms):
    """Its caller holds it, so that a copy would save nothing."""
    asked = {**batch, "returns_second": True}
    ours = run(blocks, norms, asked)
    assert_bitwise_same(ours, accumulate(blocks, [batch]))
    (row,) = ours.table.enabled
    assert row.applied_count == row.frequency == 4
    assert "getitem_3" in ours.split.saved_for_backward


def test_row_statistics_stay(plain, norms):
    graph = plain.split.graph
    names = [candidate.activation.root.name for candidate in graph.candidates if candidate.row == norms]
    assert names == [f"getitem{end}" for end in ("", "_3", "_6", "_9", "_12")]
    assert {candidate.strategy for candidate in graph.candidates} == {Strategy.RECOMPUTE, Strategy.OFFLOAD}


def test_several_forwards_before_their_backwards(blocks, batch, gelus, norms):
    """Each has its own copies, which a second backward through the same graph finds again."""
    other = {"x": 2 * batch["x"]}
    expected = accumulate(blocks, [batch, other, batch])
    with_both = copy.deepcopy(blocks)
    engine = CompileEngine(selection(f"{gelus},{norms}"), "aot_eager", dynamic=False)
    engine.attach(with_both)
    first, second = with_both(**batch).loss, with_both(**other).loss
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    assert torch.equal(first, expected[0][0]) and torch.equal(second, expected[0][1])
    for ours, plain in zip(with_both.parameters(), expected[1].values(), strict=True):
        torch.testing.assert_close(ours.grad, plain)
    engine.detach()


@pytest.fixture(scope="module")
def transformer():
    """With dropout, a batch for it, and its step without a plan."""
    model, batch = CASE.build(**DROPOUT), CASE.batch(8, 32)
    return model, batch, run(model, "", batch, seed=3)


@pytest.mark.parametrize("plan", ["Add+:3:2,Gelu+:3:-1", "FusedMatMul+Add+Reshape+Transpose+:3:-1,Dropout+:3:-1"])
def test_a_transformer(transformer, plan):
    model, batch, without_plan = transformer
    ours = run(model, plan, batch, seed=3)
    assert_bitwise_same(ours, without_plan)
    ours.split.check(ours.table)
    counts = {row.config: (row.requested_count, row.applied_count) for row in ours.table.enabled}
    if plan.startswith("Add+"):
        # The residual streams, of which the first two in graph order, and both gelus.
        assert counts == {"FusedMatMul+Add+Dropout+Add+:3:-1": (2, 2), "Gelu+:3:-1": (-1, 2)}
        streams = [candidate for candidate in ours.split.graph.candidates if "Dropout+Add+:3" in candidate.row]
        hosts = [f"{candidate.activation.root.name}_on_host" for candidate in streams]
        assert [host in ours.split.saved_for_backward for host in hosts] == [True, True, False, False]
    else:
        assert all(applied for _, applied in counts.values()) and len(counts) == 2


def test_an_id_that_has_nothing_to_offload_is_refused(blocks, batch):
    with pytest.raises(MemOptError, match=r'no plan "Softmax\+"'):
        run(blocks, "Softmax+:3:-1", batch)


@pytest.fixture(scope="module")
def gpu_graphs(blocks, batch, gelus):
    """Forward and backward that save five gelus, on a GPU that is not there, by how far ahead copies begin."""
    pairs = {}

    def insert(forward: fx.GraphModule, backward: fx.GraphModule, activations: set[str]) -> None:
        for ahead in (None, 0, 1, 2, 9):
            pair = tuple(fx.GraphModule(half, copy.deepcopy(half.graph)) for half in (forward, backward))
            for half in pair:
                on_cuda(half)
            if ahead is not None:
                original(*pair, activations, ahead)
            pairs[ahead] = pair
        original(forward, backward, activations)

    original = offload.insert
    with mock.patch.object(offload, "insert", insert):
        run(blocks, gelus, batch)
    return pairs


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_on_a_gpu_copies_are_under_way_ahead_of_use(gpu_graphs, ahead):
    forward, backward = gpu_graphs[ahead]
    names = ["gelu", "gelu_1", "gelu_2", "gelu_3", "gelu_4"]
    begun, ended = positions(forward, "offload"), positions(forward, "wait")
    assert sorted(begun, key=begun.__getitem__) == names == sorted(ended, key=ended.__getitem__)
    for index, name in enumerate(names):
        # Meanwhile the forward computes, and the copies of this many other activations begin.
        later = [other for other in names[index + 1 :] if begun[other] < ended[name]]
        assert later == names[index + 1 : index + 1 + ahead]
    begun, ended = positions(backward, "reload"), positions(backward, "wait")
    needed = names[::-1]
    assert sorted(ended, key=ended.__getitem__) == needed
    for index, name in enumerate(needed):
        later = [other for other in needed[index + 1 :] if begun[other] < ended[name]]
        assert begun[name] < ended[name] and later == needed[index + 1 : index + 1 + ahead]
    nodes = list(backward.graph.nodes)
    for name, at in ended.items():
        # Nothing reads a copy without waiting for it, and the wait is where it is read first. The wait for an earlier
        # copy has this one as an argument, so that no compiler begins this one later.
        assert {user.target for user in nodes[begun[name]].users} == {torch.ops.optimum_memopt.wait.default}
        index = needed.index(name)
        expected = [ended[name], *([ended[needed[index - ahead]]] if 0 < ahead <= index else [])]
        assert sorted(map(nodes.index, nodes[begun[name]].users)) == sorted(expected)
        first = min(nodes.index(user) for user in nodes[at].users)
        assert all(nodes[i].name.startswith(("reload", "wait")) for i in range(at + 1, first))


def test_host_copies_take_nothing_of_a_gpu(gpu_graphs):
    activation = ROWS * HIDDEN * 4
    saved = graph_timeline(*gpu_graphs[None], 1).predict({})
    for ahead in (0, 1, 2, 9):
        offloaded = graph_timeline(*gpu_graphs[ahead], 1).predict({})
        assert offloaded.stashed == saved.stashed - 5 * activation
        assert offloaded.peak <= saved.peak
        assert offloaded.backward.end == saved.backward.end
    # Copies that are under way hold memory: the further ahead, the more.
    peaks = [graph_timeline(*gpu_graphs[ahead], 1).predict({}).forward.peak.held for ahead in (0, 1, 2, 9)]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_on_a_gpu(compiler):
    case = ZOO["roberta-mlm"]
    model = case.build(hidden_size=256, intermediate_size=1024, num_hidden_layers=6).cuda()
    batch = {name: tensor.cuda() for name, tensor in case.batch(32, 60).items()}
    plan = "Gelu+:3:-1,FusedMatMul+Add+:1:-1,LayerNormalization+:3:-1"
    expected, ours = run(model, "Gelu+:1:0", batch, compiler=compiler), run(model, plan, batch, compiler=compiler)
    torch.testing.assert_close(ours.losses, expected.losses)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-4, atol=1e-6)
    assert ours.split.graph.prediction.stashed < expected.split.graph.prediction.stashed
    assert not host_copies._under_way
