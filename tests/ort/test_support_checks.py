import copy
import re
import types

import pytest
import torch
import transformers

from optimum_memopt.engines.ort import checks
from optimum_memopt.errors import MemOptError, UnsupportedModelError

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11}


def roberta(dropout=0.0, attention="sdpa"):
    config = transformers.RobertaConfig(**SIZES, attention_probs_dropout_prob=dropout)
    config._attn_implementation = attention
    return transformers.RobertaForSequenceClassification(config)


def llama(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1, **changes))


def refused(model):
    with pytest.raises(UnsupportedModelError) as error:
        checks.check(model)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("make", [roberta, llama, lambda: torch.nn.Linear(2, 2)])
def test_ordinary_models_pass(make):
    checks.check(make())


def test_models_that_ort_would_train_wrongly_are_refused_with_a_suggestion():
    assert "nothing to train" in refused(torch.nn.Identity())
    assert "accelerate launch" in refused(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
    assert "has bfloat16, float16 parameters" in refused(
        torch.nn.Sequential(torch.nn.Linear(2, 2).half(), torch.nn.Linear(2, 2).bfloat16())
    )
    assert "on several devices (cpu, meta)" in refused(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    )


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    made = transformers.TrainingArguments(str(tmp_path_factory.mktemp("run")), use_cpu=True, report_to=[])

    def changed(name, value):
        args = copy.copy(made)
        # Constructing arguments with these values has side effects: environment variables, hardware checks.
        setattr(args, name, value)
        return args

    return changed


def test_ordinary_arguments_pass(arguments):
    checks.check_arguments(arguments("bf16", False))


@pytest.mark.parametrize(
    "name, value, named",
    [
        ("bf16", True, "--bf16"),
        ("fp16", True, "--fp16"),
        ("torch_compile", True, "--torch_compile"),
        ("fsdp", ["full_shard"], "FSDP with the ort engine"),
        ("deepspeed_plugin", types.SimpleNamespace(zero_stage=3), "use ZeRO stage 0, 1 or 2"),
        ("_n_gpu", 2, "2 GPUs in one process"),
    ],
)
def test_arguments_that_ort_cannot_train_with(arguments, name, value, named):
    with pytest.raises(MemOptError, match=re.escape(named)) as error:
        checks.check_arguments(arguments(name, value))
    assert "\n" not in str(error.value)


def test_fsdp_of_accelerates_launcher_is_seen_too(arguments, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(MemOptError, match="FSDP with the ort engine"):
        checks.check_arguments(arguments("fsdp", None))


@pytest.mark.parametrize(
    "config, has_dropout",
    [
        (transformers.RobertaConfig(), True),
        (transformers.ViTConfig(), False),
        (transformers.DistilBertConfig(attention_dropout=0.3), True),
        (transformers.GPT2Config(attn_pdrop=0.2), True),
        (transformers.LlamaConfig(), False),
        (transformers.SwitchTransformersConfig(dropout_rate=0.4), True),
        (transformers.PreTrainedConfig(), True),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_attention_dropout_by_each_of_its_names(config, has_dropout):
    assert ("sdpa with dropout" in checks.needs_eager_attention(config)) is has_dropout


@pytest.mark.parametrize("dropout, chosen", [(0.1, "eager"), (0.0, "sdpa")])
def test_sdpa_is_kept_only_where_it_trains(dropout, chosen, capsys):
    model = roberta(dropout)
    replaced = checks.choose_attention(model)
    assert model.config._attn_implementation == chosen
    assert replaced == (None if chosen == "sdpa" else "sdpa")
    assert ("attention sdpa -> eager" in capsys.readouterr().err) is (chosen == "eager")


def test_t5_trains_with_eager_attention_even_without_dropout():
    config = transformers.T5Config(dropout_rate=0.0, attn_implementation="sdpa")
    assert "no gradient" in checks.needs_eager_attention(config)
    config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in checks.needs_eager_attention(config)


def test_eager_models_and_models_without_a_config_are_left_alone():
    assert checks.choose_attention(roberta(0.1, attention="eager")) is None
    assert checks.choose_attention(torch.nn.Linear(2, 2)) is None


def test_hooks_on_submodules_are_remarked_and_the_model_s_own_are_not():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
    model.register_forward_hook(lambda *_: None)
    assert checks.remarks(model) == ()
    model[1].register_forward_pre_hook(lambda *_: None)
    (remark,) = checks.remarks(model)
    assert "hooks on 1 submodules (1)" in remark
    for module in model:
        module.register_full_backward_hook(lambda *_: None)
    (remark,) = checks.remarks(model)
    assert "hooks on 5 submodules (0, 1, 2 and 2 more)" in remark
