"""Hooks of submodules that come and go after the first step are called as in plain PyTorch."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules import module as every
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt import optimize
from optimum_memopt.errors import UnsupportedModelError
from tests.gradients import Gradients, assert_bitwise_same_step, wrong_gradients
from tests.model_zoo import ZOO, small_bart
from tests.rotation import in_turn, nightly
from tests.trainer_runs import log_lines


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.act = torch.nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


class Net(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(loss=x.square().sum())


def forward_hook(module: torch.nn.Module, count: Callable[[Any], None]) -> RemovableHandle:
    def hook(module, inputs, outputs):
        count(module)
        return outputs + 0.5

    return module.register_forward_hook(hook)


def forward_pre_hook(module: torch.nn.Module, count: Callable[[Any], None]) -> RemovableHandle:
    def hook(module, inputs):
        count(module)
        return (inputs[0] * 1.5,)

    return module.register_forward_pre_hook(hook)


def backward_hook(module: torch.nn.Module, count: Callable[[Any], None]) -> RemovableHandle:
    def hook(module, grad_inputs, grad_outputs):
        count(module)
        return tuple(None if grad is None else grad * 2 for grad in grad_inputs)

    return module.register_full_backward_hook(hook)


def backward_pre_hook(module: torch.nn.Module, count: Callable[[Any], None]) -> RemovableHandle:
    def hook(module, grad_outputs):
        count(module)
        return tuple(grad * 2 for grad in grad_outputs)

    return module.register_full_backward_pre_hook(hook)


def hook_of_every_module(module: torch.nn.Module, count: Callable[[Any], None]) -> RemovableHandle:
    def hook(other, inputs, outputs):
        if other is module:
            count(module)
            return outputs + 0.5
        return None

    return every.register_module_forward_hook(hook)


HOOKS = (forward_hook, forward_pre_hook, backward_hook, backward_pre_hook, hook_of_every_module)


@pytest.mark.parametrize(
    ("layers", "register"),
    nightly(
        [(layers, register) for layers in (2, 4) for register in HOOKS],
        but=[(2, forward_hook), (4, forward_hook), (4, backward_hook)],
    ),
)
def test_hooks_come_and_go(register, layers):
    """Hooks may come and go on a module in a layer, and on separately compiled layers."""
    ours, plain, batch = Net(layers), Net(layers), {"x": torch.randn(4, 8)}
    optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    assert_bitwise_same_step(ours, plain, batch)
    for layer in (0, 1):
        calls = Counter()
        hooked = [model.layers[layer] if layers > 2 else model.layers[layer].linear for model in (ours, plain)]
        handles = [register(each, lambda module, calls=calls: calls.update([module])) for each in hooked]
        assert_bitwise_same_step(ours, plain, batch, batch)
        for handle in handles:
            handle.remove()
        assert_bitwise_same_step(ours, plain, batch)
        assert [calls[each] for each in hooked] == [2, 2]


@in_turn
def test_a_hook_in_a_layer_is_the_one_reason_for_another_graph():
    ours = Net(4)
    optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    batch = {"x": torch.randn(4, 8)}
    ours(**batch)
    ours.layers[0].linear.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    with log_lines() as lines:
        ours(**batch)
    reasons = [line for line in lines if line.startswith("compiling another training graph")]
    assert reasons == ["compiling another training graph: layers have hooks"]


@in_turn
def test_hooks_of_layers_come_and_go_while_the_forward_runs():
    """Hooks of separately compiled layers may come and go during a forward; tracing the rest sees no hooks."""
    ours, plain, batch = Net(4), Net(4), {"x": torch.randn(4, 8)}
    engine = optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)

    def doubles_once(model: Net, layer: int, calls: list[int], then: Callable[[], Any] = lambda: None) -> None:
        def hook(module, inputs, outputs):
            calls.append(layer)
            handle.remove()
            then()
            return outputs * 2

        handle = model.layers[layer].register_forward_hook(hook)

    calls = {ours: [], plain: []}
    for model, its in calls.items():
        doubles_once(model, 1, its)
    assert_bitwise_same_step(ours, plain, batch, batch)
    for model, its in calls.items():
        doubles_once(model, 2, its, lambda model=model, its=its: doubles_once(model, 3, its))
    assert_bitwise_same_step(ours, plain, batch, batch)
    assert calls[ours] == calls[plain] == [1, 2, 3]
    assert "for 4 layers" in engine.plans().header[0]


class HookedNet(Net):
    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        for layer in self.layers:
            x = layer(x)
            x.register_hook(lambda gradient: gradient * 2)
        return CausalLMOutput(loss=x.square().sum())


def test_hooks_on_tensors_between_layers() -> None:
    ours, plain, batch = HookedNet(4), HookedNet(4), {"x": torch.randn(4, 8)}
    optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    assert_bitwise_same_step(ours, plain, batch, batch)


def test_hooks_on_tensors_between_layers_refuse_these_by_themselves() -> None:
    """Hooks on tensors between layers are refused for unit `layer`: they cannot be registered without gradients."""
    ours = HookedNet(4)
    optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_unit="layer")
    with pytest.raises(UnsupportedModelError, match="a hook is registered on a tensor between layers"):
        ours(torch.randn(4, 8))


def test_hidden_states_that_hooks_of_layers_collect():
    """Hidden states are collected by hooks that transformers registers on layers in the first forward."""
    case = ZOO["llama"]
    ours, batch = case.build(**case.deep(4)), {**case.batch(), "output_hidden_states": True}
    plain = copy.deepcopy(ours)
    optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    for found, expected in zip(ours(**batch).hidden_states, plain(**batch).hidden_states, strict=True):
        assert torch.equal(found, expected)


@in_turn
@pytest.mark.parametrize("hooked", nightly([False, True], but=[True]))
@pytest.mark.parametrize("runs_in_python", [True, False])
def test_hidden_states_are_collected_once(runs_in_python: bool, hooked: bool) -> None:
    """Each hidden state is collected once, even if layerdrop makes the code around the layers run in Python.

    A loss on the hidden states would otherwise count them twice.
    """
    ours = small_bart(0.3 if runs_in_python else 0.0)
    ids = torch.randint(4, 60, (2, 7))
    batch = {"input_ids": ids, "labels": ids, "output_hidden_states": True}
    # transformers registers its hooks in the first forward that collects: another hook comes after them.
    ours(**batch)
    plain = copy.deepcopy(ours)
    if hooked:
        for model in (ours, plain):
            model.model.encoder.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)

    def step(model: torch.nn.Module, seed: int) -> tuple[list[torch.Tensor], Gradients]:
        torch.manual_seed(seed)
        found = model(**batch)
        states = [*found.encoder_hidden_states, *found.decoder_hidden_states]
        (found.loss + sum(state.sin().mean() for state in states)).backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        model.zero_grad()
        return states, gradients

    for seed in range(3):
        (states, gradients), (expected, wanted) = step(ours, seed), step(plain, seed)
        assert len(states) == len(expected)
        assert all(map(torch.equal, states, expected))
        assert not wrong_gradients(gradients, wanted)


@in_turn
def test_layers_that_have_backward_hooks_from_the_start_are_layers_of_a_level():
    """A level applies to layers with backward hooks, which split the graph so that each layer has its own."""
    ours, plain, batch = Net(), Net(), {"x": torch.randn(4, 8)}
    calls = Counter()
    for layer in (*ours.layers, *plain.layers):
        backward_hook(layer, lambda module: calls.update([module]))
    with log_lines() as lines:
        engine = optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
        assert_bitwise_same_step(ours, plain, batch, batch)
    assert [calls[layer] for layer in (*ours.layers, *plain.layers)] == [2, 2, 2, 2]
    assert engine.plans().enabled
    assert sum("graphs, planned together: Module-level backwards hooks" in line for line in lines) == 1, lines


@pytest.mark.nightly
def test_hooks_that_a_later_forward_puts_into_layers_are_called_in_it() -> None:
    """Hooks that a later forward registers are called in it, as transformers' in the first that returns attentions."""
    model = ZOO["roberta-mlm"].build(**ZOO["roberta-mlm"].deep(4))
    model.set_attn_implementation("eager")
    plain, batch = copy.deepcopy(model), ZOO["roberta-mlm"].batch()
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    for reads in (False, True):
        losses = []
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
            outputs = one(**batch, output_attentions=reads)
            attentions = outputs.attentions if reads else ()
            assert len(attentions) == (4 if reads else 0)
            losses.append(outputs.loss + sum(each.square().sum() for each in attentions))
            losses[-1].backward()
        assert torch.equal(*losses)
        assert wrong_gradients(gradients(model), gradients(plain)) == {}
    engine.detach()


def gradients(model: torch.nn.Module) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Recorder:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self.seen.append(type(module).__name__)

    def of_a_method(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self.seen.append(type(module).__name__)

    @property
    def in_a_closure(self) -> Callable[..., None]:
        seen = self.seen
        return lambda module, inputs, outputs: seen.append(type(module).__name__)


@pytest.mark.parametrize(
    ("kind", "later"),
    nightly(
        itertools.product(("__call__", "of_a_method", "in_a_closure"), (False, True)),
        but=[("__call__", False), ("in_a_closure", True)],
    ),
)
def test_a_hook_of_layers_and_of_what_is_around_them_sees_both(kind: str, later: bool) -> None:
    model, x = Net(layers=4), torch.randn(2, 8)
    model.layers.append(torch.nn.Linear(8, 8))
    recorder = Recorder()
    hook = recorder if kind == "__call__" else getattr(recorder, kind)
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    if later:
        model(x).loss.backward()
    for module in model.layers:
        module.register_forward_hook(hook)
    for _ in range(2):
        recorder.seen.clear()
        model(x).loss.backward()
        assert recorder.seen == ["Block"] * 4 + ["Linear"]
    engine.detach()
