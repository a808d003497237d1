"""Which losses are found in dynamo's graphs; the rewritten graphs compute the same."""

import copy

import pytest
import torch
from torch.nn import functional

from optimum_memopt.engines.compile.loss.decide import LossMode, decide_losses

WIDTH, CLASSES, IGNORE = 8, 61, -100


class Head(torch.nn.Module):
    """A language model without layers; `logits_of` computes logits from hidden states, as models do."""

    def __init__(self, logits_of=None, loss_of=None, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(CLASSES, WIDTH)
        self.projection = torch.nn.Linear(WIDTH, CLASSES, bias=bias)
        self.register_buffer("offset", torch.randn(1, CLASSES))
        self.shift = torch.nn.Parameter(torch.randn(CLASSES))
        self.first = torch.nn.Linear(WIDTH, 3, bias=False)
        self.second = torch.nn.Linear(3, CLASSES, bias=False)
        self.logits_of = logits_of or (lambda head, hidden: head.projection(hidden))
        self.loss_of = loss_of or flat

    def forward(self, ids, labels):
        hidden = torch.tanh(self.embedding(ids))
        return self.loss_of(self.logits_of(self, hidden), labels)


def flat(logits, labels, **settings):
    return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **settings)


def next_tokens(logits, labels):
    """Compute the loss like transformers' causal models since 4.48, with shifted labels."""
    labels = functional.pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()
    return flat(logits.float(), labels, ignore_index=IGNORE, reduction="sum") / 7


def last_rows_dropped(logits, labels):
    """Compute the loss like transformers' causal models before 4.48, with the last rows dropped."""
    return flat(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous())


def batch(rows=3, length=11, labelled=0.7):
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, CLASSES, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) >= labelled, IGNORE)
    return ids, labels


def step(head, forward, *inputs):
    head.zero_grad(set_to_none=True)
    loss = forward(*inputs)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in head.named_parameters()}


def check(head, mode="chunked", reader="", batches=None):
    """Compare `head` with a planned loss to plain PyTorch; returns the loss plans, and why other losses have none."""
    plain, found = copy.deepcopy(head), []

    def backend(module, _):
        found.append(decide_losses(module.graph, LossMode(mode), reader))
        module.graph.lint()
        module.recompile()
        return module

    torch._dynamo.reset()
    forward = torch.compile(head, backend=backend, dynamic=True)
    for inputs in batches or (batch(), batch(5, 7, 0.2)):
        loss, gradients = step(head, forward, *inputs)
        expected, exact = step(plain, plain, *inputs)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradients, exact, rtol=1e-4, atol=1e-6)
    assert len(found) == 1, "no recompile for other sizes or numbers of labels"
    return found[0]


FOUND = {
    "plain": {},
    "without bias": {"bias": False},
    "shifted labels, a sum": {"loss_of": next_tokens},
    "dropped rows": {"loss_of": last_rows_dropped},
    "classes second": {"loss_of": lambda logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels)},
    "reshape and a module": {
        "loss_of": lambda logits, labels: torch.nn.CrossEntropyLoss()(logits.reshape(-1, CLASSES), labels.reshape(-1))
    },
    "label smoothing": {"loss_of": lambda logits, labels: flat(logits, labels, label_smoothing=0.1)},
    "soft cap": {"logits_of": lambda head, hidden: torch.tanh(head.projection(hidden) / 5) * 5},
    "scaled": {"logits_of": lambda head, hidden: 0.25 * head.projection(hidden)},
    "scaled and capped": {"logits_of": lambda head, hidden: 3 * torch.tanh(head.projection(hidden) * 0.5 / 2) / 2},
    "a buffer": {"logits_of": lambda head, hidden: head.projection(hidden) + head.offset},
    "a parameter": {"logits_of": lambda head, hidden: head.projection(hidden) + head.shift},
    "a buffer, no bias": {"bias": False, "logits_of": lambda head, hidden: head.projection(hidden) + head.offset},
    "tied weights": {"logits_of": lambda head, hidden: functional.linear(hidden, head.embedding.weight)},
    "an adapter": {"logits_of": lambda head, hidden: head.projection(hidden) + head.second(head.first(hidden)) * 2.0},
    "an adapter, dropped rows": {
        "logits_of": lambda head, hidden: head.projection(hidden) + head.second(head.first(hidden)) * 2.0,
        "loss_of": last_rows_dropped,
    },
    "last tokens only": {"logits_of": lambda head, hidden: head.projection(hidden[:, slice(0, None), :])},
    "a mask of rows": {"loss_of": lambda logits, labels: flat(logits, labels) + 0.5 * labels.float().mean()},
}


