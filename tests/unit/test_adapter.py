"""A PEFT adapter on the planned model."""

import json
from collections import Counter

import pytest
from transformers import LlamaConfig

from optimum_memopt.engines.api.predictions import EagerSettings
from optimum_memopt.engines.compile.predict.plain_step import plain_step
from optimum_memopt.errors import MemOptError
from optimum_memopt.predict.adapter import parse_adapter
from optimum_memopt.predict.workload import Workload
from optimum_memopt.step_settings import StepSpec

CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)


def test_fields_and_their_short_names():
    assert parse_adapter("r=16,target=q_proj+v_proj,alpha=32,use_dora=true") == {
        "peft_type": "LORA",
        "r": 16,
        "target_modules": ["q_proj", "v_proj"],
        "lora_alpha": 32,
        "use_dora": True,
    }
    assert parse_adapter("type=loha,target=all-linear")["peft_type"] == "LOHA"


def test_a_file_or_its_folder(tmp_path):
    config = {"peft_type": "LORA", "r": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert parse_adapter(str(tmp_path)) == parse_adapter(str(tmp_path / "adapter_config.json")) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("r=", "--peft r=: r= is not a field; allowed:"),
        ("lora", "--peft lora: No such file or directory; allowed:"),
        ("r=8,rank=2", "--peft rank: LoraConfig has no such field"),
        ("r=four", "--peft r=four: allowed: numbers"),
        ("type=lorra", "--peft peft_type=LORRA: allowed: .*LORA"),
        ("target=nothing", "--peft: PEFT rejects it: "),
    ],
)
def test_a_mistake_is_one_line(text, message):
    workload = Workload(CONFIG, "text-generation", 2, 8, peft=text)
    with pytest.raises(MemOptError, match=message) as caught:
        workload.check()
        plain_step(workload, StepSpec("h100"), EagerSettings())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "adapter", ["r=4,target=all-linear", "type=vera,r=4,target=q_proj", "type=loha,target=q_proj"]
)
def test_only_the_adapter_trains(adapter):
    whole = plain_step(Workload(CONFIG, "text-generation", 2, 8), StepSpec("h100"), EagerSettings())
    part = plain_step(Workload(CONFIG, "text-generation", 2, 8, peft=adapter), StepSpec("h100"), EagerSettings())
    assert part.run.trained and not any("base_layer" in name for name in part.run.trained)
    assert 0 < sum(part.states) < sum(whole.states)
    assert part.peak < whole.peak


def test_the_type_of_the_weights():
    def parameters(dtype: str) -> int:
        step = plain_step(Workload(CONFIG, "text-generation", 2, 8, dtype=dtype), StepSpec("h100"), EagerSettings())
        return step.timeline.held["parameters"][0]

    assert parameters("") == parameters("float32")
    assert parameters("bfloat16") == pytest.approx(parameters("float32") / 2, rel=0.01)
    assert Workload(CONFIG, "text-generation").weights_dtype == "float32 by default"
    half = LlamaConfig.from_dict({**CONFIG.to_dict(), "dtype": "bfloat16"})
    assert Workload(half, "text-generation").weights_dtype == "bfloat16 by its config"
    assert Workload(half, "text-generation", dtype="float32").weights_dtype == "float32"


def test_bytes_of_parameters_are_listed_by_type():
    workload = Workload(CONFIG, "text-generation", 2, 8, dtype="bfloat16", peft="r=2,target=q_proj")
    step = plain_step(workload, StepSpec("h100"), EagerSettings())
    held = Counter()
    for group in step.timeline.alive:
        held.update({group.name: group.bytes} if group.category == "parameters" else {})
    assert sum(held.values()) == step.timeline.held["parameters"][0]
    assert held["bfloat16"] > held["float32"] > 0
