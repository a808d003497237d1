"""The chunked loss against torch's `linear` and `cross_entropy`, and its memory."""

import itertools

import pytest
import torch
from allocations import allocated
from torch._dynamo.utils import get_compilation_metrics
from torch.nn import functional

from optimum_memopt.engines.compile.loss import operator
from optimum_memopt.engines.compile.loss.operator import LossShape, chunked_loss, labels_ignored
from optimum_memopt.engines.compile.memory.inductor_programs import _StorageTracker
from tests.rotation import nightly

WIDTH, CLASSES = 16, 53
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6}


def inputs(rows=(3, 70), dtype=torch.float32, labelled=1.0, classes=CLASSES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((*rows, WIDTH), (classes, WIDTH), (classes,))
    )
    labels = torch.randint(0, classes, rows, generator=generator)
    labels[torch.rand(rows, generator=generator) >= labelled] = -100
    return hidden, weight, bias, labels


def chunked(hidden, weight, bias, labels, scale=1.0, softcap=0.0, mean=True, smoothing=0.0, ignore_index=-100, **more):
    tensors = (hidden, weight, bias, *more.get("adapter", (None, None)))
    needs = [tensor is not None and tensor.requires_grad for tensor in tensors]
    dtype = hidden.dtype
    settings = scale, softcap, ignore_index, mean, smoothing, dtype, dtype, needs
    return chunked_loss(*tensors, labels, labels_ignored(labels, ignore_index), *settings)[0]


def plain(hidden, weight, bias, labels, scale=1.0, softcap=0.0, mean=True, smoothing=0.0, ignore_index=-100):
    logits = functional.linear(hidden, weight, bias).flatten(0, -2) * scale
    if softcap:
        logits = torch.tanh(logits) * softcap
    how = {"ignore_index": ignore_index, "reduction": "mean" if mean else "sum", "label_smoothing": smoothing}
    return functional.cross_entropy(logits, labels.flatten(), **how)


def gradients(loss, *tensors):
    # The gradient of the loss is not 1.
    return torch.autograd.grad(
        3 * loss, [tensor for tensor in tensors if tensor is not None and tensor.requires_grad], retain_graph=True
    )


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


SETTINGS = list(itertools.product((0.0, 3.0), (True, False), (0.0, 0.1), (True, False), (1.0, 0.15)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("softcap", "mean", "smoothing", "has_bias", "labelled"), SETTINGS)
def test_loss_and_gradients_are_those_of_pytorch(dtype, softcap, mean, smoothing, has_bias, labelled):
    hidden, weight, bias, labels = inputs(dtype=dtype, labelled=labelled)
    tensors = (hidden, weight, bias if has_bias else None)
    settings = {"scale": 0.7, "softcap": softcap, "mean": mean, "smoothing": smoothing}
    found, expected = chunked(*tensors, labels, **settings), plain(*tensors, labels, **settings)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=0)
    for ours, theirs in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert ours.dtype == theirs.dtype and relative(ours, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_an_adapter_on_the_projection(dtype):
    """With LoRA on a frozen projection, no gradient of the projection is computed."""
    hidden, weight, bias, labels = inputs(dtype=dtype, labelled=0.6)
    weight.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    first, second = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((4, WIDTH), (CLASSES, 4))
    )
    tensors = (hidden, bias, first, second)
    found = chunked(hidden, weight, bias, labels, 0.7, 3.0, adapter=(0.5 * hidden @ first.T, second))
    merged = weight + 0.5 * second @ first
    expected = plain(hidden, merged, bias, labels, 0.7, 3.0)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=0)
    for ours, theirs in zip(gradients(found, *tensors), gradients(expected, *tensors), strict=True):
        assert relative(ours, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3, 5), (1, 301)])
@pytest.mark.parametrize("ignore_index", [-100, 0, 255])
def test_any_shape_and_any_ignored_label(rows, ignore_index):
    hidden, weight, bias, labels = inputs(rows, labelled=0.5)
    labels = labels.masked_fill(labels == -100, ignore_index)
    # At least one label counts, so that the mean exists.
    labels.view(-1)[0] = 3
    found = chunked(hidden, weight, bias, labels, ignore_index=ignore_index)
    expected = plain(hidden, weight, bias, labels, ignore_index=ignore_index)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=0)
    pairs = zip(gradients(found, hidden, weight), gradients(expected, hidden, weight), strict=True)
    assert all(relative(ours, theirs) < 3e-6 for ours, theirs in pairs)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("rows", [(2, 9), (2, 0)])
