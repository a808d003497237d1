"""QLoRA planned from a config gives the same prediction as the quantized model itself."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes.autograd import _functions
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from transformers import BitsAndBytesConfig

from optimum_memopt import optimize
from optimum_memopt.compat.bitsandbytes import buffers_of, quantize, statistics_of
from optimum_memopt.engines.compile.capture.ranks import planned_ranks, shard
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat import fully_shard, int8_products
from optimum_memopt.errors import MemOptError
from optimum_memopt.predict.adapter import Quantization, parse_quantization
from optimum_memopt.predict.plan import plan
from tests.gradients import accumulate, assert_same
from tests.model_zoo import in_4_bits
from tests.rotation import in_turn, nightly
from tests.train.test_sharded_memory import measured_step

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = transformers.LlamaConfig(
    **SIZES, vocab_size=500, num_hidden_layers=4, tie_word_embeddings=False, dtype="bfloat16", use_cache=False
)
ADAPTER = "r=4,target=all-linear,task_type=CAUSAL_LM"
ROWS, LENGTH = 4, 32


def loaded(double: bool, prepare: bool, storage: torch.dtype = torch.uint8) -> torch.nn.Module:
    """Returns the model with real data, as transformers and PEFT load it."""
    model = transformers.LlamaForCausalLM(copy.deepcopy(CONFIG)).to(torch.bfloat16)
    in_4_bits(model, compress_statistics=double, compute_dtype=torch.bfloat16, quant_storage=storage)
    if prepare:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    ("double", "prepare", "chosen"),
    nightly(
        [(True, True, {"level": 1}), (False, False, {}), (True, False, {"budget": "100MiB"})],
        but=[(True, True, {"level": 1})],
    ),
)
def test_a_config_is_planned_as_the_model_itself(double: bool, prepare: bool, chosen: dict[str, Any]) -> None:
    ids = torch.randint(0, 500, (ROWS, LENGTH))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    common = {"device": "h100", "bf16": True, "compiler": "aot_eager", **chosen}
    real = plan(loaded(double, prepare), example_inputs=inputs, **common)
    quantize = f"nf4,double={str(double).lower()},prepare={str(prepare).lower()}"
    sizes = {"batch_size": ROWS, "seq_len": LENGTH, "padding": False}
    planned = plan(copy.deepcopy(CONFIG), "text-generation", quantize=quantize, peft=ADAPTER, **sizes, **common)
    assert planned.peak == real.peak
    # A rotary embedding's two buffers may share one storage.
    assert planned.breakdown == pytest.approx(real.breakdown, abs=64)
    # Four bits per weight, and a scale of 8 or 32 bits per 64 weights.
    weights = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    others = sum(each.nbytes for name, each in loaded(double, prepare).named_parameters() if each.dtype != torch.uint8)
    scales = weights / 64 * (1 + 4 / 256 if double else 4)
    codes = 4 * 7 * 4 * (16 + (256 + 1 if double else 0))
    expected = others + weights / 2 + scales + codes
    assert planned.breakdown["parameters"] == pytest.approx(expected, rel=0.01)


@in_turn
@pytest.mark.parametrize("storage", nightly([torch.bfloat16, torch.uint8], but=[torch.bfloat16]), ids=str)
def test_a_rank_is_planned_as_it_trains(storage: torch.dtype) -> None:
    """A rank is planned as it trains: FSDP2 shards weights packed into a float type, but not those in bytes."""
    # With a plain loss, a loop would hold the logits.
    common = {"compiler": "aot_eager", "loss": "chunked", "level": 1}
    kind = f"nf4,storage={str(storage).removeprefix('torch.')}"
    sizes = {"batch_size": ROWS, "seq_len": LENGTH, "padding": False}
    planned = plan(copy.deepcopy(CONFIG), "text-generation", quantize=kind, peft=ADAPTER, fsdp=8, **sizes, **common)
    with planned_ranks(8, "cpu") as mesh:
        assert mesh is not None
        model = loaded(double=True, prepare=True, storage=storage)
        shard(model, mesh, half=None)
        options = {f"memory_opt_{name}": value for name, value in common.items()}
        engine = optimize(model, memory_opt_engine="compile", **options)
        # The first three backwards have copies of frozen weights on the host, which is also the device here.
        for _ in range(4):
            saved, peak = measured_step(model, batch())
        assert isinstance(engine, CompileEngine) and engine.predictor is not None
        footprint = engine.predictor.footprint()
        shares = sum(fully_shard.local(each).nbytes for each in (*model.parameters(), *buffers_of(model)))
        packed = sum(each.numel() for each in model.parameters() if each.dtype == storage) * storage.itemsize
        assert packed == 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192) // 2
    assert footprint.parameters + footprint.buffers == shares
    assert abs(engine.predictor.saved() - saved) <= 64 and abs(footprint.activations - peak) <= 64
    own = [each.bytes for each in planned.at_peak if each.category == "parameters" and each.name != "all_gather"]
    assert sum(own) == pytest.approx(shares, abs=64)
    # The plan assumes that every token has a label.
    around = sum(planned.breakdown[kind] for kind in ("batch", "optimizer", "other", "allocator"))
    assert shares + peak <= planned.peak - around <= 1.05 * (shares + peak)


def test_packed_weights_that_ranks_would_cast_are_refused() -> None:
    with pytest.raises(MemOptError, match="packed into float32: FSDP2 gathers them in bfloat16, which changes them"):
        plan(CONFIG, "text-generation", quantize="nf4,storage=float32", peft=ADAPTER, fsdp=2, bf16=True)


def test_weights_of_8_bits_cannot_be_sharded() -> None:
    with pytest.raises(MemOptError, match="FSDP2 cannot shard weights of 8 bits; use quantize nf4"):
        plan(CONFIG, "text-generation", quantize="int8", peft=ADAPTER, fsdp=2)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 500, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@in_turn
def test_an_evaluation_leaves_gradients_as_they_were() -> None:
    """An evaluation does not change later gradients; with AVX512-BF16, bitsandbytes alone would compute wrong ones."""
    torch.manual_seed(0)
    model = loaded(double=True, prepare=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    products = [each for each in model.modules() if isinstance(each, Linear4bit)]
    assert products
    for product in products:
        product.support_avx512bf16_for_cpu = bool(has_avx512bf16())
    expected = accumulate(model, [batch()])
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(**batch())
        model.train()

    assert_same(accumulate(model, [batch()]), expected)
    evaluate()
    assert_same(accumulate(model, [batch()]), expected)
    engine.detach()
    assert all(product.support_avx512bf16_for_cpu == bool(has_avx512bf16()) for product in products)
    # If the CPU has the instructions, weights are packed now; unpacking leaves their scales in bfloat16.
    evaluate()
    optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    assert_same(accumulate(model, [batch()]), expected, tolerance=0.05)


# A budget runs the first forward twice.
@in_turn
@pytest.mark.parametrize("chosen", [{"memory_opt_level": 1}, {"memory_opt_budget": "99%"}], ids=["level 1", "budget"])
def test_layers_of_8_bits_are_graphs_of_their_own(tmp_path: Path, chosen: dict[str, Any]) -> None:
    transformers.LlamaForCausalLM(copy.deepcopy(CONFIG)).save_pretrained(tmp_path)
    given = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "dtype": torch.float32}
    model, plain = (transformers.LlamaForCausalLM.from_pretrained(tmp_path, **given).train() for _ in range(2))
    for one in (model, plain):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_("norm" in name)
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", **chosen)
    assert_same(accumulate(model, [batch()]), accumulate(plain, [batch()]))
    table = engine.plans()
    assert table is not None and "in 3 graphs for 4 layers" in table.header[0]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bitsandbytes multiplies by 8-bit weights as on a GPU, with its kernels for any device."""
    monkeypatch.setattr(_functions, "MatMul8bitFp", _functions.MatMul8bitLt)
    with int8_products.as_on_cuda():
        yield


