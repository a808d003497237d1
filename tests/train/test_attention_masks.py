"""Batches without padding run without attention masks, as in plain PyTorch."""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import masking_utils

import optimum_memopt
from optimum_memopt import MemOptError, optimize
from tests.gradients import assert_bitwise_same_step, assert_same_step
from tests.model_zoo import VOCABULARY, ZOO
from tests.rotation import in_turn, nightly
from tests.trainer_runs import log_lines, make

OPTIONS = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
# Enough layers to be compiled separately, and fewer key heads than query heads.
GROUPED = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def batch(rows: int, length: int, padding: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    made = ZOO["llama"].batch(rows, length, seed=seed)
    mask = torch.ones_like(made["input_ids"])
    if padding:
        mask[-1, -padding:] = 0
    return {"input_ids": made["input_ids"], "labels": made["input_ids"], "attention_mask": mask}


def twins(name: str, attention: str = "sdpa", **changes) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = ZOO[name].build(attention, **changes)
    return model, copy.deepcopy(model)


def compiled(lines: list[str]) -> int:
    return sum(line.startswith("compiled the training graph") for line in lines)


@pytest.mark.parametrize("unit", nightly(["layer", "model"], but=["layer"]))
@pytest.mark.parametrize("attention", nightly(["sdpa", "eager"], but=["sdpa"]))
def test_batches_with_and_without_padding(unit: str, attention: str) -> None:
    """Batches with and without padding are each compiled once, and use plain PyTorch's kernels."""
    model, plain = twins("llama", attention, **GROUPED)
    optimize(model, **OPTIONS, memory_opt_level=1, memory_opt_unit=unit)
    with log_lines() as lines:
        for number, padding in enumerate((0, 0, 2, 0, 3, 0)):
            given = batch(3, 20 + number, padding, seed=number)
            assert_bitwise_same_step(model, plain, given)
            assert not any(name.startswith("_memopt") for name in vars(given["attention_mask"]))
    assert compiled(lines) == 2
    assert "compiling another training graph: the first batch with padding" in lines
    assert not any(line.startswith("recompiled") for line in lines)
    assert masking_utils.find_packed_sequence_indices.__module__ == masking_utils.__name__


@in_turn
def test_where_the_first_batch_has_padding_all_count_so() -> None:
    model, plain = twins("bert-classification", num_hidden_layers=1)
    optimize(model, **OPTIONS)
    with log_lines() as lines:
        for number, padding in enumerate((2, 0, 1)):
            given = ZOO["bert-classification"].batch(3, 9, seed=number)
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            if padding:
                given["attention_mask"][-1, -padding:] = 0
            assert_bitwise_same_step(model, plain, given)
    assert compiled(lines) == 1


def local_twins(window: int | None) -> tuple[torch.nn.Module, torch.nn.Module]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCABULARY, **GROUPED}
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=window)).train()
    return model, copy.deepcopy(model)


@in_turn
@pytest.mark.parametrize("window", nightly([None, 13, 12, 6], but=[None, 12]))
def test_without_a_mask_attention_may_take_flash_kernels(window: int | None) -> None:
    """Attention without a mask may use flash kernels, which take none; rows as long as the window have a mask."""
    model, plain = local_twins(window)
    engine = optimize(model, **OPTIONS, memory_opt_level=1)
    has_mask = window is not None and window <= 12
    with contextlib.nullcontext() if has_mask else sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert_bitwise_same_step(model, plain, batch(2, 12))
    assert engine.plans().plans


