"""Labels, ids, padding and gradients that ONNX Runtime handles differently."""

import onnx
import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort import graph_fixes
from optimum_memopt.engines.ort.graph_fixes import IndexCheck, as_index_error
from tests import fresh_process
from tests.gradients import accumulate, assert_same_step
from tests.model_zoo import _BERT, IGNORE, ZOO, Case, tokens
from tests.ort.helpers import MLM, Pair, needs_ort, run_script
from tests.rotation import nightly

pytestmark = needs_ort


def with_last(values, value):
    changed = values.clone()
    changed.view(-1)[-1] = value
    return changed


def refused_by_both(model, plain, batch):
    """Returns the line of the engine's error for a batch that PyTorch refuses, too."""
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
def test_an_index_out_of_range_is_an_index_error_at_every_step(attach, pair, case, options, sizes):
    model, plain, _ = pair(case.build(), **options)
    batch = case.batch()
    for name, size in sizes.items():
        for value in (-1, size, 10**6):
            assert_same_step(model, plain, case.batch(3, 7))
            line = refused_by_both(model, plain, {**batch, name: with_last(batch[name], value)})
            if name == "position_ids" and "roberta" in case.config.lower():
                # The positions are read twice, by the position embeddings and by a buffer of token types.
                assert "index out of range: " in line and f"holds {value}, allowed: 0 to {size - 1}" in line
                continue
            ignored = f" and {IGNORE}" if name == "labels" else ""
            assert line == f"index out of range: {name} holds {value}, allowed: 0 to {size - 1}{ignored}"
    assert_same_step(model, plain, batch)


def test_the_first_step_raises_it_too_and_the_next_one_trains(pair):
    case = ZOO["roberta-classification"]
    model, plain, _ = pair(case.build())
    batch = case.batch()
    for name, value in (("labels", 7), ("input_ids", -1), ("position_ids", -1)):
        given = batch.get(name, torch.zeros_like(batch["input_ids"]))
        refused_by_both(model, plain, {**batch, name: with_last(given, value)})
    assert_same_step(model, plain, batch)


def test_positions_that_the_model_makes_itself_are_checked(pair):
    case = ZOO["gpt2"]
    model, plain, _ = pair(case.build())
    assert_same_step(model, plain, case.batch())
    line = refused_by_both(model, plain, case.batch(2, 65))
    assert line == "index out of range: transformer.wpe holds 64, allowed: 0 to 63"


def test_what_pytorch_accepts_is_not_refused(attach, pair):
    """A label that a causal shift drops, an answer beyond the end, and a negative index into a table are accepted."""
    case = ZOO["gpt2"]
    model, plain, _ = pair(case.build())
    batch = case.batch()
    labels = batch["labels"].clone()
    labels[:, 0] = 500
    assert_same_step(model, plain, batch, {**batch, "labels": labels})

    model, plain, _ = pair(QUESTIONS.build())
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
    """Losses other than cross_entropy whose labels PyTorch checks."""

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
def test_other_losses(attach, pair, kind):
    model, plain, _ = pair(Losses(kind))
    values, labels = torch.rand(4, 4), torch.tensor([0, 1, 2, 2])
    torch.testing.assert_close(model(values, labels), plain(values, labels))
    for value in (7, -1):
        refused_by_both(model, plain, {"values": values, "labels": with_last(labels, value)})


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", nightly(["roberta-mlm", "roberta-classification", "gpt2"], but=["gpt2"]))
def test_a_batch_without_labels_has_pytorchs_loss(attach, pair, name, inside):
    case = ZOO[name]
    model, plain, _ = pair(case.build(), ort_module_with_loss=inside)
    batch = case.batch()
    nothing = {**batch, "labels": torch.full_like(batch["labels"], IGNORE)}
    assert_same_step(model, plain, batch)
    for trained in (model, plain):
        losses, gradients = accumulate(trained, [nothing])
        assert losses.isnan().all()
        assert all(gradient is None or not gradient.any() for gradient in gradients.values())
    if name == "gpt2":
        # With Trainer's label count over all micro-batches, the loss is a sum, to which no labels add nothing.
        for trained in (model, plain):
            assert float(trained(**nothing, num_items_in_batch=torch.tensor(40)).loss.detach()) == 0
    assert_same_step(model, plain, batch)


def test_without_the_checks_ids_and_labels_are_read_wherever_they_point(attach, monkeypatch):
    """Fails once ONNX Runtime checks indices itself; the checks can then be removed."""
    monkeypatch.setattr(graph_fixes, "check_indices", lambda graph, module: {})
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
        "index out of range: labels holds 7, allowed: 0 to the number of classes minus 1"
    )
    assert as_index_error(RuntimeError("something else"), checks) is None


def expanded_for_gradients(graph) -> list[bool]:
    """Returns, for each GatherElementsGrad with expanded indices, whether the backward expands them."""
    end = next(position for position, node in enumerate(graph.node) if node.op_type == "YieldOp")
    expanded = {node.output[0]: position for position, node in enumerate(graph.node) if node.op_type == "Expand"}
    gradients = [node for node in graph.node if node.op_type == "GatherElementsGrad"]
    return [expanded[node.input[2]] > end for node in gradients if node.input[2] in expanded]


def test_indices_are_expanded_in_the_backward_and_gradients_are_those_of_torch(pair):
    model, plain, engine = pair(ZOO["deberta-v2-mlm"].build())
    for shape in ((4, 12), (3, 7)):
        assert_same_step(model, plain, ZOO["deberta-v2-mlm"].batch(*shape))
    in_backward = expanded_for_gradients(engine.graph)
    # Both terms of the relative attention in each of two layers.
    assert len(in_backward) >= 4 and all(in_backward)


def test_without_it_they_are_stashed(attach, monkeypatch):
    """Fails once ONNX Runtime expands the indices in the backward itself; the fix can then be removed."""
    monkeypatch.setattr(graph_fixes, "expand_indices_in_backward", lambda graph: None)
    engine = attach(model := ZOO["deberta-v2-mlm"].build())
    model(**ZOO["deberta-v2-mlm"].batch()).loss.backward()
    assert not any(expanded_for_gradients(engine.graph))


def test_other_graphs_are_left_alone():
    gather = onnx.helper.make_node("GatherElementsGrad", ["dy", "shape", "indices"], ["dx"])
    graph = onnx.helper.make_graph([gather], "graph", [], [])
    graph_fixes.expand_indices_in_backward(graph)
    assert [node.op_type for node in graph.node] == ["GatherElementsGrad"]


def test_a_padding_row_gets_no_gradient(pair: Pair) -> None:
    """A padding row gets no gradient, although without the extensions embeddings are a plain Gather."""
    for name in ("roberta-mlm", "llama", "bart"):
        case = ZOO[name]
        model, plain, _ = pair(case.build(), Selection(level=1))
        batch = case.batch()
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        assert_same_step(model, plain, {**batch, "labels": batch["labels"].clamp(min=1)})


def test_ignored_labels_do_not_count(pair: Pair) -> None:
    """ONNX Runtime skips padding and ignored labels in its own way; a batch of only those is an edge case."""
    model, plain, _ = pair(MLM.build(), Selection(level=1))
    batch = MLM.batch()
    assert_same_step(model, plain, batch)
    sparse = {**batch, "labels": batch["labels"].masked_fill(torch.arange(12) != 3, IGNORE)}
    assert_same_step(model, plain, sparse)


def test_grouped_convolutions_over_one_dimension_train(tmp_path):
    run_script("train_grouped_convolutions.py", cwd=tmp_path, run=fresh_process.run)
