"""The chunked loss in the engine: models, prediction, table, hooks, and callers that read the logits."""

import copy
import re

import pytest
import torch
from torch.nn import functional
from transformers import PretrainedConfig, Trainer, TrainerCallback
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt import optimize
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import DoesNotFitError, MemOptError
from optimum_memopt.plans.grammar import ConfigError, parse
from tests.compiled import hold_still, recorded
from tests.gradients import assert_same_step
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_step_memory import measured
from tests.trainer_runs import collate, distance, log_lines, make, weights

ROW = "Loss+:1:-1"
# Models without a language model's loss, not traced once for all sizes, or with a graph break that exposes the logits.
OTHERS = ("vit", "swin", "segformer", "patchtst", "jamba", "gemma3-vision")
MODELS = sorted(name for name in ZOO if "classification" not in name and name not in OTHERS)
VOCABULARY = 997


def attached(model, level=0, compiler="aot_eager", reader="", **options):
    engine = CompileEngine(Selection(level=level), compiler, **options)
    engine.outputs_read_by = None if reader is None else lambda: reader
    engine.attach(model)
    return engine


def row_of(engine):
    return next((row for row in engine.plans().plans if row.config == ROW), None)


@pytest.mark.parametrize(
    ("name", "level", "compiler"),
    [
        *nightly([(name, 1, "aot_eager") for name in MODELS], but=[("gpt2", 1, "aot_eager")]),
        *nightly([(name, 0, "inductor") for name in ("roberta-mlm", "gemma")]),
    ],
)
def test_trains_as_plain_pytorch(name, level, compiler):
    """The chunked loss trains as plain PyTorch to 1e-5 for any sizes and numbers of labels, and is traced once."""
    case = ZOO[name]
    model = case.build("eager", **case.one_layer)
    model.config.use_cache = False
    plain = copy.deepcopy(model)
    engine = attached(model, level, compiler)
    with recorded() as splits:
        assert_same_step(model, plain, case.batch(4, 12))
        assert_same_step(model, plain, case.batch(3, 7, seed=1))
        few = case.batch(4, 12, seed=2)
        few["labels"][:, 1:] = -100
        few["labels"][0, 2] = 7
        assert_same_step(model, plain, few, case.batch(5, 9, seed=3))
    assert len(splits) == case.graphs
    row = row_of(engine)
    assert row.applied_count == row.frequency == 1 and row.saving_bytes > 0
    outputs = model(**case.batch())
    assert outputs.loss.requires_grad and outputs.get("logits") is None
    with torch.no_grad():
        assert model(**case.batch()).logits is not None
    engine.detach()


class Causal(torch.nn.Module):
    """A causal language model that compiles in a second."""

    def __init__(self, weighted=False, change=None):
        super().__init__()
        torch.manual_seed(0)
        self.config = PretrainedConfig()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.layer = torch.nn.Linear(16, 16)
        self.lm_head = torch.nn.Linear(16, VOCABULARY, bias=False)
        self.weighted, self.change = weighted, change

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(torch.tanh(self.layer(self.embedding(input_ids))))
        logits = logits if self.change is None else self.change(logits)
        if self.weighted:
            loss = functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), torch.ones(VOCABULARY))
        else:
            loss = None if labels is None else ForCausalLMLoss(logits, labels, VOCABULARY, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


def batch_of(rows=6, length=30):
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture
def model():
    return Causal()


def test_less_memory_and_all_of_it_predicted(model):
    """The chunked loss takes less memory, predicted also for later sizes; if labels are missing, as an upper bound."""
    peaks = {}
    for loss in ("plain", "chunked"):
        engine = attached(model, loss=loss)
        for size in ((8, 40), (5, 64)):
            batch = batch_of(*size)
            measured(model, batch)
            _, peak = measured(model, batch)
            sizes = {"inputs_input_ids_dim0": size[0], "inputs_input_ids_dim1": size[1]}
            predicted = engine.predictor.footprint(sizes).activations
            assert peak == pytest.approx(predicted, rel=1e-2)
            peaks[loss, size] = peak
        assert engine.plans().header[0].endswith(", loss in chunks" if loss == "chunked" else "own partition")
        few = {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape) > 0.1, -100)}
        assert measured(model, few)[1] <= predicted * 1.01
        engine.detach()
    for size in ((8, 40), (5, 64)):
        assert peaks["chunked", size] < 0.5 * peaks["plain", size]


