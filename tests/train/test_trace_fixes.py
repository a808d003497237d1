"""Forwards that torch would split, or compile for minutes, are one graph, and no patch stays applied."""

import copy

import bitsandbytes
import peft
import pytest
import torch
from peft.tuners.lora import dora
from peft.tuners.lora.layer import ParamWrapper
from transformers import (
    DebertaConfig,
    DebertaForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    SwinConfig,
    SwinForImageClassification,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.deberta import modeling_deberta

from optimum_memopt import optimize
from optimum_memopt.engines.torch_compat.trace_fixes import TraceFixes, without_fixes
from tests.gradients import assert_bitwise_same_step, assert_same_step
from tests.rotation import in_turn, nightly
from tests.trainer_runs import log_lines

ENGINE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_level": 1}
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def two_of(kind, config):
    torch.manual_seed(0)
    model = kind(config).train()
    plain = kind(config).train()
    plain.load_state_dict(model.state_dict())
    return model, plain


def deberta():
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_position_embeddings": 32}
    return two_of(
        DebertaForSequenceClassification, DebertaConfig(**SIZES, **relative, **NO_DROPOUT, num_hidden_layers=3)
    )


def rows(size, length):
    ids = torch.randint(5, 64, (size, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(size) % 2}


def images(size):
    return {"pixel_values": torch.randn(size, 3, 32, 32), "labels": torch.arange(size) % 2}


def test_plain_code_within_a_traced_forward_runs_without_the_fixes():
    """So it counts a loss that is simulated while the model is traced, such as that of a reference model."""
    model, _ = deberta()
    fixes, span = TraceFixes(model, None), modeling_deberta.compute_attention_span
    of_call = [(modeling_deberta, "XSoftmax", None)]
    with fixes.around_call({}, of_call, stops_at_hooks=False):
        fixed = modeling_deberta.compute_attention_span
        with without_fixes():
            assert modeling_deberta.compute_attention_span is span is not fixed
            assert not hasattr(modeling_deberta, "XSoftmax")
        assert modeling_deberta.compute_attention_span is fixed
        assert modeling_deberta.XSoftmax is None
    with without_fixes():
        assert modeling_deberta.compute_attention_span is span
    assert not hasattr(modeling_deberta, "XSoftmax")


@pytest.mark.nightly
def test_the_first_deberta_is_one_graph_for_all_sizes():
    model, plain = deberta()
    theirs = modeling_deberta.compute_attention_span
    engine = optimize(model, **ENGINE)
    with log_lines() as lines:
        assert_bitwise_same_step(model, plain, rows(3, 12), rows(2, 9))
    assert not any("recompiled" in line or "graphs, planned" in line for line in lines), lines
    assert len(engine.plans().enabled) > 5
    assert modeling_deberta.compute_attention_span is theirs


@pytest.mark.nightly
def test_an_error_in_the_forward_leaves_transformers_as_it_was():
    model, _ = deberta()
    theirs = modeling_deberta.compute_attention_span
    optimize(model, **ENGINE)
    with pytest.raises(RuntimeError, match="must match the size"):
        model(**{**rows(3, 12), "attention_mask": torch.ones(3, 12, 12, 12, 12)})
    assert modeling_deberta.compute_attention_span is theirs
    model(**rows(3, 12)).loss.backward()


def test_only_the_batch_size_of_images_is_a_symbol():
    config = SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4)
    config.drop_path_rate = 0.0
    model, plain = two_of(SwinForImageClassification, config)
    engine = optimize(model, **ENGINE)
    with log_lines() as lines:
        assert_bitwise_same_step(model, plain, images(3), images(2))
    assert not any("recompiled" in line for line in lines), lines
    assert list(engine.plans().symbols) == ["inputs_pixel_values_dim0"]


class Products(torch.nn.Module):
    """A trained norm, and three linear layers."""

    def __init__(self, kind: type[torch.nn.Linear] = torch.nn.Linear, **options):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.layers = torch.nn.ModuleList(kind(64, 64, **options) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return CausalLMOutput(loss=x.square().sum())


def in_4_bits():
    model = Products(bitsandbytes.nn.Linear4bit, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    # transformers marks a model for PEFT in this way.
    model.is_loaded_in_4bit = True
    return model


def with_dora(model):
    config = peft.LoraConfig(r=4, target_modules=["0", "1", "2"], use_dora=True, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("quantized", nightly([False, True], but=[False]), ids=["plain", "4 bits"])
def test_dora_is_one_graph(quantized):
    torch.manual_seed(0)
    model = with_dora(in_4_bits() if quantized else Products())
    plain = copy.deepcopy(model)
    theirs = dora.dequantize_module_weight
    optimize(model, **ENGINE)
    with log_lines() as lines:
        assert_bitwise_same_step(model, plain, {"x": torch.randn(4, 5, 64)}, {"x": torch.randn(3, 7, 64)})
    assert not any("recompiled" in line or "graphs, planned" in line for line in lines), lines
    assert dora.dequantize_module_weight is theirs


class Experts(torch.nn.Module):
    """Two matrix products per expert, each expert with its own tokens; shape [experts, tokens, units]."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(2, 16, 16) / 4) for _ in range(2))

    def forward(self, x):
        return torch.bmm(torch.nn.functional.gelu(torch.bmm(x, self.up)), self.down)


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.layers = torch.nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = x + layer(x)
        return CausalLMOutput(loss=x.square().sum())


@in_turn
def test_adapters_of_experts_are_one_graph():
    """Adapters of experts are one graph, with one adapter, with two (which PEFT adds differently), and without any."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["up", "down"], init_lora_weights=False)
    model = peft.get_peft_model(Mixture(), config)
    model.add_adapter("other", config)
    plain, theirs = copy.deepcopy(model), ParamWrapper.forward
    engine = optimize(model, **ENGINE)
    batches = [{"x": torch.randn(2, 5, 16)}, {"x": torch.randn(2, 7, 16)}]
    for adapters in (["default"], ["default", "other"], []):
        for one in (model, plain):
            one.base_model.set_adapter(adapters)
            # The norm must train if there is no adapter.
            one.base_model.model.norm.requires_grad_(True)
        with log_lines() as lines:
            assert_bitwise_same_step(model, plain, *batches)
        assert not any("graphs, planned" in line for line in lines), lines
        assert len(engine.plans().enabled) > 1
    assert ParamWrapper.forward is theirs


@in_turn
def test_layers_of_8_bits_are_compiled_once():
    torch.manual_seed(0)
    model, plain = (Products(bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        one.to("cpu").requires_grad_(False).norm.requires_grad_(True)
    assert all(layer.weight.dtype == torch.int8 for layer in model.layers)
    optimize(model, **ENGINE)
    with log_lines() as lines:
        for seed in range(2):
            x = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(seed))
            assert_bitwise_same_step(model, plain, {"x": x})
    assert not any("recompiled" in line or "compiling it again" in line for line in lines), lines


class Normalized(torch.nn.Module):
    """Layers with batch normalization, whose running statistics each forward changes."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU()) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().sum()}


@in_turn
def test_what_reads_running_statistics_is_not_recomputed():
    torch.manual_seed(0)
    model, plain = Normalized().train(), Normalized().train()
    plain.load_state_dict(model.state_dict())
    engine = optimize(model, **{**ENGINE, "memory_opt_level": 2})
    for size in (5, 4):
        x = torch.randn(size, 8)
        for one in (model, plain):
            one(x=x)["loss"].backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert engine.plans().plans, "nothing was planned"


@pytest.mark.nightly
@pytest.mark.parametrize("heads_of_keys", [4, 2])
def test_a_batch_without_padding_is_bitwise_but_for_grouped_queries(heads_of_keys):
    """Without padding a step is bitwise plain PyTorch's except for grouped queries: transformers drops the mask then,
    which a compiled forward cannot detect."""
    config = LlamaConfig(**SIZES, num_hidden_layers=1, num_key_value_heads=heads_of_keys)
    model, plain = two_of(LlamaForCausalLM, config)
    optimize(model, **ENGINE, memory_opt_loss="plain")
    ids = torch.randint(5, 64, (4, 24))
    check = assert_bitwise_same_step if heads_of_keys == config.num_attention_heads else assert_same_step
    check(model, plain, {"input_ids": ids, "labels": ids})
