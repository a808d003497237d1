"""Labels and ids out of range: an IndexError as in PyTorch, at every step."""

import copy

import pytest
import torch

from optimum_memopt.engines.ort.graph_fixes.index_checks import IndexCheck, as_index_error
from optimum_memopt.engines.ort.session import session
from tests.gradients import accumulate, assert_same_step
from tests.model_zoo import _BERT, IGNORE, ZOO, Case, tokens
from tests.ort.helpers import needs_ort
from tests.rotation import nightly

pytestmark = needs_ort


def with_last(values, value):
    changed = values.clone()
    changed.view(-1)[-1] = value
    return changed


def refused_by_both(model, plain, batch):
    """The line of the engine's error, where PyTorch raises one too."""
    with pytest.raises((IndexError, RuntimeError)):
        plain(**batch)
    with pytest.raises(IndexError) as error:
        model(**batch)
    assert "\n" not in str(error.value)
    return str(error.value)


def positions(batch_size, length, generator):
    answers = {
        name: torch.randint(0, length, (batch_size,), generator=generator)
        for name in ("start_positions", "end_positions")
    }
    return {**tokens(batch_size, length, generator), **answers}


GPT2_WITH_TYPES = Case(
    "GPT2LMHeadModel",
    "GPT2Config",
    ZOO["gpt2"].arguments,
    lambda *size: {**(batch := ZOO["gpt2"].make_batch(*size)), "token_type_ids": torch.zeros_like(batch["input_ids"])},
)
BART_WITH_DECODER_IDS = Case(
    "BartForConditionalGeneration",
    "BartConfig",
    ZOO["bart"].arguments,
    lambda *size: {**(batch := ZOO["bart"].make_batch(*size)), "decoder_input_ids": batch["labels"].clamp(min=0)},
)
ROBERTA_WITH_ALL = Case(
    "RobertaForMaskedLM",
    "RobertaConfig",
    ZOO["roberta-mlm"].arguments,
    lambda *size: {
        **(batch := ZOO["roberta-mlm"].make_batch(*size)),
        "token_type_ids": torch.zeros_like(batch["input_ids"]),
        "position_ids": torch.arange(size[1]).expand(size[0], size[1]),
    },
)
QUESTIONS = Case("BertForQuestionAnswering", "BertConfig", _BERT, positions)


@pytest.mark.parametrize(
    "case, options, sizes",
    [
        (ZOO["roberta-classification"], {}, {"labels": 3, "input_ids": 97}),
        (ROBERTA_WITH_ALL, {}, {"labels": 97, "token_type_ids": 2, "position_ids": 64}),
        (ZOO["roberta-mlm"], {"ort_module_with_loss": True}, {"labels": 97, "input_ids": 97}),
        (GPT2_WITH_TYPES, {}, {"labels": 97, "token_type_ids": 97}),
        (BART_WITH_DECODER_IDS, {"ort_module_with_loss": True}, {"labels": 97, "decoder_input_ids": 97}),
    ],
    ids=["classification", "masked LM", "masked LM, loss inside", "causal LM", "translation, loss inside"],
)
def test_an_index_out_of_range_is_an_index_error_at_every_step(attach, case, options, sizes):
    model = case.build()
    plain = copy.deepcopy(model)
    attach(model, **options)
    batch = case.batch()
    for name, size in sizes.items():
        for value in (-1, size, 10**6):
            assert_same_step(model, plain, case.batch(3, 7))
            line = refused_by_both(model, plain, {**batch, name: with_last(batch[name], value)})
            if name == "position_ids" and "roberta" in case.config.lower():
                # Which is read twice, by the position embeddings and by a buffer of token types.
                assert "index out of range: " in line and f"holds {value}, allowed are 0 to {size - 1}" in line
                continue
            ignored = f" and {IGNORE}" if name == "labels" else ""
            assert line == f"index out of range: {name} holds {value}, allowed are 0 to {size - 1}{ignored}"
    assert_same_step(model, plain, batch)


def test_the_first_step_raises_it_too_and_the_next_one_trains(attach):
    case = ZOO["roberta-classification"]
    model = case.build()
    plain = copy.deepcopy(model)
    attach(model)
    batch = case.batch()
    for name, value in (("labels", 7), ("input_ids", -1), ("position_ids", -1)):
        given = batch.get(name, torch.zeros_like(batch["input_ids"]))
        refused_by_both(model, plain, {**batch, name: with_last(given, value)})
    assert_same_step(model, plain, batch)


