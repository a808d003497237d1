"""Under a Trainer, outputs other than the loss are left out of the graph only if nothing reads them: any code that
adds to the loss, at any time, trains bitwise as with a stock Trainer."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from transformers import PretrainedConfig, Trainer, TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput

from optimum_memopt import MemOptError, attach
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.loss.decide import refusing_gradients
from optimum_memopt.engines.compile.train.engine import CompileEngine
from tests.compiled import recorded
from tests.gradients import Batch, Sink, assert_bitwise_same_step
from tests.model_zoo import VOCABULARY, ZOO
from tests.rotation import in_turn, nightly
from tests.trainer_runs import log_lines, make, weights

NAME = "roberta-classification"
OPTIONS = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.config = PretrainedConfig()  # read by label smoothing
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.classifier = torch.nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.classifier(torch.tanh(self.embedding(input_ids)).mean(1))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def of_logits(outputs):
    return 0.1 * outputs["logits"].square().sum()


class ReadsLogits(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + of_logits(outputs)
        return (loss, outputs) if return_outputs else loss


class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        outputs = model(**self._prepare_inputs(inputs))
        loss = outputs.loss + of_logits(outputs)
        self.accelerator.backward(loss)
        return loss.detach()


class AsksForOutputs(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss, outputs = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        loss = loss + of_logits(outputs)
        self.accelerator.backward(loss)
        return loss.detach()


def assign_compute_loss(trainer):
    inner = trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False, **kwargs):
        loss, outputs = inner(model, inputs, return_outputs=True, **kwargs)
        return loss + of_logits(outputs)

    trainer.compute_loss = compute_loss


def assign_loss_function(trainer):
    trainer.compute_loss_func = lambda outputs, labels, **_: of_logits(outputs)


def _add(module, inputs, outputs):
    outputs.loss = outputs.loss + of_logits(outputs)
    return outputs


def hook_model(trainer):
    trainer.model.register_forward_hook(_add)


def hook_all_modules(trainer):
    def add(module, inputs, outputs):
        return _add(module, inputs, outputs) if isinstance(module, Classifier) else outputs

    weakref.finalize(trainer.model, torch.nn.modules.module.register_module_forward_hook(add).remove)


def wrap_forward(trainer):
    inner = trainer.model.forward

    @functools.wraps(inner)  # the Trainer reads its signature
    def forward(*args, **kwargs):
        return _add(None, None, inner(*args, **kwargs))

    trainer.model.forward = forward


class InTraining(TrainerCallback):
    def __init__(self, change, trainer):
        self.change, self.trainer = change, trainer

    def on_train_begin(self, *args, **kwargs):
        self.change(self.trainer)


CHANGES = (assign_compute_loss, assign_loss_function, hook_model, hook_all_modules, wrap_forward)
CASES = [
    *((kind, None, "before", {}) for kind in (ReadsLogits, OwnStep, AsksForOutputs)),
    *((Trainer, change, when, {}) for change in CHANGES for when in ("before", "in training")),
    (Trainer, assign_compute_loss, "after", {}),
    (Trainer, None, "before", {"label_smoothing_factor": 0.1}),
]
# Additions in the Trainer's loss, in a custom step, and in hooks.
FAST = {
    ("OwnStep", None, "before"),
    ("Trainer", "assign_compute_loss", "in training"),
    ("Trainer", "hook_all_modules", "in training"),
}


def is_fast(kind, change, when, arguments):
    return (kind.__name__, getattr(change, "__name__", None), when) in FAST and not arguments


def trained(folder, with_engine, kind=Trainer, change=None, when="before", **arguments):
    trainer = make(folder, NAME, True, kind, model=Classifier(), max_steps=2, **arguments)
    if change is not None and when == "before":
        change(trainer)
    if with_engine:
        attach(trainer, **OPTIONS)
    if change is not None and when == "after":
        change(trainer)
    if when == "in training":
        trainer.add_callback(InTraining(change, trainer))
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("kind", "change", "when", "arguments"),
    nightly(CASES, but=[case for case in CASES if is_fast(*case)]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_loss_of_other_outputs_trains_as_without_an_engine(tmp_path, kind, change, when, arguments):
    found = []
    for with_engine in (False, True):
        trainer = trained(tmp_path, with_engine, kind, change, when, **arguments)
        found.append(weights(trainer.model))
        assert not with_engine or trainer.memopt.table is not None
        del trainer
        gc.collect()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def gradients_taken(split):
    """Returns the number of forward outputs whose gradients the backward graph takes."""
    return sum("tangents" in node.name for node in split.backward.graph.find_nodes(op="placeholder"))


@pytest.mark.parametrize("arguments", nightly([{}, {"bf16": True}], but=[{}]), ids=str)
def test_a_stock_trainer_with_observers_goes_back_from_the_loss_alone(tmp_path, arguments):
    trainer = make(tmp_path, NAME, True, model=Classifier(), max_steps=2, **arguments)
    attach(trainer, **OPTIONS, log_memory_phases=True, log_input_density=True)
    with recorded() as splits:
        trainer.train()
    assert [gradients_taken(split) for split in splits] == [1]


class OnOddSteps(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step % 2:
            self.handle = model.register_forward_hook(_add)

    def on_step_end(self, args, state, control, **kwargs):
        # The step count has increased since on_step_begin.
        if state.global_step % 2 == 0:
            self.handle.remove()


@in_turn
def test_both_forwards_are_kept_while_a_hook_comes_and_goes(tmp_path):
    found = []
    with recorded() as splits, log_lines() as lines:
        for with_engine in (False, True):
            trainer = make(tmp_path, NAME, True, model=Classifier(), max_steps=6, callbacks=[OnOddSteps()])
            if with_engine:
                attach(trainer, **OPTIONS)
            trainer.train()
            found.append(weights(trainer.model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    # The second forward was traced without the logits' gradient, until the hook added to the loss.
    assert [gradients_taken(split) for split in splits] == [1, 2, 2]
    assert sum("compiling another training graph" in line for line in lines) == 2


CLASSES = 999


def attached(model: torch.nn.Module, loss_only: bool) -> CompileEngine:
    # Only the loss-only model gets batches of several sizes.
    engine = CompileEngine(Selection(level=1), compiler="aot_eager", dynamic=loss_only, loss="plain")
    engine.outputs_read_by = lambda: "" if loss_only else "a test"
    engine.attach(model)
    return engine


@pytest.mark.parametrize(
    ("name", "return_dict"),
    nightly([("roberta-mlm", True), ("roberta-mlm", False), ("gpt2", True)], but=[("gpt2", True)]),
)
def test_the_same_step_in_the_same_memory(name, return_dict):
    case = ZOO[name]
    model = case.build("eager", **case.one_layer)
    model.resize_token_embeddings(CLASSES)
    model.config.return_dict = return_dict
    # With key-value caches PyTorch adds some gradients in a different order.
    model.config.use_cache = False
    plain, all_outputs = copy.deepcopy(model), copy.deepcopy(model)
    with_all, alone = attached(all_outputs, False), attached(model, True)
    batch: Batch = case.batch(4, 12)

    outputs = model(**batch)
    if return_dict:
        assert type(outputs) is type(plain(**batch))
    loss, logits = outputs[:2]
    assert loss.requires_grad and logits.grad_fn is None
    with pytest.raises(MemOptError, match="to the model's output '(logits|1)'.*compute_loss_func"):
        (loss + logits.square().sum()).backward()
    assert all_outputs(**batch)[1].requires_grad
    # The first model's logits have had no gradient so far.
    peaks = [engine.predictor.footprint().activations for engine in (with_all, alone)]
    assert peaks[0] == peaks[1]
    if return_dict:
        assert_bitwise_same_step(model, plain, batch, case.batch(3, 7, seed=1))


def test_outputs_that_pass_through_a_wrapper_unread_are_no_gradient():
    weight = torch.ones(3, requires_grad=True)
    outputs = refusing_gradients({"loss": (2 * weight).sum(), "logits": torch.ones(2, 3)})
    loss, _ = Sink.apply(outputs["loss"], outputs["logits"])
    loss.backward()
    assert weight.grad.tolist() == [2, 2, 2]
    with pytest.raises(MemOptError, match="a gradient flowed back to the model's output 'logits'"):
        Sink.apply(outputs["logits"])[0].sum().backward()