def test_no_label_at_all_is_what_torch_gives(mean, rows):
    hidden, weight, _, labels = inputs(rows, labelled=0.0)
    found, expected = chunked(hidden, weight, None, labels, mean=mean), plain(hidden, weight, None, labels, mean=mean)
    assert found.isnan() == expected.isnan() == mean and (mean or found == expected == 0)
    for share in (1.0, 1 / torch.zeros(())):
        # Infinity: transformers divides a sum by the number of labels.
        pairs = zip(gradients(found * share, hidden, weight), gradients(expected * share, hidden, weight), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_label_that_is_no_class_raises_as_in_torch(wrong):
    hidden, weight, bias, labels = inputs()
    labels[1, 3] = wrong
    with pytest.raises(IndexError, match="is out of bounds") as expected:
        plain(hidden, weight, bias, labels)
    with pytest.raises(IndexError) as found:
        chunked(hidden, weight, bias, labels)
    assert str(found.value) == str(expected.value)


def test_large_logits_are_finite_where_torch_is():
    hidden, weight, bias, labels = inputs()
    with torch.no_grad():
        hidden *= 1e4
    found, expected = chunked(hidden, weight, bias, labels), plain(hidden, weight, bias, labels)
    assert found.isfinite() and relative(found.detach(), expected.detach()) < 1e-5
    assert all(gradient.isfinite().all() for gradient in gradients(found, hidden, weight, bias))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "hidden weight"])
def test_what_is_frozen_gets_no_gradient_and_takes_no_memory(frozen):
    given = dict(zip(("hidden", "weight", "bias", "labels"), inputs(), strict=True))
    for name in frozen.split():
        given[name].requires_grad_(False)
    found, expected = chunked(**given), plain(**given)
    needed = [given[name] for name in ("hidden", "weight", "bias")]
    for ours, theirs in zip(gradients(found, *needed), gradients(expected, *needed), strict=True):
        assert relative(ours, theirs) < 3e-6
    found = chunked(**given)
    saved = [tensor.numel() for tensor in found.grad_fn.saved_tensors]
    assert [size > 0 for size in saved] == [*(tensor.requires_grad for tensor in needed), False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["low", "float32"])
def test_low_precision_is_no_worse_than_plain(dtype, parameters):
    hidden, weight, bias, labels = inputs((40, 50), classes=211)
    low = [tensor.detach().to(dtype) for tensor in (hidden, weight, bias)]
    reference = [tensor.double().requires_grad_() for tensor in low]
    exact = gradients(plain(*reference, labels, softcap=5.0), *reference)
    own = [tensor.to(dtype if parameters == "low" else torch.float32).requires_grad_() for tensor in low]
    scale = 2.0**14 if dtype == torch.float16 else 1.0
    with torch.autocast("cpu", dtype):
        expected = torch.autograd.grad(scale * plain(*own, labels, softcap=5.0), own)
    ignored = labels_ignored(labels, -100)
    loss = chunked_loss(
        *own, None, None, labels, ignored, 1.0, 5.0, -100, True, 0.0, dtype, torch.float32, [True] * 3 + [False] * 2
    )[0]
    for ours, theirs, truth in zip(torch.autograd.grad(scale * loss, own), expected, exact, strict=True):
        assert relative(ours / scale, truth) <= 1.05 * relative(theirs / scale, truth) + 1e-6


