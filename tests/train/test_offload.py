"""Strategy 3 (offload). Only `test_on_a_gpu` runs copies alongside a GPU's computation; the placement of copies in a
GPU's graphs is tested on any machine, with graphs whose tensors claim to be on a GPU."""

import copy
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import fx
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.joint import is_tensor, value
from optimum_memopt.engines.compile.memory.schedule import schedule
from optimum_memopt.engines.compile.partition import host_copies
from optimum_memopt.engines.compile.partition.strategies import offload
from optimum_memopt.engines.compile.partition.strategies.offload import place_copies
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import Strategy
from tests.compiled import Run, run, selection
from tests.gradients import accumulate, assert_bitwise_same
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
    """Five blocks with a loss; optionally returns the output of the second block."""

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
    for node in module.graph.nodes:
        if is_tensor(node):
            tensor = value(node)
            with tensor.fake_mode:
                node.meta["val"] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda"
                )


def positions(module: fx.GraphModule, operator: str) -> dict[str, int]:
    """Returns the positions of an operator in a graph, by the name of the tensor that is copied."""
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
    assert torch.ops.optimum_memopt.wait(back, host, []).data_ptr() == back.data_ptr()


def test_activations_wait_on_the_host(blocks, batch, plain, gelus):
    """Roots of views and one of several outputs of an operator are offloaded, alongside recomputed activations."""
    norms = plain.split.request("getitem", Strategy.OFFLOAD, 2)
    reshapes = plain.split.request("clone", Strategy.RECOMPUTE, 3)
    ours = run(blocks, f"{gelus},{norms},{reshapes}", batch)
    assert_bitwise_same(ours.step, accumulate(blocks, [batch]))
    ours.split.check(ours.table)
    offloaded = {"gelu", "gelu_1", "gelu_2", "gelu_3", "gelu_4", "getitem", "getitem_3"}
    assert {name for name in ours.split.saved_for_backward if name.endswith("_on_host")} == {
        f"{name}_on_host" for name in offloaded
    }
    assert not offloaded & ours.split.saved_for_backward
    # Recomputed operators read reloaded tensors.
    assert {"clone", "clone_1", "clone_2"} < ours.split.run_in_backward
    assert not offloaded & ours.split.run_in_backward
    for module, copies in ((ours.split.forward, "offload"), (ours.split.backward, "reload")):
        assert positions(module, copies).keys() == positions(module, "wait").keys() == offloaded
    # On the CPU each copy is directly followed by its wait.
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
    # Activations that can be recomputed are not listed again for offload unless requested.
    assert [plan.config for plan in table.plans if ":3:" in plan.config] == [gelus]


def test_what_the_forward_returns_stays(blocks, batch, norms):
    """Returned tensors are not offloaded: the caller holds them, so a copy would save nothing."""
    asked = {**batch, "returns_second": True}
    ours = run(blocks, norms, asked)
    assert_bitwise_same(ours.step, accumulate(blocks, [batch]))
    (row,) = ours.table.enabled
    assert row.applied_count == row.frequency == 4
    assert "getitem_3" in ours.split.saved_for_backward


def test_row_statistics_stay(plain, norms):
    graph = plain.split.graph
    rows = (norms, norms.replace(":3:", ":4:"))
    for row in rows:
        names = [candidate.activation.root.name for candidate in graph.candidates if candidate.row == row]
        assert names == [f"getitem{end}" for end in ("", "_3", "_6", "_9", "_12")]
    assert {candidate.strategy for candidate in graph.candidates} == set(Strategy) - {
        Strategy.NONE,
        Strategy.RECOMPUTE_WITH_COMPROMISE,
    }


def test_several_forwards_before_their_backwards(blocks, batch, gelus, norms):
    """Several forwards before their backwards have their own copies, which a second backward can read again."""
    other = {"x": 2 * batch["x"]}
    expected = accumulate(blocks, [batch, other, batch])
    with_both = copy.deepcopy(blocks)
    engine = CompileEngine(selection(f"{gelus},{norms}"), "aot_eager", dynamic=False, unit="model")
    engine.attach(with_both)
    first, second = with_both(**batch).loss, with_both(**other).loss
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    assert torch.equal(first, expected[0][0]) and torch.equal(second, expected[0][1])
    for ours, plain in zip(with_both.parameters(), expected[1].values(), strict=True):
        torch.testing.assert_close(ours.grad, plain)
    engine.detach()


def test_an_id_that_has_nothing_to_offload_is_refused(blocks, batch):
    with pytest.raises(MemOptError, match=r'no plan "Softmax\+"'):
        run(blocks, "Softmax+:3:-1", batch)


NAMES = ["gelu", "gelu_1", "gelu_2", "gelu_3", "gelu_4"]
# Bytes per second of a link, if each operator takes a second: copies take no time, as long as three operators, and
# longer than all of them.
LINKS = {"at once": float("inf"), "slow": ROWS * HIDDEN * 4 / 3, "slower": ROWS * HIDDEN * 4 / 30}