@in_turn
def test_backward_twice_and_a_gradient_that_is_not_one(model):
    """Two backwards of a scaled loss match plain PyTorch: the first does not change tensors that the second reads."""
    plain = copy.deepcopy(model)
    engine = attached(model)
    gradients = []
    for trained in (model, plain):
        trained.zero_grad()
        loss = trained(**batch_of()).loss / 3
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (5 * loss).backward()
        gradients.append([parameter.grad for parameter in trained.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    engine.detach()


@pytest.mark.parametrize("compiler", nightly(["aot_eager", "inductor"], but=["aot_eager"]))
def test_a_loss_that_the_loop_scales_in_place(model, compiler):
    plain = copy.deepcopy(model)
    engine = attached(model, level=1, compiler=compiler)
    for trained in (model, plain):
        loss = trained(**batch_of()).loss
        loss /= 2
        loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert not any("NOT under a plan" in line for line in engine.plans().header)
    engine.detach()


@in_turn
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_step_without_a_label(model, compiler):
    """A step without labels has zero gradients, although transformers' division by their number gives infinity."""
    plain = copy.deepcopy(model)
    engine = attached(model, level=1, compiler=compiler)
    batch = batch_of()
    for labels in (batch["labels"], torch.full_like(batch["labels"], -100)):
        for trained in (model, plain):
            trained.zero_grad()
            loss = trained(**{**batch, "labels": labels}, num_items_in_batch=(labels != -100).sum()).loss
            loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) and not theirs.grad.any()
    engine.detach()


def test_whoever_reads_the_logits_gets_them(model):
    """A caller that reads the logits gets them, also a later one; callers with and without have separate graphs."""
    batch = batch_of()
    engine = attached(model)
    assert model(**batch).get("logits") is None
    engine.outputs_read_by = lambda: "a forward hook"
    with recorded() as splits, log_lines() as lines:
        outputs = model(**batch)
    assert outputs.logits.shape == (6, 30, VOCABULARY) and len(splits) == 1
    assert any("a forward hook may read the logits" in line for line in lines)
    engine.outputs_read_by = lambda: ""
    with recorded() as splits:
        assert model(**batch).get("logits") is None
    assert not splits
    engine.detach()


def test_a_loop_of_ones_own(model):
    """A custom loop gets the logits unless it requests the chunked loss."""
    batch = batch_of()
    options = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
    engine = optimize(model, **options)
    assert model(**batch).logits.requires_grad
    assert row_of(engine).note == "loss not chunked: the training loop may read the logits"
    engine.detach()
    for asked in ({"memory_opt_loss": "chunked"}, {"memory_opt_config": ROW}):
        engine = optimize(model, **options, **asked)
        assert model(**batch).get("logits") is None
        assert (row_of(engine).requested_count, row_of(engine).applied_count) == (-1, 1)
        engine.detach()


def test_a_budget_that_a_loop_does_not_fit_in_names_the_chunked_loss(model, monkeypatch):
    """A budget that a loop does not fit names the chunked loss only if it saves memory, is not requested yet, and the
    step would fit without activations."""
    hold_still(monkeypatch)

    def refusal(loss, budget):
        options = {
            "memory_opt_compiler": "aot_eager",
            "memory_opt_budget": f"{budget / 2**20:.6f}MiB",
            "memory_opt_loss": loss,
        }
        engine = optimize(model, memory_opt_engine="compile", **options)
        with pytest.raises(DoesNotFitError) as refused:
            model(**batch_of())
        engine.detach()
        return refused.value

    named = 'memory_opt_loss="chunked"'
    # With gradients and AdamW's states, and little for activations.
    little = 2**29 + 4 * sum(parameter.nbytes for parameter in model.parameters()) + 2**16
    for loss, is_named in (("auto", True), ("chunked", False), ("plain", False)):
        too_little = refusal(loss, 2**20)
        assert too_little.is_final and named not in str(too_little)
        assert str(refusal(loss, little)).count(named) == is_named


@in_turn
def test_a_config_beside_other_rows(model):
    batch = batch_of()
    engine = attached(model)
    model(**batch)
    other = next(row.config for row in engine.plans().plans if row.config.endswith(":1:-1") and row.config != ROW)
    engine.apply(Selection(config=parse(f"{other},{ROW}")))
    model(**batch)
    assert {row.config for row in engine.plans().enabled} == {other, ROW}
    engine.apply(Selection(config=parse(f"{other},Loss+:1:0")))
    model(**batch)
    assert {row.config for row in engine.plans().enabled} == {other}
    engine.detach()


@in_turn
def test_a_loss_over_few_classes():
    """Chunking a loss over few classes saves nothing, which is only reported if it was requested."""
    case = ZOO["vit"]
    model = case.build("eager", num_hidden_layers=1)
    engine = attached(model)
    with log_lines() as lines:
        assert model(**case.batch()).loss is not None
    assert row_of(engine) is None and not any("chunked" in line for line in lines)
    engine.apply(Selection(config=parse(ROW)))
    model(**case.batch())
    row = row_of(engine)
    assert row.applied_count == 1 and row.saving_bytes < 0 and row.note.endswith("which saves nothing here")
    engine.detach()


@in_turn
def test_a_loss_that_cannot_be_chunked():
    model = Causal(weighted=True)
    engine = CompileEngine(Selection(config=parse(ROW)), "aot_eager")
    engine.attach(model)
    with pytest.raises(ConfigError, match='no plan "Loss\\+" in this model'):
        model(**batch_of())
    engine.detach()
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_loss="chunked")
    with log_lines() as lines:
        model(**batch_of()).loss.backward()
    assert any(line.endswith("the loss of Causal is not chunked: its classes have weights") for line in lines)
    engine.detach()