@pytest.mark.parametrize("unit", nightly(["layer", "model"]))
def test_rows_shorter_and_longer_than_the_window_of_local_attention(unit: str) -> None:
    model, plain = local_twins(16)
    optimize(model, **OPTIONS, memory_opt_level=1, memory_opt_unit=unit)
    with log_lines() as lines:
        for number, (length, padding) in enumerate(((12, 0), (15, 0), (16, 0), (24, 0), (9, 0), (9, 2), (24, 3))):
            assert_bitwise_same_step(model, plain, batch(3, length, padding, seed=number))
    others = [line for line in lines if line.startswith("compiling another training graph: ")]
    assert [line.partition(": ")[2] for line in others] == [
        "the first batch with rows as long as local attention's window",
        "the first batch with padding",
    ]
    assert not any(line.startswith("recompiled") for line in lines)


@in_turn
def test_where_the_first_batch_is_as_long_as_the_window_all_count_so() -> None:
    model, plain = local_twins(8)
    optimize(model, **OPTIONS, memory_opt_level=1)
    with log_lines() as lines:
        for number, length in enumerate((12, 6)):
            given = batch(3, length, seed=number)
            # For short rows plain PyTorch detects that no mask is needed.
            same = assert_bitwise_same_step if length >= 8 else assert_same_step
            same(model, plain, given)
    assert compiled(lines) == 1


@in_turn
def test_a_mask_that_is_not_given_is_not_made() -> None:
    model, plain = twins("llama", **GROUPED)
    optimize(model, **OPTIONS, memory_opt_level=1)
    for number in range(2):
        given = batch(2, 10 + number, seed=number)
        del given["attention_mask"]
        assert_bitwise_same_step(model, plain, given)


@pytest.mark.parametrize("use_cache", nightly([False, True], but=[True]))
def test_rows_packed_into_one(use_cache: bool) -> None:
    """Packed rows attend only to themselves; plain PyTorch's key-value cache, not created here, would mix them."""
    model, plain = twins("llama", **GROUPED, use_cache=use_cache)
    optimize(model, **OPTIONS, memory_opt_level=1)
    given = batch(1, 12)
    del given["attention_mask"]
    assert_bitwise_same_step(model, plain, given)
    for lengths in ((5, 7), (4, 4, 4), (12,)):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        # For one row plain PyTorch detects that no mask is needed.
        same = assert_bitwise_same_step if use_cache or len(lengths) > 1 else assert_same_step
        same(model, plain, {**given, "position_ids": positions})


@pytest.mark.parametrize("asked", nightly([{}, {"memory_opt_level": 1}], but=[{"memory_opt_level": 1}]))
def test_packed_rows_of_a_model_that_checkpoints(asked: dict[str, int]) -> None:
    """With activation checkpointing transformers makes no cache, so packed rows attend only to themselves; the engine
    switches checkpointing off, but not this."""
    model, plain = twins("llama", **GROUPED, use_cache=True)
    optimize(model, **OPTIONS, **asked)
    given = batch(1, 12)
    del given["attention_mask"]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    for enable in ("gradient_checkpointing_enable", "gradient_checkpointing_disable"):
        for each in (model, plain):
            getattr(each, enable)()
        assert_bitwise_same_step(model, plain, {**given, "position_ids": positions})


class Restarting(transformers.LlamaForCausalLM):
    """Restarts its position ids after each token 1."""

    def forward(self, input_ids, labels=None):
        ends = torch.cat([torch.zeros_like(input_ids[:, :1]), (input_ids == 1).long()[:, :-1]], dim=1)
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        starts = torch.where(ends.bool(), places, 0).cummax(dim=1).values
        return super().forward(input_ids=input_ids, position_ids=places - starts, labels=labels)


@pytest.mark.parametrize("use_cache", nightly([False, True]))
def test_a_model_that_packs_rows_by_itself(use_cache: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCABULARY, **GROUPED}
    config = transformers.LlamaConfig(**sizes, use_cache=use_cache)
    model = Restarting(config).train()
    plain = copy.deepcopy(model)
    optimize(model, **OPTIONS, memory_opt_level=1)
    ids = batch(2, 12)["input_ids"].clamp(min=2)
    for place in (None, 4, 7):
        given = ids.clone()
        if place is not None:
            given[:, place] = 1
        # If nothing restarts, plain PyTorch detects that no mask is needed.
        same = assert_bitwise_same_step if use_cache or place is not None else assert_same_step
        same(model, plain, {"input_ids": given, "labels": given})


