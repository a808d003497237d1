"""The phases of a dry run against real runs, measured by torch's CPU allocator."""

import contextlib
import gc
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)
from trl import RLOOConfig, RLOOTrainer

from optimum_memopt.engines.simulator import user_step
from optimum_memopt.engines.torch_compat import kernels
from optimum_memopt.predict.phases import GENERATION, OF_ROWS
from optimum_memopt.training.compat_dry_run import longest_generation
from optimum_memopt.training.fake_run import dry_run
from tests.rotation import in_turn, nightly
from tests.trainer_runs import arguments, collate

WITHIN = 0.02
VOCABULARY, LENGTH, GENERATED = 1000, 64, 48
IDS = torch.arange(LENGTH) % 50 + 3
ROWS = [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}] * 24
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def roberta() -> PreTrainedModel:
    return RobertaForMaskedLM(RobertaConfig(vocab_size=VOCABULARY, **SIZES))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=None, **SIZES))


def adapted() -> torch.nn.Module:
    return get_peft_model(llama(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def t5() -> PreTrainedModel:
    sizes = {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4, "d_kv": 32}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))
    # Generated texts reach the maximum length.
    model.generation_config.min_length = GENERATED
    return model


GENERATES = {"predict_with_generate": True, "generation_max_length": GENERATED, "generation_num_beams": 3}
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any]]] = {
    "roberta": (roberta, {}),
    "llama": (llama, {}),
    "adapter": (adapted, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "t5": (t5, GENERATES),
}


def trainer_of(name: str, folder: Path, **changes: Any) -> Trainer:
    build, options = MODELS[name]
    torch.manual_seed(0)
    options = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": 2, **options, **changes}
    args = arguments(Seq2SeqTrainingArguments, folder, **options)
    return Seq2SeqTrainer(
        model=build(),
        args=args,
        train_dataset=ROWS,
        eval_dataset=ROWS,
        data_collator=collate,
        compute_metrics=lambda _: {},
    )


class StopsError(Exception):
    pass


class Stops(TrainerCallback):
    """Ends a run once weights and optimizer states are loaded."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        raise StopsError


def resume(trainer: Trainer, checkpoint: str) -> None:
    with contextlib.suppress(StopsError):
        trainer.train(resume_from_checkpoint=checkpoint)


def held(trainer: Trainer) -> int:
    """Returns the bytes of weights and optimizer states."""
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    weights = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    states = (value for state in getattr(trainer.optimizer, "state", {}).values() for value in state.values())
    return sum(tensor.nbytes for tensor in (*weights, *states))


def measured(trainer: Trainer, call: Callable[[], Any]) -> int:
    """Returns the peak of held bytes during a call; garbage is collected often."""
    gc.collect()
    before, threshold = held(trainer), gc.get_threshold()
    gc.set_threshold(100, 5, 5)
    try:
        return before + max(itertools.accumulate(kernels.cpu_allocations(call), initial=0))
    finally:
        gc.set_threshold(*threshold)


@pytest.mark.parametrize("name", nightly(MODELS, but=["roberta", "adapter"]))
def test_phases_are_those_of_real_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The memory of the process itself is not measured.
    monkeypatch.setattr(user_step, "held_bytes", lambda _: 0)
    found = dry_run(trainer_of(name, tmp_path), None)
    predicted = {phase.name: phase.peak for phase in found.phases}
    trainer = trainer_of(name, tmp_path)
    real = {
        "train": measured(trainer, trainer.train),
        "evaluation": measured(trainer, trainer.evaluate),
        "save": measured(trainer, lambda: trainer._save_checkpoint(trainer.model, None)),
    }
    resumed = trainer_of(name, tmp_path)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed.add_callback(Stops())
    real["resume"] = measured(resumed, lambda: resume(resumed, checkpoint))
    if "generation" in predicted:
        inputs = {key: value for key, value in collate(ROWS[:8]).items() if key != "labels"}
        generated = {"max_length": GENERATED, "num_beams": 3}
        real["generation"] = measured(trainer, lambda: trainer.model.generate(**inputs, **generated))
    if "merge" in predicted:
        adapters = trainer.model.base_model
        real["merge"] = measured(trainer, lambda: (adapters.merge_adapter(), adapters.unmerge_adapter()))
    predicted["train"] = max(predicted[phase] for phase in OF_ROWS if phase in predicted)
    assert {phase: predicted[phase] for phase in real} == pytest.approx(real, rel=WITHIN)


def mistral() -> PreTrainedModel:
    own = {"num_key_value_heads": 2, "sliding_window": 40}
    return MistralForCausalLM(MistralConfig(vocab_size=VOCABULARY, eos_token_id=None, **own, **SIZES))


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (llama, {"do_sample": True, "top_k": 50, "top_p": 0.9, "num_return_sequences": 2}),
        # Mistral's cache holds only the window.
        (mistral, {}),
    ],
)
def test_generation_of_causal_models(
    build: Callable[[], PreTrainedModel], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_step, "held_bytes", lambda _: 0)
    torch.manual_seed(0)
    model, ids = build().eval(), IDS[:32].repeat(8, 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": GENERATED, **options}
    with user_step.simulator_of(None) as simulated:
        simulated.replace([model])
        given = simulated.copy(inputs)
        with longest_generation(partial(simulated.phase, GENERATION)) as generation:
            found = simulated.run(lambda: model.generate(**given), [model, given], finds_variables=False)
    assert (generation.rows, generation.length) == (8 * options.get("num_return_sequences", 1), 32 + GENERATED)
    model.generate(**inputs)
    allocations = kernels.cpu_allocations(lambda: model.generate(**inputs))
    assert found.peak - found.given == pytest.approx(max(itertools.accumulate(allocations, initial=0)), rel=WITHIN)


@in_turn
def test_what_trl_generates_and_runs_without_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_step, "held_bytes", lambda _: 0)
    llama().save_pretrained(tmp_path / "llama")
    args = arguments(
        RLOOConfig,
        tmp_path,
        bf16=False,
        max_completion_length=GENERATED,
        generation_kwargs={"min_new_tokens": GENERATED},
        num_generations=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        gradient_checkpointing=False,
        max_steps=3,
    )

    def trainer_of_llama() -> RLOOTrainer:
        return RLOOTrainer(
            str(tmp_path / "llama"),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["a " * 40] * 40}),
            processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(place % 3) for place in range(len(completions))],
        )

    predicted = {phase.name: phase.peak for phase in dry_run(trainer_of_llama(), None).phases}
    trainer, real = trainer_of_llama(), dict[str, int]()

    def measuring(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if phase == "no-grad" and torch.is_grad_enabled():
                return call(*args, **kwargs)
            results: list[Any] = []
            # The last call is measured with the optimizer's states.
            real[phase] = measured(trainer, lambda: results.append(call(*args, **kwargs)))
            return results[0]

        return called

    monkeypatch.setattr(GenerationMixin, "generate", measuring("generation", GenerationMixin.generate))
    log_probabilities = "_get_per_token_logps_and_entropies"
    monkeypatch.setattr(trainer, log_probabilities, measuring("no-grad", getattr(trainer, log_probabilities)))
    trainer.train()
    assert {phase: predicted[phase] for phase in real} == pytest.approx(real, rel=WITHIN)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
