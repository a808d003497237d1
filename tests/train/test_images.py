"""Vision-language models: the code that locates images in the text is not part of a graph."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Kosmos2_5Config,
    Kosmos2_5ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt import optimize
from tests.compiled import recorded
from tests.gradients import assert_bitwise_same_step, assert_same_step
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_step_memory import measured
from tests.trainer_runs import log_lines

CASE = ZOO["qwen2-vl"]
# Enough layers to be compiled separately.
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
IMAGE, PATCH, IMAGE_TOKEN = 8, 4, 3
TEXT = {**SIZES, "model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
VISION = {**SIZES, "model_type": "clip_vision_model", "image_size": IMAGE, "patch_size": PATCH}


def compiled(model: torch.nn.Module):
    return optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)


@pytest.mark.nightly
def test_hooks_around_what_runs_ahead():
    """Hooks around code that runs ahead are called once per step, also later ones, and act as in plain PyTorch."""
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


class Around(torch.nn.Module):
    """A script's own forward around a LLaVA, which may not run twice in a step.

    Attributes:
        calls: number of forwards; each scales the loss.
    """

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.inner, self.head = llava(), torch.nn.Linear(SIZES["hidden_size"], 64)

    def forward(self, labels, **inputs):
        self.calls += 1
        if self.kind == "no_grad":
            with torch.no_grad():
                hidden = self.inner.model(**inputs).last_hidden_state
            return CausalLMOutput(loss=torch.nn.functional.cross_entropy(self.head(hidden)[:, 0], labels[:, -1]))
        loss = self.inner(labels=labels, **inputs).loss * self.calls
        if self.kind == "twice":
            loss = loss - 2 * self.inner(labels=labels.flip(0), **{k: each.flip(0) for k, each in inputs.items()}).loss
        return CausalLMOutput(loss=loss)


@pytest.mark.parametrize("kind", nightly(["counted", "twice", "no_grad"], but=["twice"]))
def test_the_forward_of_a_script_runs_once(kind):
    """Only code of libraries that changes nothing runs twice, before the module that finds images."""
    torch.manual_seed(0)
    model = Around(kind).train()
    plain = copy.deepcopy(model)
    compiled(model)
    for rows, length in ((3, 12), (2, 14)):
        assert_bitwise_same_step(model, plain, images_first(rows, length))
    assert model.calls == plain.calls == 2


@pytest.mark.nightly
def test_an_attention_with_dropout_splits_the_row_itself():
    """Attention with dropout splits the packed row itself, even in a single layer and from a later step on."""
    model = CASE.build("sdpa")
    plain = copy.deepcopy(model)
    compiled(model)
    for dropout in (0.0, 0.1):
        for each in (model, plain):
            each.model.visual.blocks[1].attn.attention_dropout = dropout
        assert_bitwise_same_step(model, plain, CASE.batch())
        assert_bitwise_same_step(model, plain, CASE.batch(3, 9, seed=1))


@pytest.mark.nightly
def test_a_text_without_images():
    model = CASE.build("sdpa")
    plain = copy.deepcopy(model)
    compiled(model)
    images = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
    text = {name: value for name, value in CASE.batch(seed=1).items() if name not in images}
    text["input_ids"] = text["input_ids"].clamp(min=5)
    for batch in (CASE.batch(), text, CASE.batch(3, 9)):
        assert_bitwise_same_step(model, plain, batch)


@in_turn
def test_an_error_of_the_model_is_its_own():
    """A model's error is raised as in plain PyTorch, and the next step is not affected."""
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


def llava():
    """Returns a LLaVA, which reads a hidden state before its vision tower's last layer, collected by hooks."""
    torch.manual_seed(0)
    config = LlavaConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE_TOKEN)
    return LlavaForConditionalGeneration(config).train()


def paligemma():
    """Returns a PaliGemma, which does not read its vision tower's head."""
    torch.manual_seed(0)
    vision = {**VISION, "model_type": "siglip_vision_model", "projection_dim": 16}
    text = {**TEXT, "model_type": "gemma", "head_dim": 8}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=16, image_token_index=IMAGE_TOKEN)
    return PaliGemmaForConditionalGeneration(config).train()


