"""Tiny random models of every tested architecture, and batches of any shape for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tests.small_model import VOCABULARY, SmallConfig, SmallForSequenceClassification

PAD = 1
IGNORE = -100
IMAGE = 16
MELS, FRAMES = 8, 12
STEPS = 16
# Gemma 3's tokens around and in place of an image, outside the range of word ids.
IMAGE_TOKENS, IMAGE_TOKEN, IMAGE_BEGINS, IMAGE_ENDS = 4, 2, 3, 4

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": PAD}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {**_SIZES, **_TEXT, **_NO_DROPOUT}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
_DEBERTA = {**_BERT, **_RELATIVE, "pooler_hidden_size": 16, "pooler_dropout": 0.0}
_ENDS = {"bos_token_id": 2, "eos_token_id": 3}
_LLAMA = {**_SIZES, **_TEXT, **_ENDS, "num_key_value_heads": 1, "attention_dropout": 0.0}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, **_ENDS}
_GPT2_STILL = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
_DISTIL = {**_TEXT, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
_DISTIL_STILL = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
_T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
_SEQ2SEQ = {
    **{"vocab_size": VOCABULARY, "pad_token_id": PAD, **_ENDS, "decoder_start_token_id": 3},
    **{f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    **{"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0},
}
_MAMBA = {"vocab_size": VOCABULARY, "state_size": 4}
_SLIDING = ["sliding_attention", "full_attention"]
_FEED_FORWARD = {"num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24}
_FEED_FORWARD |= dict.fromkeys(("attention_dropout", "path_dropout", "ff_dropout"), 0.0)


def tokens(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns ids and a mask; every second row ends in padding."""
    ids = torch.randint(5, VOCABULARY, (batch_size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1::2, length - max(1, length // 4) :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def masked_lm(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    batch = tokens(batch_size, length, generator)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE)}


def classification(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**tokens(batch_size, length, generator), "labels": torch.randint(0, 3, (batch_size,), generator=generator)}


def forecast(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns series of two channels; a PatchTST has no use for `length`."""
    past, future = (torch.randn((batch_size, steps, 2), generator=generator) for steps in (STEPS, STEPS // 4))
    return {"past_values": past, "future_values": future}


def images_in_text(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns rows that begin with an image, whose tokens have no labels."""
    batch = masked_lm(batch_size, length, generator)
    is_image = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    is_image[:, 1 : 1 + IMAGE_TOKENS] = True
    return {
        "input_ids": batch["input_ids"].masked_fill(is_image, IMAGE_TOKEN),
        "attention_mask": batch["attention_mask"],
        "token_type_ids": is_image.long(),
        "labels": batch["labels"].masked_fill(is_image, IGNORE),
        "pixel_values": torch.rand((batch_size, 3, IMAGE, IMAGE), generator=generator),
    }


def images_of_sizes(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns rows with one image each, twice as large in every second row; all pixels lie in one packed row."""
    batch = masked_lm(batch_size, length, generator)
    sizes = torch.tensor([(1, 2, 4), (1, 4, 4)]).repeat(batch_size, 1)[:batch_size]
    is_image = torch.arange(length) < 1 + sizes.prod(1, keepdim=True) // IMAGE_TOKENS
    is_image[:, 0] = False
    return {
        "input_ids": batch["input_ids"].masked_fill(is_image, IMAGE_TOKEN),
        "attention_mask": batch["attention_mask"],
        "mm_token_type_ids": is_image.int(),
        "labels": batch["labels"].masked_fill(is_image, IGNORE),
        "pixel_values": torch.rand((int(sizes.prod(1).sum()), 3 * 2 * 4 * 4), generator=generator),
        "image_grid_thw": sizes,
    }


def translation(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns inputs and labels of different lengths."""
    target = tokens(batch_size, length // 2 + 1, generator)
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, IGNORE)
    return {**tokens(batch_size, length, generator), "labels": labels}


def speech(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns spectrograms that fill Whisper's encoder, which takes no other length, and labels of `length` tokens."""
    labels = tokens(batch_size, length, generator)
    features = torch.randn((batch_size, MELS, 2 * FRAMES), generator=generator)
    return {
        "input_features": features,
        "labels": labels["input_ids"].masked_fill(labels["attention_mask"] == 0, IGNORE),
    }


def segmentation(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.rand((batch_size, 3, 2 * IMAGE, 2 * IMAGE), generator=generator)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, 3, (batch_size, 2 * IMAGE, 2 * IMAGE), generator=generator),
    }


def images(batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns images of one size; a ViT has no use for `length`."""
    pixels = torch.rand((batch_size, 3, IMAGE, IMAGE), generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (batch_size,), generator=generator)}


@dataclass(frozen=True)
class Case:
    """An architecture with one head."""

    # Names in transformers, or classes; `model` may also be a function of the config.
    model: str | Callable[[Any], torch.nn.Module]
    config: str | type[transformers.PretrainedConfig]
    arguments: dict[str, Any]
    make_batch: Callable[[int, int, torch.Generator], dict[str, torch.Tensor]]
    # Freshly initialised models of this size are nearly linear, so a wrong gradient would hardly show.
    weight_scale: float = 4.0
    # Whether tracing rounds differently from eager PyTorch, with stock torch.compile too.
    rounds_when_traced: bool = False
    # The name of the target among the inputs.
    labels: str = "labels"
    # The number of graphs that the forward is traced into.
    graphs: int = 1
    # Whether compiling layer by layer changes the order in which gradients of shared inputs are summed.
    rounds_by_layer: bool = False

    @property
    def one_layer(self) -> dict[str, int]:
        """Returns the config's arguments for one layer: a second one doubles tracing and exporting, most of a test.

        Models with layers of two types keep both.
        """
        keys = () if "layer_types" in self.arguments else ("num_hidden_layers", "n_layer", "num_layers")
        return {key: 1 for key in keys if key in self.arguments}

    def deep(self, layers: int) -> dict[str, Any]:
        """Returns the config's arguments for `layers` layers, per type or stage if there are several."""
        if stages := self.arguments.get("depths"):
            return {"depths": [layers] * len(stages)}
        if types := self.arguments.get("layer_types"):
            return {"layer_types": list(types) * layers, "num_hidden_layers": len(types) * layers}
        return {key: layers for key in _DEPTHS if key in self.arguments}

    @property
    def dropout(self) -> dict[str, float]:
        """Returns the config's arguments that set every dropout probability to 0.1."""
        return {name: 0.1 for name, value in self.arguments.items() if "drop" in name and isinstance(value, float)}

    def build(self, attention: str = "eager", seed: int = 0, **changes: Any) -> torch.nn.Module:
        """Returns a model in training mode; `changes` override the config's arguments."""
        torch.manual_seed(seed)
        config = _class(self.config)(**{**self.arguments, **changes})
        config._attn_implementation = attention
        model = _class(self.model)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and parameter.is_floating_point():
                    parameter.mul_(self.weight_scale)
        return model.train()

    def batch(self, batch_size: int = 4, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
        return self.make_batch(batch_size, length, torch.Generator().manual_seed(seed))

    def without_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rest = {name: value for name, value in batch.items() if name != self.labels}
        # An encoder-decoder derives its decoder inputs from the labels.
        if self.make_batch in (translation, speech):
            rest["decoder_input_ids"] = batch["labels"].clamp(min=0)
        return rest


def _class(name: Any) -> Any:
    return getattr(transformers, name) if isinstance(name, str) else name


def small_bart(layerdrop: float, decoder_layerdrop: float = 0.0) -> transformers.BartForConditionalGeneration:
    """Returns a BART in training mode without dropout, whose layers are dropped by code around them in Python."""
    config = transformers.BartConfig(
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 4),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings"), 16),
        **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
        vocab_size=60,
        encoder_layerdrop=layerdrop,
        decoder_layerdrop=decoder_layerdrop,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config).train()


def in_4_bits(model: transformers.PreTrainedModel, **settings: Any) -> None:
    """Replace all linear layers of a model without biases, except its head, by NF4 `Linear4bit(**settings)`."""
    import bitsandbytes

    for name, module in list(model.model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            product = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, quant_type="nf4", **settings
            )
            product.load_state_dict(module.state_dict())
            # In evaluation, some processors repack the codes if the sizes are multiples of 32.
            product.support_avx512bf16_for_cpu = False
            model.model.set_submodule(name, product.to("cpu"))
    model.is_loaded_in_4bit = True


def _qlora(config: transformers.LlamaConfig) -> torch.nn.Module:
    """Returns LoRA on a Llama with NF4 linear layers, as `BitsAndBytesConfig` loads it."""
    # Importing peft takes seconds, and nearly all tests import this file.
    import peft

    base = transformers.LlamaForCausalLM(config)
    in_4_bits(base, compute_dtype=torch.float32)
    lora = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.get_peft_model(base, peft.LoraConfig(lora_dropout=config.lora_dropout, **lora))


def _lora_experts(config: transformers.MixtralConfig) -> torch.nn.Module:
    """Returns LoRA on the experts, the router and one linear layer of a Mixtral."""
    import peft

    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    lora = {"r": 4, "target_modules": ["q_proj"], "target_parameters": parameters, "init_lora_weights": False}
    return peft.get_peft_model(transformers.MixtralForCausalLM(config), peft.LoraConfig(task_type="CAUSAL_LM", **lora))


def _patchtst(config: transformers.PatchTSTConfig) -> torch.nn.Module:
    """Returns a PatchTST without key biases, whose gradient is pure rounding noise."""
    model = transformers.PatchTSTForPrediction(config)
    for name, module in model.named_modules():
        if name.endswith(".k_proj"):
            module.register_parameter("bias", None)
    return model


def _bert_like(name: str, config: dict[str, Any], prefix: str = "") -> dict[str, Case]:
    return {
        f"{prefix}-mlm": Case(f"{name}ForMaskedLM", f"{name}Config", config, masked_lm),
        f"{prefix}-classification": Case(
            f"{name}ForSequenceClassification", f"{name}Config", {**config, "num_labels": 3}, classification
        ),
    }


ZOO: dict[str, Case] = {
    **_bert_like("Roberta", _BERT, "roberta"),
    **_bert_like("Bert", _BERT, "bert"),
    **_bert_like("DebertaV2", _DEBERTA, "deberta-v2"),
    **_bert_like("Electra", {**_BERT, "embedding_size": 8, "summary_last_dropout": 0.0}, "electra"),
    **_bert_like("DistilBert", {**_DISTIL, **_DISTIL_STILL}, "distilbert"),
    "albert-mlm": Case("AlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 8}, masked_lm),
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_GPT2_STILL}, masked_lm),
    "llama": Case("LlamaForCausalLM", "LlamaConfig", _LLAMA, masked_lm),
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, masked_lm),
    "qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 8}, masked_lm),
    "t5": Case(
        "T5ForConditionalGeneration",
        "T5Config",
        _T5
        | {"dropout_rate": 0.0, "relative_attention_num_buckets": 8}
        | {"pad_token_id": PAD, "decoder_start_token_id": PAD},
        translation,
        # T5 starts from wide weights and does not scale its attention: wider ones saturate the softmax.
        weight_scale=1.0,
        rounds_by_layer=True,
    ),
    "bart": Case(
        "BartForConditionalGeneration",
        "BartConfig",
        {**_SEQ2SEQ, "max_position_embeddings": 64, "forced_eos_token_id": None},
        translation,
        rounds_by_layer=True,
    ),
    "vit": Case(
        "ViTForImageClassification",
        "ViTConfig",
        {**_SIZES, **_NO_DROPOUT, "image_size": IMAGE, "patch_size": 8, "num_labels": 3},
        images,
    ),
    # Windows of the image, shifted in every second layer; layers get the image size as numbers.
    "swin": Case(
        "SwinForImageClassification",
        "SwinConfig",
        {
            **{"image_size": IMAGE, "patch_size": 2, "window_size": 2, "num_labels": 3},
            **{"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], **_NO_DROPOUT, "drop_path_rate": 0.0},
        },
        images,
    ),
    # Convolutions over spans of tokens.
    "convbert-mlm": Case(
        "ConvBertForMaskedLM",
        "ConvBertConfig",
        {**_BERT, "embedding_size": 8, "head_ratio": 2, "conv_kernel_size": 3},
        masked_lm,
    ),
    # Positions from the attention mask.
    "opt": Case(
        "OPTForCausalLM",
        "OPTConfig",
        {**_TEXT, **_ENDS, **_FEED_FORWARD, "hidden_size": 16, "word_embed_proj_dim": 16, "dropout": 0.0},
        masked_lm,
    ),
    "gemma": Case("GemmaForCausalLM", "GemmaConfig", {**_LLAMA, "head_dim": 8}, masked_lm),
    # Local attention in every second layer.
    "modernbert-mlm": Case(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **{**_SIZES, **_TEXT, **_ENDS, "cls_token_id": 2, "sep_token_id": 3},
            **dict.fromkeys(("attention_dropout", "mlp_dropout", "embedding_dropout"), 0.0),
            **{"local_attention": 4, "global_attn_every_n_layers": 2},
        },
        masked_lm,
    ),
    "whisper": Case(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_SEQ2SEQ, "num_mel_bins": MELS, "max_source_positions": FRAMES, "max_target_positions": 32},
        speech,
        rounds_by_layer=True,
    ),
    # BatchNorm over a transposed input; hidden states collected by hooks.
    "segformer": Case(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]},
            **{"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
            **{**_NO_DROPOUT, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0},
            **{"decoder_hidden_size": 16, "num_labels": 3},
        },
        segmentation,
        rounds_when_traced=True,
    ),
    # The number of rows per expert depends on the router.
    "mixtral": Case("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, "num_local_experts": 2}, masked_lm),
    "lora-experts": Case(_lora_experts, "MixtralConfig", {**_LLAMA, "num_local_experts": 2}, masked_lm),
    # A gated DeltaNet, whose softplus backward has other strides than its trace, followed by attention.
    "qwen3.5": Case("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**_LLAMA, **_DELTA_NET, "head_dim": 8}, masked_lm),
    "olmo-hybrid": Case("OlmoHybridForCausalLM", "OlmoHybridConfig", {**_LLAMA, **_DELTA_NET}, masked_lm),
    # The same with experts.
    "qwen3-next": Case(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **{**_LLAMA, **_DELTA_NET, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1},
            **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        },
        masked_lm,
    ),
    # A Mamba layer that loops over tokens, experts, and then attention.
    "jamba": Case(
        "JambaForCausalLM",
        "JambaConfig",
        {
            **{**_LLAMA, "num_experts": 2, "num_experts_per_tok": 1},
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
        },
        masked_lm,
        rounds_when_traced=True,
    ),
    # transformers counts image tokens, which torch cannot trace.
    "gemma3-vision": Case(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {**_LLAMA, "head_dim": 8, "sliding_window": 8, "layer_types": _SLIDING},
            "vision_config": {**_SIZES, "image_size": IMAGE, "patch_size": 4},
            **{"mm_tokens_per_image": IMAGE_TOKENS, "image_token_index": IMAGE_TOKEN},
            **{"boi_token_index": IMAGE_BEGINS, "eoi_token_index": IMAGE_ENDS},
        },
        images_in_text,
        graphs=3,
    ),
    # Images of several sizes packed into one row of pixels; attention stays within each image.
    "qwen2-vl": Case(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**_LLAMA, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
            **{"image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_BEGINS, "vision_start_token_id": IMAGE_ENDS},
        },
        images_of_sizes,
        graphs=3,
    ),
    # BatchNorm over a transposed input, for time series.
    "patchtst": Case(
        _patchtst,
        "PatchTSTConfig",
        {
            **{"num_input_channels": 2, "context_length": STEPS, "prediction_length": STEPS // 4},
            **{**_FEED_FORWARD, "d_model": 16, "patch_length": 4, "patch_stride": 4},
        },
        forecast,
        labels="future_values",
    ),
    # A 4-bit base model, dequantized in each pass.
    "qlora": Case(_qlora, "LlamaConfig", {**_LLAMA, "lora_dropout": 0.0}, masked_lm),
}

# For tests of the Trainer that do not depend on the model.
SMALL = Case(SmallForSequenceClassification, SmallConfig, {}, classification)

# Models that also train with torch's fused attention: DeBERTa has none in transformers.
SDPA = ("roberta-mlm", "bert-classification", "electra-mlm", "distilbert-mlm", "gpt2", "llama", "qwen3")
SDPA += ("vit", "opt", "gemma", "patchtst", "qwen2-vl")
# Trained by the compile engine only; `UNTRAINABLE` gives one example of each reason. ONNX Runtime refuses BatchNorm,
# whose running statistics it would not update, and Swin, whose layers change their window sizes.
COMPILE_ONLY = ("modernbert-mlm", "whisper", "segformer", "mixtral", "qwen3.5", "qwen3-next", "olmo-hybrid", "jamba")
COMPILE_ONLY += ("swin", "gemma3-vision", "qwen2-vl", "patchtst", "qlora", "lora-experts")

# Models that ONNX Runtime 1.19 cannot train: case, attention, config changes, and the reason as its error names it.
UNTRAINABLE: dict[str, tuple[Case, str, dict[str, Any], str]] = {
    "t5-sdpa": (ZOO["t5"], "sdpa", {}, "while running Squeeze node.*SelfAttention"),
    "roberta-sdpa-dropout": (
        ZOO["roberta-mlm"],
        "sdpa",
        {"attention_probs_dropout_prob": 0.1},
        r"gradient_builder_base.h:123: i < node_->OutputDefs\(\).size\(\) was false",
    ),
    "mixtral": (ZOO["mixtral"], "eager", {}, "Exporting the operator 'aten::histc'"),
    "mamba": (
        Case("MambaForCausalLM", "MambaConfig", {**_MAMBA, "hidden_size": 16, "num_hidden_layers": 2}, masked_lm),
        "eager",
        {},
        "The gradient builder has not been registered: Softplus",
    ),
    "modernbert": (
        ZOO["modernbert-mlm"],
        "eager",
        {},
        r"invalid model. Error: Duplicate definition of name \(_grad\)",
    ),
    "whisper": (ZOO["whisper"], "eager", {}, "Exporting the operator 'aten::diff'"),
    "qwen3.5": (ZOO["qwen3.5"], "eager", {}, "Exporting the operator 'aten::linalg_solve_triangular'"),
    "gemma3-vision": (ZOO["gemma3-vision"], "eager", {}, "unordered_map::at"),
    "qlora": (ZOO["qlora"], "eager", {}, "unrecognized namespace bitsandbytes::gemm_4bit"),
}