@pytest.mark.parametrize("name", FOUND)
def test_what_models_do_between_projection_and_loss(name):
    plans, others = check(Head(**FOUND[name]))
    assert [plan.is_chunked for plan in plans] == [True] and not others


def test_labels_are_counted_before_all_else():
    """Labels are counted first, so that a device has the count when the host reaches the loss."""
    called: list[str] = []

    def backend(module, _):
        decide_losses(module.graph, LossMode("chunked"), "")
        called.extend(str(node.target) for node in module.graph.nodes if node.op.startswith("call"))
        return module

    torch._dynamo.reset()
    head = Head(loss_of=next_tokens)
    torch.compile(head, backend=backend, dynamic=True)(*batch())
    counted = called.index("optimum_memopt.labels_ignored.default")
    assert counted < min(at for at, name in enumerate(called) if "embedding" in name)


def labels_set(logits, labels):
    labels = labels.clone()
    labels[:, :3] = IGNORE
    return flat(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous())


def labels_filled(logits, labels):
    labels = labels.clone()
    shifted = labels[..., 1:]
    labels.masked_fill_(labels < CLASSES // 2, IGNORE)
    return flat(logits[..., :-1, :].contiguous(), shifted.contiguous())


@pytest.mark.parametrize("loss_of", [labels_set, labels_filled])
def test_labels_that_are_changed_in_place_are_counted_after_the_change(loss_of):
    plans, _ = check(Head(loss_of=loss_of))
    assert [plan.is_chunked for plan in plans] == [True]


def test_random_labels_are_drawn_in_their_turn():
    """Numbers drawn for labels come after those drawn for hidden states, as in plain PyTorch."""

    class Drawing(Head):
        def forward(self, ids, labels):
            hidden = functional.dropout(self.embedding(ids), 0.5)
            labels = torch.where(torch.rand(labels.shape) < 0.5, labels, IGNORE)
            return flat(self.projection(hidden), labels)

    head = Drawing()
    plain = copy.deepcopy(head)

    def backend(module, _):
        decide_losses(module.graph, LossMode("chunked"), "")
        module.recompile()
        return module

    torch._dynamo.reset()
    results = []
    for forward in (torch.compile(head, backend=backend, dynamic=True), plain):
        torch.manual_seed(0)
        results.append(forward(*batch()))
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)


def scaled_later(head, hidden):
    logits = head.projection(hidden)
    hidden.mul_(0.5)
    return logits


def clipped_later(head, hidden):
    logits = head.projection(hidden)
    functional.relu(hidden, inplace=True)
    return logits


@pytest.mark.parametrize("logits_of", [scaled_later, clipped_later])
def test_hidden_states_that_are_changed_after_the_projection(logits_of):
    class Scaling(Head):
        def forward(self, ids, labels):
            # The backward of a product by a number reads no result.
            return flat(self.logits_of(self, self.embedding(ids) * 2.0), labels)

    head = Scaling(logits_of=logits_of)
    head.projection.requires_grad_(False)
    assert check(head)[0] == ()


def test_a_metric_that_is_kept_in_a_buffer_is_not_removed():
    class Measured(Head):
        def __init__(self):
            super().__init__()
            self.register_buffer("slots", torch.zeros(2))

        def forward(self, ids, labels):
            logits = self.projection(torch.tanh(self.embedding(ids)))
            with torch.no_grad():
                self.slots[1] = flat(logits.detach(), labels)
            return logits.square().mean()

    head = Measured()
    check(head, "auto", batches=[batch()])
    assert head.slots[0] == 0 and head.slots[1] > 1


def test_double_precision():
    head = Head().double()
    assert check(head)[0][0].is_chunked


