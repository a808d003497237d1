"""Layers as DeepSpeed's leaf modules, in one process without sharding; `launchers/test_zero3.py` trains them."""

import copy
import types
from typing import Any

import pytest
import torch

from optimum_memopt.engines.compile.capture.layer_groups import layer_groups
from optimum_memopt.engines.compile.options import AUTO, LAYER, MODEL
from optimum_memopt.engines.compile.sharding.leaf_layers import Zero3Layers
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from tests.compiled import selection
from tests.gradients import assert_bitwise_same_step, assert_same_step
from tests.model_zoo import ZOO
from tests.rotation import in_turn
from tests.train.launchers.launching import needs_deepspeed
from tests.trainer_runs import log_lines

BUCKET = "stage3_prefetch_bucket_size"


def given(stage: int = 3, **config: Any) -> Any:
    plugin = types.SimpleNamespace(
        zero_stage=stage, deepspeed_config={"zero_optimization": {"stage": stage, **config}}
    )
    return types.SimpleNamespace(deepspeed_plugin=plugin, torch_compile=False, fsdp=[], n_gpu=1)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.saw: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.saw = hidden
        return self.inner(hidden) * scale


def two_layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ModuleList([Layer(), Layer()]))


def start(leafs: Zero3Layers, model: torch.nn.Module) -> None:
    leafs.start(model, [layer for group in layer_groups(model) for layer in group.values()])


def test_only_stage_3_has_them() -> None:
    assert Zero3Layers.of(types.SimpleNamespace(deepspeed_plugin=None), AUTO) is None
    assert Zero3Layers.of(given(2), MODEL, has_budget=True) is None
    assert Zero3Layers.of(given(), LAYER) is not None


def test_what_does_not_go_with_them_is_refused() -> None:
    with pytest.raises(MemOptError, match="--memory_opt_unit model: .* ZeRO stage 0, 1 or 2"):
        Zero3Layers.of(given(), MODEL)
    with pytest.raises(MemOptError, match="a chunked loss: .* --memory_opt_loss chunked"):
        Zero3Layers.of(given(), AUTO, must_chunk=True)
    with pytest.raises(UnsupportedModelError, match="no module list in Linear has two equal layers"):
        start(Zero3Layers({}), torch.nn.Linear(4, 4))


@needs_deepspeed
def test_layers_are_leafs_and_stay_so() -> None:
    from deepspeed.utils import get_z3_leaf_modules

    model = ZOO["mixtral"].build()
    leafs, layers = Zero3Layers({}), list(model.model.layers)
    with log_lines() as lines:
        start(leafs, model)
        leafs.stop()
    assert get_z3_leaf_modules(model) == layers and not lines
    assert not any(layer._forward_pre_hooks for layer in layers)


@needs_deepspeed
def test_leafs_in_a_layer_give_way() -> None:
    from deepspeed.utils import set_z3_leaf_module

    model = two_layers()
    set_z3_leaf_module(model[1][0].inner, True)
    with log_lines() as lines:
        start(Zero3Layers({}), model)
        start(Zero3Layers({"leaf_module": {"classes": ["Linear"]}}), two_layers())
    assert len(lines) == 2 and all("replaced by their layer" in line for line in lines)


@needs_deepspeed
@pytest.mark.parametrize("filled_in, wanted", [(18, 20), (30, 30)])
def test_a_layer_is_prefetched_where_the_size_was_left_open(filled_in: int, wanted: int) -> None:
    config: dict[str, Any] = {BUCKET: "auto"}
    leafs = Zero3Layers(config)
    # transformers does this before it creates the optimizer.
    config[BUCKET] = filled_in
    start(leafs, two_layers())
    assert config == {BUCKET: wanted}
    numbers = {BUCKET: filled_in}
    start(Zero3Layers(numbers), two_layers())
    assert numbers == {BUCKET: filled_in}


@needs_deepspeed
@pytest.mark.parametrize("by_name", [False, True])
def test_a_trained_layer_is_given_what_requires_a_gradient_by_position(by_name: bool) -> None:
    model, hidden = two_layers(), torch.randn(3, 4)
    frozen, trained = model[1]
    frozen.requires_grad_(False)
    # Otherwise the two would not be equal layers.
    model[1].append(Layer().requires_grad_(False))
    model[1].append(Layer())
    leafs, seen = Zero3Layers({}), []
    start(leafs, model)
    for layer in (frozen, trained):
        # Stands for DeepSpeed's hook, which is registered later.
        layer.register_forward_pre_hook(lambda module, args: seen.append(args))
        layer(hidden=hidden, scale=2.0) if by_name else layer(hidden, scale=2.0)
    assert [len(args) for args in seen] == [1, 1]
    assert not hidden.requires_grad and not frozen.saw.requires_grad and trained.saw.requires_grad
    assert trained.saw.data_ptr() == hidden.data_ptr()
    with torch.no_grad():
        trained(hidden)
    assert trained.saw is hidden
    with pytest.raises(UnsupportedModelError, match="first argument of Layer is not a tensor of hidden states"):
        trained(torch.ones(3, 4, dtype=torch.long))
    leafs.stop()
    trained(hidden)
    assert trained.saw is hidden


def attached(model: torch.nn.Module) -> CompileEngine:
    engine = CompileEngine(selection("level 1"), "aot_eager")
    engine.check_arguments(given())
    engine.attach(model)
    return engine


@needs_deepspeed
def test_only_layers_are_compiled() -> None:
    case = ZOO["llama"]
    model = case.build()
    plain, called = copy.deepcopy(model), []
    # Stand for DeepSpeed's hooks on all other modules.
    for module in (model, model.model, model.model.embed_tokens, model.lm_head):
        module.register_forward_pre_hook(lambda module, args: called.append(type(module)))
    engine = attached(model)
    assert_bitwise_same_step(model, plain, case.batch(), case.batch(3, 17))
    assert len(called) == 8
    assert "level 1, in 1 graph for 2 layers, equal layers share one" in engine.plans().header[0]
    engine.detach()


@in_turn
@needs_deepspeed
def test_hooks_in_a_layer_run() -> None:
    case = ZOO["llama"]
    model = case.build()
    plain, seen = copy.deepcopy(model), []
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, result: seen.append(result))
    engine = attached(model)
    assert_same_step(model, plain, case.batch())
    assert len(seen) == 1 and seen[0].grad_fn is not None
    engine.detach()


@needs_deepspeed
def test_a_layer_that_shares_a_trained_parameter_is_refused() -> None:
    for first, second in (("1.0.inner", "1.1.inner"), ("0", "1.1.inner")):
        model = two_layers()
        model.get_submodule(second).weight = model.get_submodule(first).weight
        with pytest.raises(UnsupportedModelError, match=rf"shares {first}.weight .* lose some of its gradients"):
            start(Zero3Layers({}), model)
        model.requires_grad_(False)
        start(Zero3Layers({}), model)


@in_turn
@needs_deepspeed
def test_two_forwards_of_one_backward_are_refused() -> None:
    case = ZOO["llama"]
    model = case.build()
    engine = attached(model)
    for _ in range(2):
        model(**case.batch()).loss.backward()
    model(**case.batch())
    loss = model(**case.batch()).loss
    loss.backward()
    loss = model(**case.batch()).loss + model(**case.batch(3, 17)).loss
    with pytest.raises(UnsupportedModelError, match="LlamaDecoderLayer ran several times before its backward"):
        loss.backward()
    engine.detach()