def loaded_in_8_bits(folder: Path, dtype: torch.dtype, prepare: bool = True) -> torch.nn.Module:
    """Returns a model with 8-bit weights and an adapter, the same one each time."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(copy.deepcopy(CONFIG)).to(dtype).save_pretrained(folder)
    given = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "dtype": dtype}
    model = transformers.LlamaForCausalLM.from_pretrained(folder, **given)
    if prepare:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, lora).train()


@in_turn
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("chosen", "dtype", "threshold"),
    nightly(
        [
            ({"memory_opt_level": 1}, torch.float32, 2.0),
            ({"memory_opt_level": 0}, torch.bfloat16, 6.0),
            ({"memory_opt_budget": "99%"}, torch.float32, 0.0),
        ],
        but=[({"memory_opt_level": 1}, torch.float32, 2.0)],
    ),
)
def test_a_product_of_8_bits_on_a_gpu_is_one_operator(
    tmp_path: Path, chosen: dict[str, Any], dtype: torch.dtype, threshold: float
) -> None:
    """Columns with outliers depend on the data, but no graph breaks, and the input is not saved for them."""
    model, plain = (loaded_in_8_bits(tmp_path, dtype) for _ in range(2))
    for one in (model, plain):
        for product in one.modules():
            if isinstance(product, Linear8bitLt):
                product.state.threshold = threshold
    expected = accumulate(plain, [batch(), batch()])
    if threshold == 2:
        columns = [each.state.idx.numel() for each in plain.modules() if isinstance(each, Linear8bitLt)]
        assert 0 in columns and any(0 < count < 64 for count in columns)
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", **chosen)
    assert_same(accumulate(model, [batch(), batch()]), expected)
    table = engine.plans()
    assert table is not None and "in 3 graphs for 4 layers" in table.header[0]
    assert isinstance(engine, CompileEngine) and engine.predictor is not None
    # The constants of the first step are gone in later ones.
    for _ in range(2):
        saved, _ = measured_step(model, batch())
    assert abs(engine.predictor.saved() - saved) <= 64


def test_a_product_of_no_rows() -> None:
    """An expert may have no tokens."""
    given = torch.empty(0, 8, requires_grad=True)
    weight, scales = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4)
    result = int8_products.int8_linear(given, weight, scales, None, 6.0)
    result.sum().backward()
    assert result.shape == (0, 4) and given.grad is not None and given.grad.shape == (0, 8)


@in_turn
@pytest.mark.parametrize("trained", nightly([True, False], but=[True]))
def test_a_config_of_8_bits_is_planned_as_the_model_itself(tmp_path: Path, trained: bool) -> None:
    """The plan is the same before a model's first forward, which moves its scales, and after it."""
    ids = torch.randint(0, 500, (ROWS, LENGTH))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    common = {"device": "h100", "bf16": True, "compiler": "aot_eager", "level": 1}
    model = loaded_in_8_bits(tmp_path, torch.bfloat16, prepare=False)
    if trained:
        model(**batch()).loss.backward()
        model.zero_grad()
    real = plan(model, example_inputs=inputs, **common)
    given = {
        "quantize": "int8,prepare=false",
        "peft": ADAPTER,
        "batch_size": ROWS,
        "seq_len": LENGTH,
        "padding": False,
    }
    planned = plan(copy.deepcopy(CONFIG), "text-generation", **given, **common)
    assert planned.peak == real.peak
    assert planned.breakdown == pytest.approx(real.breakdown, abs=64)
    others = sum(each.nbytes for each in model.parameters() if each.dtype != torch.int8)
    weights = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    scales = 4 * 4 * (2 * 64 + 2 * 32 + 2 * 192 + 64)
    assert planned.breakdown["parameters"] == pytest.approx(others + weights + scales, rel=0.01)