def images_first(rows, length, seed=0, tokens=(IMAGE // PATCH) ** 2):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 60, (rows, length), generator=generator)
    ids[:, 1 : 1 + tokens] = IMAGE_TOKEN
    images = torch.randn(rows, 3, IMAGE, IMAGE, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100),
        "pixel_values": images,
    }


@pytest.mark.nightly
def test_layers_of_which_hidden_states_are_collected_are_compiled_by_themselves():
    """Layers with hooks for hidden states are compiled separately, although hooks in them could collect attentions."""
    model = llava()
    plain = copy.deepcopy(model)
    with log_lines() as lines, recorded() as splits:
        engine = compiled(model)
        assert_bitwise_same_step(model, plain, images_first(3, 12))
        traced = len(splits)
        assert_bitwise_same_step(model, plain, images_first(2, 14, seed=1))
    assert "for 8 layers" in engine.plans().header[0]
    assert len(splits) == traced <= 7
    assert sum("registered module hooks" in line for line in lines) == 1, lines
    assert not any("recompiled" in line or "one graph for" in line for line in lines), lines


@pytest.mark.parametrize("make", nightly([llava, paligemma], but=[paligemma]))
@pytest.mark.parametrize("level", nightly([0, 1], but=[0]))
def test_what_no_loss_depends_on_is_not_predicted(make, level):
    model, batch = make(), images_first(3, 12)
    options = {"memory_opt_level": level, "memory_opt_loss": "plain"}
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", **options)
    measured(model, batch)
    predicted, (saved, peak) = engine.predictor, measured(model, batch)
    assert predicted.untrained == {name for name, each in model.named_parameters() if each.grad is None} != set()
    # The stacked features of all images are held outside of the graphs.
    assert predicted.saved() == pytest.approx(saved, rel=0.005)
    assert predicted.footprint().activations == pytest.approx(peak, rel=0.01)


@pytest.mark.nightly
def test_attentions_are_asked_for_in_a_later_step():
    """Attentions, collected by hooks in layers, may be requested in a later step."""
    model = llava()
    model.set_attn_implementation("eager")
    plain = copy.deepcopy(model)
    compiled(model)
    for asks in (False, True, False):
        found, expected = (
            each(**images_first(2, 12, seed=1), output_attentions=asks, output_hidden_states=asks)
            for each in (model, plain)
        )
        assert torch.equal(found.loss, expected.loss)
        for kind in ("attentions", "hidden_states") if asks else ():
            assert len(found[kind]) == len(expected[kind]) > 0
            assert all(map(torch.equal, found[kind], expected[kind]))
        assert_same_step(model, plain, images_first(3, 12))


@pytest.mark.nightly
def test_a_hook_that_changes_what_another_has_collected():
    """A hook on a layer, before or after the one that collects its hidden state, acts as in plain PyTorch."""
    model = llava()
    plain = copy.deepcopy(model)
    compiled(model)
    for seed in range(3):
        assert_bitwise_same_step(model, plain, images_first(3, 12, seed))
        for each in (model, plain):
            layer = each.model.vision_tower.encoder.layers[2]
            layer.register_forward_hook(lambda module, args, output: output * 1.5, prepend=seed == 0)


def mistral3(rows, length, seed=0):
    """Returns a batch whose every second image has half the height; vision tower and patch merger loop over them."""
    sizes = torch.tensor([(IMAGE, IMAGE), (IMAGE // 2, IMAGE)]).repeat(rows, 1)[:rows]
    batch = images_first(rows, length, seed)
    batch["input_ids"][1::2, 3:5] = 5
    return {**batch, "image_sizes": sizes}


def idefics3(rows, length, seed=0):
    """Returns a batch with two images per row; the last one is padding."""
    batch = images_first(rows, length, seed, tokens=2)
    batch["pixel_values"] = batch["pixel_values"].unsqueeze(1).repeat(1, 2, 1, 1, 1)
    batch["pixel_values"][-1, 1] = 0
    batch["input_ids"][-1, 2] = 5
    return batch


def kosmos(rows, length, seed=0):
    batch = images_first(rows, length, seed)
    place = torch.arange(3).view(1, 3, 1).expand(rows, 3, 1)
    patches = torch.cat([torch.zeros_like(place), place, torch.rand(rows, 3, 3 * PATCH**2)], -1)
    is_image = (batch["input_ids"] == IMAGE_TOKEN).long()
    del batch["pixel_values"]
    return {**batch, "flattened_patches": patches, "image_embeds_position_mask": is_image}


PIXTRAL = {**VISION, "model_type": "pixtral"}
KOSMOS = {"vocab_size": 64, "embed_dim": 16, "layers": 4, "ffn_dim": 24, "attention_heads": 2, "dropout": 0.0}
PATCHES = {"hidden_size": 16, "patch_embed_hidden_size": 3 * PATCH**2, "d_ff": 24, "d_kv": 8}
READ_SIZES = {
    "mistral3": (
        Mistral3ForConditionalGeneration,
        lambda: Mistral3Config(
            text_config={**TEXT, "model_type": "mistral"},
            vision_config=PIXTRAL,
            image_token_id=IMAGE_TOKEN,
            spatial_merge_size=1,
        ),
        mistral3,
    ),
    "idefics3": (
        Idefics3ForConditionalGeneration,
        lambda: Idefics3Config(
            text_config=TEXT,
            vision_config={**VISION, "model_type": "idefics3_vision"},
            image_token_id=IMAGE_TOKEN,
            scale_factor=2,
            pad_token_id=0,
        ),
        idefics3,
    ),
    "kosmos2.5": (
        Kosmos2_5ForConditionalGeneration,
        lambda: Kosmos2_5Config(
            text_config={**KOSMOS, "attention_dropout": 0.0, "layerdrop": 0.0},
            vision_config={**PATCHES, "num_hidden_layers": 4, "num_attention_heads": 2, "max_num_patches": 3},
            latent_query_num=4,
        ),
        kosmos,
    ),
}


@in_turn
@pytest.mark.parametrize("name", nightly(READ_SIZES, but=["mistral3"]))
def test_modules_that_read_their_images_run_outside_of_graphs(name):
    """Modules that read their images run outside graphs: other numbers of images do not recompile the layers."""
    kind, config, batch = READ_SIZES[name]
    torch.manual_seed(0)
    model = kind(config()).train()
    plain = copy.deepcopy(model)
    with log_lines() as lines:
        engine = compiled(model)
        assert_bitwise_same_step(model, plain, batch(4, 12))
        assert_bitwise_same_step(model, plain, batch(2, 14, seed=1))
        assert_bitwise_same_step(model, plain, batch(5, 13, seed=2))
    assert "for 8 layers" in engine.plans().header[0]
    assert not any("recompiled" in line or "one graph for" in line for line in lines), lines
    engine.detach()
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.nightly
def test_lora_of_a_model_that_finds_its_images_itself():
    """LoRA's wrapper of a model that locates images itself has the model's attributes, and is traced with the loss."""
    torch.manual_seed(0)
    questions = {**SIZES, "encoder_hidden_size": 16, "vocab_size": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    words = {"model_type": "opt", "vocab_size": 64, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 4}
    config = Blip2Config(
        vision_config={**SIZES, "image_size": IMAGE, "patch_size": PATCH},
        qformer_config={**questions, **no_dropout},
        text_config={**words, "num_attention_heads": 2, "word_embed_proj_dim": 16, "dropout": 0.0},
        num_query_tokens=4,
        image_token_index=IMAGE_TOKEN,
    )
    base = Blip2ForConditionalGeneration(config).train()
    model = get_peft_model(base, LoraConfig(target_modules=r".*language_model.*(q|v)_proj", init_lora_weights=False))
    plain = copy.deepcopy(model)
    with log_lines() as lines:
        compiled(model)
        assert_same_step(model, plain, images_first(3, 12))
        assert_same_step(model, plain, images_first(2, 14, seed=1))
    assert not any("recompiled" in line or "graphs, planned" in line for line in lines), lines
