"""`use_cache=False` is passed to forwards that take it, and to no others."""

import copy
import itertools
import types
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers.modeling_outputs import SequenceClassifierOutput as Output

from optimum_memopt import optimize
from optimum_memopt.engines.ort.compat.installation import missing
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from tests.gradients import assert_same_step
from tests.model_zoo import ZOO
from tests.rotation import nightly

OFF = {"use_cache": False}


class Classifier(torch.nn.Module):
    """A custom head on a backbone, as in many scripts: it has the Hugging Face config, but a different signature."""

    def __init__(self, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = backbone.config
        self.head = torch.nn.Linear(self.config.hidden_size, 3)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Output:
        hidden = self.backbone(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden[:, -1])
        return Output(torch.nn.functional.cross_entropy(logits, labels), logits)


class Passing(Classifier):
    """Takes any keywords, and uses only the attention mask."""

    def forward(self, input_ids: Any, labels: Any = None, **others: Any) -> Output:
        assert "use_cache" not in others
        return super().forward(input_ids, others.get("attention_mask"), labels)


class ByPosition(torch.nn.Module):
    config = transformers.LlamaConfig()

    def forward(self, ids: Any, mask: Any = None, use_cache: Any = None) -> Any:
        return ids


ENGINES = ("compile", "ort")


@pytest.mark.parametrize(
    ("head", "engine"),
    nightly(itertools.product((Classifier, Passing), ENGINES), but=[(Classifier, "ort"), (Passing, "compile")]),
)
def test_a_head_of_ones_own_trains(head: type[Classifier], engine: str) -> None:
    if engine == "ort" and (reason := missing()):
        pytest.skip(reason)
    torch.manual_seed(0)
    model = head(ZOO["llama"].build(num_hidden_layers=1).model)
    plain = copy.deepcopy(model)
    others = {"ort_fallback": False} if engine == "ort" else {}
    optimize(model, memory_opt_engine=engine, **others)
    batch = {**ZOO["llama"].batch(), "labels": torch.tensor([0, 1, 2, 0])}
    assert_same_step(model, plain, batch)


@pytest.mark.parametrize(
    "name, expected", [("gpt2", OFF), ("t5", OFF), ("roberta-mlm", OFF), ("gemma3-vision", OFF), ("vit", {})]
)
def test_transformers_models(name: str, expected: dict[str, Any]) -> None:
    model = ZOO[name].build()
    assert without_key_value_cache(model, (), {}) == expected
    assert without_key_value_cache(model, (), {"use_cache": True}) == {"use_cache": True}
    assert without_key_value_cache(model, (), {"use_cache": True}, forced=True) == (expected or {"use_cache": True})
    model(**without_key_value_cache(model, (), ZOO[name].batch()))


_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
_TEXT = {**_SMALL, "vocab_size": 50, "pad_token_id": 0}


def test_decoders_whose_config_is_in_another() -> None:
    """Nested decoders get `use_cache`: an encoder-decoder of two models by name, LLaVA among any keywords."""
    halves = transformers.BertConfig(**_TEXT), transformers.BertConfig(**_TEXT, is_decoder=True)
    pair = transformers.EncoderDecoderModel(
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*halves, decoder_start_token_id=1)
    )
    pair.config.pad_token_id, pair.config.decoder_start_token_id = 0, 1
    images = {**_SMALL, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    llava = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config={**_TEXT, "model_type": "llama"}, vision_config=images)
    )
    ids = torch.randint(2, 50, (2, 5))
    for model in (pair, llava):
        batch = without_key_value_cache(model, (), {"input_ids": ids, "labels": ids})
        assert batch["use_cache"] is False
        assert model(**batch).past_key_values is None


@pytest.mark.parametrize(
    "config", [LoraConfig(target_modules=["q_proj"]), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)]
)
def test_adapters(config: Any) -> None:
    model = get_peft_model(ZOO["llama"].build(), config)
    assert without_key_value_cache(model, (), {}) == OFF
    model(**without_key_value_cache(model, (), ZOO["llama"].batch()))
    adapted = get_peft_model(Classifier(ZOO["llama"].build().model), LoraConfig(target_modules=["q_proj"]))
    assert without_key_value_cache(adapted, (), {}) == {}


def test_not_twice() -> None:
    model, ids = ByPosition(), torch.ones(1, 2)
    for args in ((ids,), (ids, None), (ids, None, True)):
        model(*args, **without_key_value_cache(model, args, {}, forced=True))
    assert without_key_value_cache(model, (ids, None), {}) == OFF
    assert without_key_value_cache(model, (ids, None, True), {}) == {}


def test_a_forward_put_on_the_instance_decides() -> None:
    model = ZOO["llama"].build()
    own = model.forward
    model.forward = types.MethodType(lambda self, input_ids, labels: own(input_ids=input_ids, labels=labels), model)
    assert without_key_value_cache(model, (), {}) == {}
    optimize(model, memory_opt_engine="compile")
    assert without_key_value_cache(model, (), {}) == {}
