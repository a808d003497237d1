"""Level 1's predicted peak for a device that is not here is below that of Trainer's checkpointing."""

import pytest
from transformers import DebertaV2Config, GPT2Config, LlamaConfig, PretrainedConfig, RobertaConfig, T5Config

from optimum_memopt import plan
from tests.rotation import in_turn, nightly

# The embeddings are most of the parameters, as in models with a few hundred million.
_SIZES = {"vocab_size": 20_000, "pad_token_id": 0}
_ENCODER = {**_SIZES, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
MODELS: dict[str, tuple[PretrainedConfig, str]] = {
    "deberta": (
        DebertaV2Config(
            **_ENCODER,
            relative_attention=True,
            position_buckets=32,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            type_vocab_size=0,
        ),
        "text-classification",
    ),
    "roberta": (RobertaConfig(**_ENCODER, max_position_embeddings=300), "text-classification"),
    "llama": (LlamaConfig(**_ENCODER), "text-classification"),
    "gpt2": (GPT2Config(**_SIZES, n_embd=128, n_layer=4, n_head=4), "text-classification"),
    "t5": (
        T5Config(**_SIZES, d_model=128, d_kv=32, d_ff=512, num_layers=4, num_heads=4, decoder_start_token_id=0),
        "text2text-generation",
    ),
}
PRECISIONS = {"fp16": {"fp16": True}, "bfloat16": {"dtype": "bfloat16"}, "float32": {}}
CASES = [(model, precision) for model in MODELS for precision in PRECISIONS]


@in_turn
@pytest.mark.parametrize("compiler", nightly(["inductor", "aot_eager"], but=["inductor"]))
@pytest.mark.parametrize(("model", "precision"), nightly(CASES, but=[("llama", "bfloat16")]))
def test_level_1_is_below_checkpointing(model: str, precision: str, compiler: str) -> None:
    config, task = MODELS[model]
    sizes = {"batch_size": 16, "seq_len": 128, "device": "a100", "compiler": compiler}
    estimate = plan(config, task, level=1, **sizes, **PRECISIONS[precision])
    peaks = {way.plan.name: way.peak for way in estimate.ways}
    assert 0 < peaks["compile engine, level 1"] <= peaks["Trainer's checkpointing"]