def test_positions_that_the_model_makes_itself_are_checked(attach):
    case = ZOO["gpt2"]
    model = case.build()
    plain = copy.deepcopy(model)
    attach(model)
    assert_same_step(model, plain, case.batch())
    line = refused_by_both(model, plain, case.batch(2, 65))
    assert line == "index out of range: transformer.wpe holds 64, allowed are 0 to 63"


def test_what_pytorch_accepts_is_not_refused(attach):
    """A label that the shift of a causal model drops, an answer behind the end, a negative index into a table."""
    case = ZOO["gpt2"]
    model = case.build()
    plain = copy.deepcopy(model)
    attach(model)
    batch = case.batch()
    labels = batch["labels"].clone()
    labels[:, 0] = 500
    assert_same_step(model, plain, batch, {**batch, "labels": labels})

    model = QUESTIONS.build()
    plain = copy.deepcopy(model)
    attach(model)
    for length in (12, 7, 20):
        batch = QUESTIONS.batch(4, length)
        for given in (batch, {**batch, "start_positions": with_last(batch["start_positions"], 500)}):
            torch.testing.assert_close(model(**given).loss, plain(**given).loss)

    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.rand(5, 3))

        def forward(self, rows):
            return self.table[rows].square().sum()

    model = Table()
    attach(model)
    for rows in (torch.tensor([0, 4]), torch.tensor([-1, -5])):
        model.zero_grad()
        model(rows).backward()
        assert model.table.grad.abs().sum(1).nonzero().flatten().tolist() == [0, 4]


class Losses(torch.nn.Module):
    """Losses without cross_entropy in which PyTorch checks the labels."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kind = torch.nn.Linear(4, 3), kind

    def forward(self, values, labels):
        logits = self.linear(values)
        if self.kind == "one_hot":
            return (logits * torch.nn.functional.one_hot(labels, 3)).sum()
        return -logits.log_softmax(-1).gather(1, labels[:, None]).mean()


@pytest.mark.parametrize("kind", ["gather", "one_hot"])
def test_other_losses(attach, kind):
    model = Losses(kind)
    plain = copy.deepcopy(model)
    attach(model)
    values, labels = torch.rand(4, 4), torch.tensor([0, 1, 2, 2])
    torch.testing.assert_close(model(values, labels), plain(values, labels))
    for value in (7, -1):
        refused_by_both(model, plain, {"values": values, "labels": with_last(labels, value)})


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", nightly(["roberta-mlm", "roberta-classification", "gpt2"], but=["gpt2"]))
def test_a_batch_without_labels_has_pytorchs_loss(attach, name, inside):
    case = ZOO[name]
    model = case.build()
    plain = copy.deepcopy(model)
    attach(model, ort_module_with_loss=inside)
    batch = case.batch()
    nothing = {**batch, "labels": torch.full_like(batch["labels"], IGNORE)}
    assert_same_step(model, plain, batch)
    for trained in (model, plain):
        losses, gradients = accumulate(trained, [nothing])
        assert losses.isnan().all()
        assert all(gradient is None or not gradient.any() for gradient in gradients.values())
    if name == "gpt2":
        # With Trainer's count of the labels in all micro-batches the loss is a sum, and no labels add nothing.
        for trained in (model, plain):
            assert float(trained(**nothing, num_items_in_batch=torch.tensor(40)).loss.detach()) == 0
    assert_same_step(model, plain, batch)


def test_without_the_checks_ids_and_labels_are_read_wherever_they_point(attach, monkeypatch):
    """Fails when ONNX Runtime learns it, and they can go."""
    monkeypatch.setattr(session, "check_indices", lambda graph, module: {})
    case = ZOO["roberta-classification"]
    model = case.build()
    attach(model)
    batch = case.batch()
    model(**batch)
    model(**{**batch, "labels": with_last(batch["labels"], 3), "input_ids": with_last(batch["input_ids"], -1)})


def test_messages():
    checks = {"/_original_module/loss": IndexCheck("labels", None)}
    text = f"Name:'/_original_module/loss/index_range' Status Message: x\n{{1}}, requested shape:{{{2**40 + 8}}}"
    assert str(as_index_error(RuntimeError(text), checks)) == (
        "index out of range: labels holds 7, allowed are 0 to the number of classes less 1"
    )
    assert as_index_error(RuntimeError("something else"), checks) is None