@dataclass(frozen=True)
class GpuGraphs:
    """Forward and backward graphs that save five gelus, on a pretended GPU.

    Attributes:
        kept: the graphs without copies.
        together: the graphs with each copy directly before its wait.
        placed: the graphs with copies and waits moved apart, by link.
    """

    kept: Modules
    together: Modules
    placed: dict[str, Modules]


@pytest.fixture(scope="module")
def gpu_graphs(blocks, batch, gelus) -> GpuGraphs:
    found = []

    def insert(forward: fx.GraphModule, backward: fx.GraphModule, activations: set[str], _: bool) -> None:
        def copied() -> Modules:
            pair = tuple(fx.GraphModule(half, copy.deepcopy(half.graph)) for half in (forward, backward))
            for half in pair:
                on_cuda(half)
            return pair

        def offloaded() -> Modules:
            pair = copied()
            original(*pair, activations, True)
            return pair

        together, placed = offloaded(), {}
        for name, link in LINKS.items():
            placed[name] = offloaded()
            prediction = schedule(*placed[name], 1).predict({})
            seconds = {
                node.name: 1.0 for half in placed[name] for node in half.graph.nodes if node.op == "call_function"
            }
            place_copies(placed[name], prediction, seconds, {}, link)
        found.append(GpuGraphs(copied(), together, placed))
        original(forward, backward, activations, False)

    original = offload.insert
    with mock.patch.object(offload, "insert", insert):
        run(blocks, gelus, batch)
    (graphs,) = found
    return graphs


def operators_between(module: fx.GraphModule, begins: str) -> dict[str, int]:
    """Count the operators between each copy and its wait, without other copies and waits."""
    ours = [getattr(node.target, "namespace", "") == "optimum_memopt" for node in module.graph.nodes]
    begun, ended = positions(module, begins), positions(module, "wait")
    return {name: ours[begun[name] : ended[name]].count(False) for name in ended}


def test_where_copies_take_no_time_nothing_stands_between(gpu_graphs) -> None:
    for begins, half in (("offload", 0), ("reload", 1)):
        for pair in (gpu_graphs.together, gpu_graphs.placed["at once"]):
            assert operators_between(pair[half], begins) == dict.fromkeys(NAMES, 0)


def test_on_a_gpu_copies_are_under_way_beside_the_computation(gpu_graphs) -> None:
    for begins, half in (("offload", 0), ("reload", 1)):
        module = gpu_graphs.placed["slow"][half]
        between = operators_between(module, begins)
        # The last gelu of the forward, and the first of the backward, have less room.
        assert all(between[name] >= 3 for name in NAMES[:3]), between
        begun, ended = positions(module, begins), positions(module, "wait")
        in_order = NAMES if half == 0 else NAMES[::-1]
        assert sorted(begun, key=begun.__getitem__) == in_order == sorted(ended, key=ended.__getitem__)
        assert all(begun[name] < ended[name] for name in NAMES)


def test_nothing_reads_a_copy_that_is_not_complete(gpu_graphs) -> None:
    wait = torch.ops.optimum_memopt.wait.default
    for pair in gpu_graphs.placed.values():
        for begins, half in (("offload", 0), ("reload", 1)):
            nodes = list(pair[half].graph.nodes)
            begun, ended = positions(pair[half], begins), positions(pair[half], "wait")
            for name, at in begun.items():
                # A wait for another copy may take this one as an argument, so that no compiler starts it later.
                assert nodes[ended[name]].args[0] is nodes[at]
                assert {user.target for user in nodes[at].users} == {wait}


def test_copies_take_no_graph_beyond_its_peak(gpu_graphs) -> None:
    activation = ROWS * HIDDEN * 4
    kept, together = (schedule(*pair, 1).predict({}) for pair in (gpu_graphs.kept, gpu_graphs.together))
    assert together.saved_bytes == kept.saved_bytes - 5 * activation
    for pair in gpu_graphs.placed.values():
        placed = schedule(*pair, 1).predict({})
        assert placed.saved_bytes == together.saved_bytes
        assert placed.peak == together.peak <= kept.peak
        assert placed.backward.end == kept.backward.end
    held = [schedule(*pair, 1).predict({}).forward.held for pair in gpu_graphs.placed.values()]
    # A longer copy holds its tensor longer.
    assert sum(held[0]) < sum(held[1]) < sum(held[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_on_a_gpu(compiler):
    case = ZOO["roberta-mlm"]
    model = case.build(hidden_size=256, intermediate_size=1024, num_hidden_layers=6).cuda()
    batch = {name: tensor.cuda() for name, tensor in case.batch(32, 60).items()}
    plan = "Gelu+:3:-1,FusedMatMul+Add+:1:-1,LayerNormalization+:3:-1"
    expected, ours = run(model, "Gelu+:1:0", batch, compiler=compiler), run(model, plan, batch, compiler=compiler)
    torch.testing.assert_close(ours.step, expected.step, rtol=1e-4, atol=1e-6)
    assert ours.split.graph.prediction.saved_bytes < expected.split.graph.prediction.saved_bytes
    assert not host_copies._under_way