@pytest.mark.parametrize(
    ("weight_dtype", "dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("classes", [300, 2000])
def test_its_tensors_take_no_more_than_its_workspace(weight_dtype, dtype, softcap, classes):
    """With labels in all rows, the tensors take nearly the bound, which a prediction adds to the outputs."""
    hidden, weight, _, labels = inputs((8, 100), torch.float32, classes=classes)
    hidden, weight = (tensor.detach().to(weight_dtype) for tensor in (hidden, weight))
    needs = [True, True, False, False, False]
    settings = labels_ignored(labels, -100), 1.0, softcap, -100, True, 0.0, dtype, torch.float32, needs
    shape = LossShape(800, WIDTH, classes, weight_dtype, weight_dtype, dtype, bool(softcap))
    assert 1 < shape.rows_per_chunk < 800
    tracker = _StorageTracker(torch.device("cpu"))
    for tensor in (hidden, weight, labels):
        tracker.add(tensor, object(), 0)
    with tracker:
        # A mode sees the operator's inner calls only if the operator itself is not dispatched.
        outputs = chunked_loss._init_fn(hidden, weight, None, None, None, labels, *settings)
    held: dict[object, int] = {}
    peak = 0
    for key, size in tracker.log:
        held[key] = size
        peak = max(peak, sum(held.values()))
    used = peak - sum(output.nbytes for output in outputs)
    assert 0.95 * shape.workspace <= used <= shape.workspace + 512
    if dtype == torch.float32:
        peak, left, _ = allocated(lambda: chunked_loss(hidden, weight, None, None, None, labels, *settings))
        assert 0.95 * shape.workspace <= peak - left <= shape.workspace + 512


@pytest.mark.parametrize(
    ("rows", "hidden", "classes", "expected"),
    [(8192, 768, 50265, 768), (8, 768, 50265, 8), (65536, 1024, 8192, 8192), (100, 16, 10**6, 16), (0, 16, 97, 0)],
)
def test_rows_per_chunk(rows, hidden, classes, expected):
    shape = LossShape(rows, hidden, classes, *[torch.float32] * 3)
    assert shape.rows_per_chunk == expected


def test_chunks_add_up(monkeypatch):
    given = inputs()
    expected = chunked(*given)
    asked = []
    monkeypatch.setattr(LossShape, "rows_per_chunk", property(lambda shape: asked.append(shape.rows) or 7))
    found = chunked(*given)
    assert asked == [210]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients(found, *given[:3]), gradients(expected, *given[:3]), strict=True):
        assert relative(ours, theirs) < 3e-6


@pytest.fixture
def fused(monkeypatch):
    """Compute chunks as on CUDA, with inductor's code for a CPU."""
    monkeypatch.setattr(operator, "is_fused", lambda on_cuda: True)


# 53 classes are padded to 56 in half precision.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("softcap", "mean", "smoothing", "has_bias", "labelled"),
    nightly([(0.0, True, 0.0, False, 1.0), (3.0, False, 0.1, True, 0.15), (0.0, False, 0.1, True, 1.0)], but=[3.0]),
)
def test_fused_chunks_are_no_worse_than_plain(fused, dtype, softcap, mean, smoothing, has_bias, labelled):
    given = inputs(dtype=dtype, labelled=labelled)
    hidden, weight, bias, labels = (*given[:2], given[2] if has_bias else None, given[3])
    tensors = hidden, weight, bias
    how = {"softcap": softcap, "mean": mean, "smoothing": smoothing, "scale": 0.7}
    doubles = [tensor if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
    exact_loss, own_loss, loss = (
        plain(*doubles, labels, **how),
        plain(*tensors, labels, **how),
        chunked(*tensors, labels, **how),
    )
    assert relative(loss.detach(), exact_loss.detach()) <= 2 * relative(own_loss.detach(), exact_loss.detach()) + 1e-6
    exact, expected, found = gradients(exact_loss, *doubles), gradients(own_loss, *tensors), gradients(loss, *tensors)
    for ours, theirs, truth in zip(found, expected, exact, strict=True):
        assert relative(ours, truth) <= 1.5 * relative(theirs, truth) + 1e-6


def test_fused_chunks_of_an_adapter(fused):
    """Like `test_an_adapter_on_the_projection`, with padded classes."""
    hidden, weight, _, labels = inputs(dtype=torch.bfloat16)
    down, up = (torch.randn(size, dtype=torch.bfloat16) for size in ((4, WIDTH), (CLASSES, 4)))
    adapter = (hidden.detach() @ down.t()).requires_grad_(), up.requires_grad_()
    tensors = hidden, weight, None, *adapter
    doubles = [tensor if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
    logits = doubles[0] @ doubles[1].t() + doubles[3] @ doubles[4].t()
    expected = gradients(functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), *doubles)
    found = gradients(chunked(hidden, weight, None, labels, adapter=adapter), *tensors)
    for ours, truth in zip(found, expected, strict=True):
        assert relative(ours, truth) < 0.02


def test_fused_chunks_are_compiled_once(fused):
    """One compilation serves any number of rows, wherever the operator is called."""
    compiled = []
    for rows in (5, 2, 7, 1, 3):
        hidden, weight, _, labels = inputs((rows, 3), dtype=torch.float32, classes=101)
        expected = plain(hidden, weight, None, labels)
        with torch._C._AutoDispatchBelowAutograd() if rows == 7 else torch.set_grad_enabled(rows != 3):
            found = chunked(hidden, weight, None, labels)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, check_stride=False)
        compiled.append(len(get_compilation_metrics()))
    assert len(set(compiled)) == 1
