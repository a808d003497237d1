from collections.abc import Sequence

import torch

Batch = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor | None]

TOLERANCE = 1e-5
# Some gradients are mathematically zero (softmax is invariant to an attention key's bias) and rounding noise in
# floating point, where a relative error means nothing. So a gradient counts as at least this fraction of the model's
# mean gradient: errors below 1e-7 of that mean pass. The noise reaches 2e-8 of it; the smallest nonzero gradients in
# the tests' models have 2e-4 to 5e-3 of it, so that an error of 0.05% shows even there.
FLOOR = 1e-2


def accumulate(model: torch.nn.Module, batches: Sequence[Batch]) -> tuple[torch.Tensor, Gradients]:
    """Returns the losses and summed gradients of the batches, as copies that later steps do not change."""
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return torch.stack(losses), {name: grad if grad is None else grad.clone() for name, grad in gradients.items()}


def wrong_gradients(ours: Gradients, expected: Gradients, tolerance: float = TOLERANCE) -> dict[str, float | None]:
    """Returns the relative error by parameter; None if only one of the two has a gradient."""
    present = [gradient for gradient in expected.values() if gradient is not None]
    mean = (sum(g.square().sum() for g in present) / sum(g.numel() for g in present)).sqrt()
    wrong: dict[str, float | None] = {}
    for name, reference in expected.items():
        if (ours[name] is None) != (reference is None):
            wrong[name] = None
        elif reference is not None:
            scale = max(reference.norm(), FLOOR * mean * reference.numel() ** 0.5)
            error = float((ours[name] - reference).norm() / scale)
            if not error <= tolerance:
                wrong[name] = error
    return wrong


def assert_same_step(
    ours: torch.nn.Module, plain: torch.nn.Module, *batches: Batch, tolerance: float = TOLERANCE
) -> None:
    """Assert that both models have the same losses and gradients after one accumulated step over the batches."""
    torch.manual_seed(0)
    found = accumulate(ours, batches)
    torch.manual_seed(0)
    assert_same(found, accumulate(plain, batches), tolerance)


def assert_same(
    ours: tuple[torch.Tensor, Gradients], expected: tuple[torch.Tensor, Gradients], tolerance: float = TOLERANCE
) -> None:
    """Assert that losses and gradients are equal except for rounding."""
    torch.testing.assert_close(ours[0], expected[0], rtol=tolerance, atol=0)
    assert wrong_gradients(ours[1], expected[1], tolerance) == {}


def assert_bitwise_same_step(ours: torch.nn.Module, plain: torch.nn.Module, *batches: Batch) -> None:
    """Assert that both models have bitwise equal losses and gradients after one accumulated step over the batches, and
    leave torch's generator in the same state."""
    torch.manual_seed(0)
    found = accumulate(ours, batches)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert_bitwise_same(found, accumulate(plain, batches))
    assert torch.equal(torch.get_rng_state(), state)


def assert_bitwise_same(ours: tuple[torch.Tensor, Gradients], expected: tuple[torch.Tensor, Gradients]) -> None:
    """Assert that losses and gradients are bitwise equal."""
    (our_losses, our_gradients), (losses, gradients) = ours, expected
    assert torch.equal(our_losses, losses)
    assert our_gradients.keys() == gradients.keys()
    assert [name for name, gradient in gradients.items() if not _equal(our_gradients[name], gradient)] == []


def _equal(ours: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    return ours is expected if ours is None or expected is None else torch.equal(ours, expected)


class Sink(torch.autograd.Function):
    """Wraps outputs like DistributedDataParallel: a gradient that was not computed stays None, and the backward of
    that output still runs."""

    @staticmethod
    def forward(ctx, *outputs):
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients
