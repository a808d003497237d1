"""What a forward changes outside of its model is changed once, however often the first forward runs."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt import optimize
from tests.gradients import accumulate, assert_bitwise_same, assert_same
from tests.model_zoo import ZOO, small_bart
from tests.rotation import in_turn, nightly
from tests.small_model import WIDTH, Block

ENGINE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_level": 1}


class Memory:
    """An object of the caller that layers write to."""

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []
        self.total: Any = 0.0


class RememberingBlock(Block):
    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        x = super().forward(x)
        memory.items.append(x)
        memory.total = memory.total + x.square().mean()
        return x


class Remembering(torch.nn.Module):
    """Layers that append to an object which is passed to the forward, with and without a graph break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layers, self.breaks = torch.nn.ModuleList([RememberingBlock() for _ in range(4)]), breaks

    def forward(self, x: torch.Tensor, memory: Memory) -> CausalLMOutput:
        for layer in self.layers:
            x = layer(x, memory=memory)
            if self.breaks:
                torch._dynamo.graph_break()
        return CausalLMOutput(loss=x.square().mean() + memory.total + torch.stack(memory.items).mean())


@in_turn
@pytest.mark.parametrize("breaks", nightly([False, True], but=[True]))
def test_an_object_of_the_caller_is_written_to_once(breaks: bool) -> None:
    torch.manual_seed(0)
    ours = Remembering(breaks)
    plain = copy.deepcopy(ours)
    optimize(ours, **ENGINE)
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        memories = [Memory(), Memory()]
        found, expected = (
            accumulate(model, [{"x": x, "memory": memory}])
            for model, memory in zip((ours, plain), memories, strict=True)
        )
        assert_same(found, expected)
        assert [len(memory.items) for memory in memories] == [4, 4]


@in_turn
@pytest.mark.parametrize("attention", nightly(["eager", "sdpa"], but=["eager"]))
def test_a_cache_of_the_caller_grows_once(attention: str) -> None:
    """A trained prefix in a cache gets its gradients."""
    config = LlamaConfig(
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 4),
        **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
        vocab_size=60,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    ours = LlamaForCausalLM(config).train()
    plain = copy.deepcopy(ours)
    optimize(ours, **ENGINE)
    for _ in range(2):
        ids = torch.randint(5, 60, (3, 12))
        prefix = [torch.randn(3, 4, 3, 8) for _ in range(8)]
        found = []
        for model in (ours, plain):
            leaves = [each.clone().requires_grad_() for each in prefix]
            cache = DynamicCache()
            for layer in range(4):
                cache.update(leaves[2 * layer], leaves[2 * layer + 1], layer)
            loss = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
            loss.backward()
            assert cache.get_seq_length() == 15
            found.append((loss, [leaf.grad for leaf in leaves]))
        (loss, gradients), (expected, wanted) = found
        assert torch.allclose(loss, expected)
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(gradients, wanted, strict=True))


@in_turn
def test_a_later_forward_that_falls_back_to_one_graph_draws_once() -> None:
    """A forward that collects attentions inside layers runs again as one graph, and drops the same layers."""
    ours = small_bart(0.3, decoder_layerdrop=0.3)
    plain = copy.deepcopy(ours)
    optimize(ours, **ENGINE)
    ids = torch.randint(4, 60, (2, 7))
    drawn = []
    for model in (ours, plain):
        torch.manual_seed(3)
        for collected in ("output_hidden_states", "output_attentions"):
            loss = model(input_ids=ids, labels=ids, **{collected: True}).loss
            drawn.append((float(loss), torch.rand(()).item()))
    (first, second), expected = (drawn[:2], drawn[2:])
    assert [first, second] == [pytest.approx(each, rel=1e-6) for each in expected]


class Watching(TorchDispatchMode):
    """A mode within which torch runs no compiled code."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operator(*args, **(kwargs or {}))


# What comes before a later step, or around it; torch gives up the code of a forward that raises while it is traced.
LATER = {
    "raises in the trace": {"input_ids": "text"},
    "raises after dropout": {"input_ids": torch.ones(2, 7, dtype=torch.long), "labels": torch.ones(5).long()},
    "mode": None,
}


@in_turn
@pytest.mark.parametrize("unit", nightly(["auto", "model"], but=["model"]))
@pytest.mark.parametrize("later", LATER)
def test_a_later_step_draws_the_random_numbers_of_plain_pytorch(unit: str, later: str) -> None:
    case = ZOO["bert-classification"]
    ours, batch = case.build("eager", **case.deep(4), **case.dropout), case.batch()
    plain, calls = copy.deepcopy(ours), [0, 0]
    optimize(ours, **ENGINE, memory_opt_unit=unit)
    found = []
    for number, model in enumerate((ours, plain)):
        embeddings = model.bert.embeddings
        embeddings.register_forward_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
        torch.manual_seed(1)
        accumulate(model, [batch])
        if (wrong := LATER[later]) is not None:
            with pytest.raises((AttributeError, ValueError)):
                model(**wrong)
        with Watching() if wrong is None else contextlib.nullcontext():
            found.append((*accumulate(model, [batch]), torch.get_rng_state()))
    assert_bitwise_same(found[0][:2], found[1][:2])
    assert torch.equal(found[0][2], found[1][2]) and calls[0] == calls[1]


class Clamped(torch.nn.Module):
    """Writes to the results of layers in place, without gradients, and reads them again later."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers, self.way = torch.nn.ModuleList([Block() for _ in range(4)]), way
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        kept = x.new_zeros(())
        for layer in self.layers:
            x = layer(x)
            if self.way == "break":
                torch._dynamo.graph_break()
            with torch.no_grad():
                if self.way == "index":
                    x[..., 0] = 0
                else:
                    x.clamp_(-0.5, 0.5)
            if self.way == "break":
                torch._dynamo.graph_break()
            if self.way == "mixed":
                kept = kept + x.sum()
                x = x * self.scale + x
        return CausalLMOutput(loss=x.square().mean() + kept)


@in_turn
@pytest.mark.parametrize("compiler", nightly(["aot_eager", "inductor"], but=["aot_eager"]))
@pytest.mark.parametrize("way", ["clamp", "index", "mixed", "break"])
def test_a_write_without_gradients_between_layers_keeps_the_history(way: str, compiler: str) -> None:
    """A tensor that is clamped without gradients keeps its history: layers before it get their gradients."""
    torch.manual_seed(0)
    ours = Clamped(way)
    plain = copy.deepcopy(ours)
    optimize(ours, **{**ENGINE, "memory_opt_compiler": compiler})
    batches = [{"x": torch.randn(rows, WIDTH)} for rows in (3, 5)]
    for _ in range(2):
        assert_same(accumulate(ours, batches), accumulate(plain, batches))