@pytest.mark.parametrize("frozen", ["projection.weight", "embedding.weight", "projection"])
def test_frozen_parameters(frozen):
    head = Head()
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    (plan,), _ = check(head)
    assert plan.is_chunked
    assert plan.shape.needs_weight == (frozen == "embedding.weight")
    assert plan.shape.needs_hidden == (frozen != "embedding.weight")


NOT_FOUND = {
    "its classes have weights": {"loss_of": lambda logits, labels: flat(logits, labels, weight=torch.ones(CLASSES))},
    "its labels are probabilities": {
        "loss_of": lambda logits, labels: functional.cross_entropy(logits, torch.softmax(logits.detach(), -1))
    },
    "it is not reduced to one number": {
        "loss_of": lambda logits, labels: flat(logits, labels, reduction="none").mean()
    },
    "relu comes between the projection and it": {"logits_of": lambda head, hidden: head.projection(hidden).relu()},
    "its logits are also read by logsumexp": {
        "loss_of": lambda logits, labels: flat(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()
    },
    "add comes between the projection and it": {
        "logits_of": lambda head, hidden: head.projection(hidden) + hidden.sum(-1, keepdim=True)
    },
    "more than one tensor is added to its logits": {
        "logits_of": lambda head, hidden: head.projection(hidden) + head.offset + head.shift
    },
    "a projection of fewer tokens is added to its logits": {
        "logits_of": lambda head, hidden: head.projection(hidden) + head.second(head.first(hidden[:, :1]))
    },
    "mul comes between the projection and it": {
        "logits_of": lambda head, hidden: head.projection(hidden) * head.shift
    },
}


@pytest.mark.parametrize("reason", NOT_FOUND)
def test_other_losses_stay_as_they_are(reason):
    plans, others = check(Head(**NOT_FOUND[reason]))
    assert not plans and others == [reason]


def test_logits_that_the_caller_gets_are_computed():
    """Logits that the caller gets are computed, and the reason names the reader."""

    class Returns(Head):
        def forward(self, ids, labels):
            logits = self.projection(torch.tanh(self.embedding(ids)))
            return flat(logits, labels), logits.detach()

    head, found = Returns(), []

    def backend(module, _):
        found.append(decide_losses(module.graph, LossMode(), "a callback")[0])
        return module

    torch._dynamo.reset()
    _, logits = torch.compile(head, backend=backend, dynamic=True)(*batch())
    assert logits.shape == (3, 11, CLASSES)
    ((plan,),) = found
    assert not plan.is_chunked and plan.reason == "a callback may read the logits"
    assert plan.pays


def test_modes():
    assert check(Head(), "plain")[0][0].reason == "--memory_opt_loss plain"
    few = (batch(1, 5), batch(1, 6))
    (plan,), _ = check(Head(), "auto", batches=few)
    assert not plan.is_chunked and "so few tokens" in plan.reason
    assert check(Head(), "chunked", batches=few)[0][0].is_chunked
    assert check(Head(), "auto")[0][0].is_chunked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_around_and_inside(dtype, inside):
    """Products are computed in autocast's dtype, around or inside the forward, with plain autocast's errors."""

    class Casts(Head):
        def forward(self, ids, labels):
            hidden = torch.tanh(self.embedding(ids))
            with torch.autocast("cpu", dtype, enabled=inside):
                return flat(self.projection(hidden), labels)

    head, found = Casts(), []
    exact = copy.deepcopy(head).double()

    def backend(module, _):
        found.extend(decide_losses(module.graph, LossMode("chunked"), "")[0])
        module.recompile()
        return module

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype, enabled=not inside):
        loss, gradients = step(head, torch.compile(head, backend=backend), *batch())
        expected, plain = step(head, head, *batch())
    assert found[0].shape.compute == (dtype if inside else torch.float32)
    truth = step(exact, lambda ids, labels: Head.forward(exact, ids, labels), *batch())[1]
    assert loss.dtype == expected.dtype
    for name, gradient in gradients.items():
        if gradient is not None:
            error, allowed = ((found - truth[name]).norm() for found in (gradient, plain[name]))
            assert gradient.dtype == plain[name].dtype and error <= 1.3 * allowed + 1e-5 * truth[name].norm(), name