@in_turn
@pytest.mark.parametrize(
    ("change", "is_chunked"),
    [(lambda x: x / 2, True), (lambda x: torch.div(x, 0.01, rounding_mode="floor"), False)],
    ids=["divided", "rounded"],
)
def test_logits_that_are_divided_and_rounded(change, is_chunked):
    model, batch = Causal(change=change), batch_of()
    expected = model(**batch).loss
    engine = attached(model, loss="chunked")
    assert model(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (row_of(engine) is not None) == is_chunked
    engine.detach()


@in_turn
def test_a_label_that_is_no_class(model):
    engine = attached(model)
    batch = batch_of()
    batch["labels"][2, 5] = VOCABULARY
    with pytest.raises(IndexError, match=f"Target {VOCABULARY} is out of bounds"):
        model(**batch)
    engine.detach()


def test_the_ort_engine_refuses_the_flag():
    with pytest.raises(MemOptError, match="--memory_opt_loss chunked with the ort engine: only the compile engine"):
        optimize(ZOO["gpt2"].build("eager"), memory_opt_engine="ort", memory_opt_loss="chunked")


@pytest.mark.parametrize(("loss", "row"), [("plain", ROW), ("chunked", "Loss+:1:0"), ("chunked", "Loss+:0:-1")])
def test_a_row_and_a_flag_that_contradict_each_other(model, loss, row):
    others = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
    message = rf"^--memory_opt_loss {loss} together with {re.escape(row)} in the config: leave one of them out$"
    with pytest.raises(MemOptError, match=message):
        optimize(model, memory_opt_loss=loss, memory_opt_config=row, **others)
    optimize(model, memory_opt_loss="chunked", memory_opt_config=ROW, **others).detach()


TINY = "tiny"
COMPILE = {"memory_opt_engine": "compile"}
NAMES = nightly([TINY, "gpt2", "bart"], but=[TINY])


class Rows(list):
    def __init__(self, count=16, length=12):
        generator = torch.Generator().manual_seed(0)
        for _ in range(count):
            ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
            labels = ids.masked_fill(torch.rand(length, generator=generator) > 0.6, -100)
            self.append({"input_ids": ids, "labels": labels})


def with_decoder_inputs(rows):
    """Collate like `DataCollatorForSeq2Seq`, since a Trainer that smooths labels does not pass them to the model."""
    batch = collate(rows)
    return {**batch, "decoder_input_ids": batch["labels"].clamp(min=0).roll(1, dims=1)}


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def made(folder, name, plain=False, **changes):
    if name == TINY:
        own = {"model": Causal(), "train_dataset": Rows(), "eval_dataset": Rows(4), "data_collator": None}
        changes = own | changes
    if name == "bart" and "label_smoothing_factor" in changes:
        changes = {**changes, "data_collator": with_decoder_inputs}
    return make(
        folder, "gpt2" if name == TINY else name, plain=plain, logging_steps=1, **({} if plain else COMPILE), **changes
    )


SETTINGS = {
    "default": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "label smoothing, accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", nightly(SETTINGS, but=["default", "label smoothing, accumulation", "bf16"]))
def test_trains_and_logs_as_a_stock_trainer(tmp_path, name, setting):
    changes = SETTINGS[setting]
    stock, ours = (made(tmp_path / str(plain), name, plain, **changes) for plain in (True, False))
    tolerance = 2e-2 if setting == "bf16" else 2e-4
    assert losses(ours) == pytest.approx(losses(stock), rel=tolerance)
    assert distance(weights(ours.model), weights(stock.model)) < tolerance
    (row,) = (row for row in ours.memopt.table.plans if row.config == ROW)
    assert row.applied_count == 1
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=tolerance)


