"""Models of images in text: what finds the images in it is no part of a graph."""

import copy

import pytest
import torch

from optimum_memopt import optimize
from tests.compiled import recorded
from tests.gradients import assert_bitwise_same_step
from tests.model_zoo import ZOO

CASE = ZOO["qwen2-vl"]


def compiled(model: torch.nn.Module):
    return optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)


def test_hooks_around_what_runs_ahead():
    """They are called once a step, where a hook comes in the middle too, and change results as in plain PyTorch."""
    model = CASE.build("sdpa")
    plain, calls = copy.deepcopy(model), []

    def halved(module, args, outputs):
        calls.append(module)
        outputs.last_hidden_state = outputs.last_hidden_state / 2

    engine = compiled(model)
    assert_bitwise_same_step(model, plain, CASE.batch())
    hooks = [each.model.register_forward_hook(halved) for each in (model, plain)]
    assert_bitwise_same_step(model, plain, CASE.batch(3, 9, seed=1))
    assert calls == [model.model, plain.model]
    for hook in hooks:
        hook.remove()
    assert_bitwise_same_step(model, plain, CASE.batch(2, 8, seed=2))
    engine.detach()
    assert all("forward" not in vars(module) for module in model.modules())


def test_an_attention_with_dropout_splits_the_row_itself():
    """In one layer, and from a step in the middle on."""
    model = CASE.build("sdpa")
    plain = copy.deepcopy(model)
    compiled(model)
    for dropout in (0.0, 0.1):
        for each in (model, plain):
            each.model.visual.blocks[1].attn.attention_dropout = dropout
        assert_bitwise_same_step(model, plain, CASE.batch())
        assert_bitwise_same_step(model, plain, CASE.batch(3, 9, seed=1))


def test_a_text_without_images():
    model = CASE.build("sdpa")
    plain = copy.deepcopy(model)
    compiled(model)
    images = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
    text = {name: value for name, value in CASE.batch(seed=1).items() if name not in images}
    text["input_ids"] = text["input_ids"].clamp(min=5)
    for batch in (CASE.batch(), text, CASE.batch(3, 9)):
        assert_bitwise_same_step(model, plain, batch)


def test_an_error_of_the_model_is_its_own():
    """And a step that fails leaves the next one as it is."""
    model = CASE.build("sdpa")
    plain = copy.deepcopy(model)
    compiled(model)
    wrong = CASE.batch()
    wrong["pixel_values"] = wrong["pixel_values"][:-4]
    messages = []
    for each in (model, plain):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            each(**wrong)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    with recorded() as splits:
        assert_bitwise_same_step(model, plain, CASE.batch())
    assert splits