@pytest.mark.nightly
def test_an_adapter_and_a_user_s_wrapper() -> None:
    model, _ = twins("llama", **GROUPED)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    plain = copy.deepcopy(model)
    optimize(model, **OPTIONS, memory_opt_level=1)
    for number, padding in enumerate((0, 2)):
        assert_bitwise_same_step(model, plain, batch(3, 20, padding, seed=number))


@in_turn
@pytest.mark.parametrize("name", nightly(["t5", "modernbert-mlm", "gpt2", "whisper"], but=["modernbert-mlm"]))
def test_other_kinds_of_models(name: str) -> None:
    case = ZOO[name]
    model, plain = twins(name, **case.one_layer)
    optimize(model, **OPTIONS)
    for number in range(2):
        given = case.batch(3, 12, seed=number)
        masks = {key: torch.ones_like(value) for key, value in given.items() if key.endswith("attention_mask")}
        assert_bitwise_same_step(model, plain, {**given, **masks})


@pytest.mark.nightly
def test_a_budget_is_solved_for_each_kind() -> None:
    model, plain = twins("llama", **GROUPED)
    engine = optimize(model, **OPTIONS, memory_opt_budget="90%")
    with log_lines() as lines:
        for number, padding in enumerate((0, 2, 0, 2)):
            assert_bitwise_same_step(model, plain, batch(3, 20, padding, seed=number))
            if not number:
                first = engine.predicted_peak_mib(None)
    assert [line for line in lines if "solving for the budget again" in line] == [
        "the first batch with padding: solving for the budget again"
    ]
    # The batches so far are of both kinds.
    assert engine.predicted_peak_mib(None) >= first


@pytest.mark.nightly
def test_a_budget_is_solved_for_rows_as_long_as_the_window() -> None:
    model, plain = local_twins(16)
    optimize(model, **OPTIONS, memory_opt_budget="90%")
    with log_lines() as lines:
        for number, length in enumerate((12, 20, 15)):
            assert_bitwise_same_step(model, plain, batch(3, length, seed=number))
    assert [line for line in lines if "solving for the budget again" in line] == [
        "the first batch with rows as long as local attention's window: solving for the budget again"
    ]


@pytest.mark.parametrize("longest", nightly([15, 16]))
def test_data_tell_of_rows_as_long_as_the_window(longest: int, tmp_path: Path) -> None:
    """The data's longest row decides about the window, although the shortest come first."""
    dataset = [
        {key: value[0] for key, value in batch(1, length, seed=length).items()} for length in (6, 6, 9, longest)
    ]
    options = {**OPTIONS, "memory_opt_budget": "90%", "max_steps": 4, "train_sampling_strategy": "sequential"}
    model, _ = local_twins(16)
    trainer = make(tmp_path, "llama", model=model, train_dataset=dataset, per_device_train_batch_size=1, **options)
    with log_lines() as lines:
        trainer.train()
    assert not any("attention's window" in line for line in lines)
    assert any(f"batches up to 1 x {longest}" in line for line in lines)


@in_turn
def test_data_that_will_have_padding_are_planned_for_it(tmp_path: Path) -> None:
    """The plan allows for padding, although the longest rows come first and have none."""
    lengths = (9, 9, 9, 9, 8, 7, 6, 5)
    dataset = [{key: value[0] for key, value in batch(1, length, seed=length).items()} for length in lengths]
    options = {**OPTIONS, "memory_opt_budget": "90%", "max_steps": 2, "train_sampling_strategy": "sequential"}
    with log_lines() as lines:
        make(tmp_path, "llama", train_dataset=dataset, **options).train()
    assert not any("padding" in line for line in lines)


