"""The operator that replaces TRL's language-model head."""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from optimum_memopt.engines.simulator.workspaces import operator_workspace
from optimum_memopt.engines.torch_compat import fused_lm_head, kernels
from optimum_memopt.engines.torch_compat.fused_lm_head import LabelLogProbs, label_log_probs

trl_kernels = pytest.importorskip("trl.kernels.chunked_logprob")
TOKENS, UNITS, WORDS = 37, 16, 50
ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def leaves(dtype: torch.dtype = torch.float32, tokens: int = TOKENS, words: int = WORDS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((tokens, UNITS), (words, UNITS), (words,))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def labels(tokens: int = TOKENS) -> torch.Tensor:
    found = torch.randint(0, WORDS, (tokens,))
    found[::3] = -100
    return found


Step = Callable[..., tuple[torch.Tensor | None, ...]]


def results(step: Step, given: list[Any], targets: torch.Tensor, numbers: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Yields the step's results, and the gradients of the inputs that require one."""
    log_probs, entropy, *others = step(*given, targets, *numbers)
    loss = (log_probs * torch.arange(len(log_probs))).sum()
    if entropy is not None:
        loss = loss + 0.3 * entropy.sum()
    wanted = [each for each in given if each is not None and each.requires_grad]
    yield from (each.detach() for each in (log_probs, entropy, *others) if each is not None)
    yield from torch.autograd.grad(loss, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("outputs", [(), ("entropy", "is_top1"), ALL])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_it_is_trl_s_function(
    dtype: torch.dtype, softcap: float | None, outputs: tuple[str, ...], is_autocast: bool
) -> None:
    torch.compiler.reset()
    numbers = (0.7, 32, softcap, 1.5, outputs)
    function = trl_kernels.ChunkedLogProbFunction
    stand_in = torch.compile(LabelLogProbs(function).apply, backend="aot_eager", fullgraph=True)
    targets = labels().clamp(min=0)
    hidden, weight, bias = leaves(dtype)
    for given in ([hidden, weight, bias], [hidden, weight.detach(), None]):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            found, expected = (list(results(step, given, targets, numbers)) for step in (stand_in, function.apply))
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("has_labels", [True, False])
def test_tokens_without_a_label_are_left_out_where_trl_does_so(
    has_labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, numbers = labels(), (1.0, 32, None, 1.0, "entropy", None)
    if not has_labels:
        targets.fill_(-100)

    def step(*given: Any) -> tuple[torch.Tensor, ...]:
        log_probs, _, entropy, *others = label_log_probs(*given)
        has_label = targets >= 0
        return torch.where(has_label, log_probs, 0), torch.where(has_label, entropy, 0), *others

    expected = list(results(step, leaves(), targets, numbers))
    monkeypatch.setattr(fused_lm_head, "_scored", lambda labels: labels >= 0)
    found = list(results(step, leaves(), targets, numbers))
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)


def test_the_labels_of_a_traced_graph_are_not_clamped() -> None:
    seen = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        fused_lm_head.with_labels(module)
        seen.append(module.code)
        return module

    apply = LabelLogProbs(trl_kernels.ChunkedLogProbFunction).apply

    def forward(hidden: torch.Tensor, weight: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return apply(hidden, weight, None, given.clamp(min=0).reshape(-1), 1.0, 32, None, 1.0, ())[0]

    hidden, weight, _ = leaves()
    torch.compile(forward, backend=backend, fullgraph=True)(hidden, weight, labels()[None])
    (code,) = seen
    assert re.search(r"label_log_probs.*\(.*, reshape_1, 1.0, 32", code)


# Soft caps are tested in float32 only: in other dtypes Python may hold a float32 copy during the cap.
@pytest.mark.parametrize(
    ("dtype", "softcap"), [(torch.float32, None), (torch.float32, 3.0), (torch.float64, None)], ids=str
)
@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize("tokens", [300, 5000])
def test_its_memory(dtype: torch.dtype, softcap: float | None, has_entropy: bool, tokens: int) -> None:
    """The predicted workspaces of both operators match torch's allocator."""
    words, chunk = 900, 512
    hidden, weight, _ = (each.detach() for each in leaves(dtype, tokens, words))
    targets, outputs = labels(tokens).clamp(min=0), "entropy" if has_entropy else ""
    given = (hidden, weight, None, targets, 1.0, chunk, softcap, 1.0, outputs, None)
    forward, backward = torch.ops.optimum_memopt.label_log_probs, torch.ops.optimum_memopt.label_log_probs_backward
    _, log_z, entropy, *_ = label_log_probs(*given)
    gradient = torch.ones(tokens)
    of_entropy = gradient if has_entropy else None
    saved = (hidden, weight, None, targets, log_z, entropy if has_entropy else log_z)
    back = (gradient, of_entropy, *saved, 1.0, chunk, softcap, 1.0, None, [True, True, False])
    for operator, arguments in ((forward, given), (backward, back)):
        held = list(itertools.accumulate(kernels.cpu_allocations(lambda: operator(*arguments)), initial=0))  # noqa: B023
        workspace = int(operator_workspace(operator.default, arguments, None, None))
        assert workspace == pytest.approx(max(held) - held[-1], rel=0.05)