def test_biases_of_8_bits_break_no_graph() -> None:
    """A layer's own forward converts its bias to the dtype of its input, which torch cannot trace."""
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100, bos_token_id=0, eos_token_id=0)
    adapter = "r=4,target=c_attn,fan_in_fan_out=true,task_type=CAUSAL_LM"
    sizes = {"batch_size": 2, "seq_len": 16, "device": "h100", "compiler": "aot_eager", "bf16": True, "level": 1}
    found = plan(config, "text-generation", quantize="int8", peft=adapter, **sizes)
    # Two graphs would leave the loss in one piece.
    assert "loss in chunks" in found.table.header[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "RobertaForSequenceClassification"])
def test_weights_are_those_that_transformers_loads(name: str, bits: int, tmp_path: Path) -> None:
    """Planned weights have the shapes and dtypes that transformers loads, also for heads, Conv1D layers and biases."""
    kind = getattr(transformers, name)
    # GPT-2's config also accepts these names.
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = kind.config_class(**sizes, vocab_size=100)
    kind(config).save_pretrained(tmp_path)
    given = BitsAndBytesConfig(load_in_8bit=True)
    if bits == 4:
        given = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    loaded = kind.from_pretrained(tmp_path, quantization_config=given, dtype=torch.float32)
    with torch.device("meta"):
        planned = kind(copy.deepcopy(config))
        planned.tie_weights()
        quantize(planned, given)

    def described(model: torch.nn.Module) -> dict[str, list[object]]:
        return {
            name: [
                *(each.shape, each.dtype, each.requires_grad),
                *((scale.shape, scale.dtype) for scale in statistics_of(each)),
            ]
            for name, each in model.named_parameters()
        }

    assert described(planned) == described(loaded)


@pytest.mark.parametrize(
    "text",
    [
        *("int4", "int8,double=true", "int8,threshold=1"),
        *("nf4,double=maybe", "nf4,compute=int8", "nf4,blocks=64", "", "fp4,prepare", "nf4,double=0"),
        "nf4,storage=int8",
    ],
)
def test_what_is_no_quantization_is_one_line(text: str) -> None:
    with pytest.raises(MemOptError, match="allowed: nf4 and fp4, with fields such as nf4,double=false") as refused:
        parse_quantization(text)
    assert "\n" not in str(refused.value)


def test_fields_of_a_quantization() -> None:
    assert parse_quantization("nf4") == Quantization("nf4")
    found = parse_quantization("fp4, double=false, compute=float32, prepare=false, storage=bfloat16")
    assert found == Quantization("fp4", double=False, compute="float32", prepare=False, storage="bfloat16")
    assert parse_quantization("int8, prepare=false") == Quantization("int8", prepare=False)


def test_quantized_weights_need_an_adapter() -> None:
    with pytest.raises(
        MemOptError, match="quantize nf4: quantized weights do not train; add an adapter, such as peft r"
    ):
        plan(CONFIG, "text-generation", quantize="nf4")