def test_smoothing_that_is_removed_between_two_trainings(tmp_path):
    stock, ours = (made(tmp_path / str(plain), TINY, plain, label_smoothing_factor=0.3) for plain in (True, False))
    losses(stock), losses(ours)
    stock.label_smoother = ours.label_smoother = None
    assert losses(ours) == pytest.approx(losses(stock), rel=2e-4)


class ReadsLogits(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 1e-3 * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


def own_loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


READERS = {
    "ReadsLogits, which asks compute_loss for the outputs,": {"trainer": ReadsLogits},
    "compute_loss_func": {"compute_loss_func": own_loss},
}


@pytest.mark.parametrize("reader", READERS)
def test_a_trainer_that_reads_the_logits_is_told(tmp_path, reader):
    changes = READERS[reader]
    stock = made(tmp_path / "stock", TINY, plain=True, **changes)
    expected = losses(stock)
    attached = made(tmp_path / "ours", TINY, plain=True, **changes)
    from optimum_memopt import attach

    with log_lines() as lines:
        attach(attached, memory_opt_compiler="aot_eager", **COMPILE)
        assert losses(attached) == pytest.approx(expected, rel=1e-6)
    # With `compute_loss_func` the model gets no labels, so it has no loss.
    told = [line for line in lines if "is not chunked" in line]
    assert told == ([] if "func" in reader else [f"the loss of Causal is not chunked: {reader} may read the logits"])


class HooksLater(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, model=None, **others):
        if state.global_step == 2:
            model.register_forward_hook(lambda module, inputs, outputs: self.seen.append(outputs.logits.shape))


@in_turn
def test_a_hook_that_comes_later_sees_the_logits(tmp_path):
    hooks = HooksLater()
    trainer = made(tmp_path, TINY, callbacks=[hooks], max_steps=4)
    assert len(losses(trainer)) == 4
    assert hooks.seen == [(4, 12, VOCABULARY)] * 2