@in_turn
def test_a_plan_for_rows_without_padding_saves_less() -> None:
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, vocab_size=VOCABULARY, **GROUPED)
    with_masks, without = (
        optimum_memopt.plan(
            config, "text-generation", batch_size=2, seq_len=512, device="h100", bf16=True, padding=padding
        )
        for padding in (True, False)
    )
    bias = 2 * 512 * 512 * 2  # bytes per layer
    assert without.peak < with_masks.peak - 4 * bias


@in_turn
@pytest.mark.parametrize("padding", nightly([0, 2], but=[0]))
def test_a_plan_file_is_for_one_kind(padding: int, tmp_path: Path) -> None:
    """A plan file for batches with padding fits all batches; one for batches without is refused for padding."""
    model, plain = twins("llama", **GROUPED)
    made, first, other = copy.deepcopy(model), batch(2, 12, padding), batch(2, 12, 2 - padding)
    engine = optimize(made, **OPTIONS, memory_opt_level=1)
    made(**first)
    engine.plan_file().save(file := tmp_path / "plan.json")
    engine = optimize(model, **OPTIONS, memory_opt_plan=str(file))
    if padding:
        assert_same_step(model, plain, other, first)
        assert "plan file (level 1)" in engine.plans().header[0]
        return
    with pytest.raises(MemOptError, match="for a different graph: .* batches without padding\\)"):
        model(**other)


@pytest.mark.parametrize("is_short", nightly([True, False]))
def test_a_plan_file_is_for_rows_shorter_than_the_window_or_for_all(is_short: bool, tmp_path: Path) -> None:
    model, plain = local_twins(16)
    made, first, other = copy.deepcopy(model), batch(2, 20 - 8 * is_short), batch(2, 12 + 8 * is_short)
    engine = optimize(made, **OPTIONS, memory_opt_level=1)
    made(**first)
    engine.plan_file().save(file := tmp_path / "plan.json")
    optimize(model, **OPTIONS, memory_opt_plan=str(file))
    if is_short:
        with pytest.raises(MemOptError, match="without padding, and for rows shorter than local attention's window"):
            model(**other)
    else:
        assert_same_step(model, plain, other)


@pytest.mark.nightly
def test_two_threads_train_two_models() -> None:
    models = [twins("llama", **GROUPED), local_twins(16)]
    for model, _ in models:
        optimize(model, **OPTIONS, memory_opt_level=1)

    def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        for number, (length, padding) in enumerate(((12, 0), (20, 2), (13, 0))):
            model(**batch(3, length, padding, seed=number)).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(gradients, (model for model, _ in models)))
    for ours, (_, plain) in zip(found, models, strict=True):
        expected = gradients(plain)
        assert all(torch.equal(ours[name], gradient) for name, gradient in expected.items())
    assert masking_utils.find_packed_sequence_indices.__module__ == masking_utils.__name__


@in_turn
def test_masks_are_kept_where_transformers_makes_them_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """If transformers has changed so that the patch cannot apply, a warning and the table's header say so."""
    prepare = masking_utils._preprocess_mask_arguments

    def renamed(settings, inputs_embeds, mask, *args, **kwargs):
        return prepare(settings, inputs_embeds, mask, *args, **kwargs)

    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", renamed)
    model, plain = twins("llama", **GROUPED)
    with log_lines() as lines:
        memopt = optimize(model, **OPTIONS, memory_opt_level=1)
        for number, padding in enumerate((0, 2, 0)):
            # Plain PyTorch drops the mask, and uses a different kernel.
            assert_same_step(model, plain, batch(3, 20 + number, padding, seed=number))
    (line,) = (line for line in lines if line.startswith("attention masks are kept"))
    assert "_preprocess_mask_arguments without the parameters config" in line and "; tested with transformers" in line
    assert line in memopt.plans().header
    # All batches count as one kind.
    assert compiled(lines) == 1
