"""Trainer's behaviour in many scenarios: with an engine it logs, saves, calls callbacks and trains the same."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    EarlyStoppingCallback,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_outputs import TokenClassifierOutput

from tests.rotation import nightly
from tests.train.trainers.harness import ORT_TOLERANCE, Memopt, Outcome, arguments, assert_equal, outcome, run

IGNORE = -100


class TaggerConfig(PreTrainedConfig):
    model_type = "tagger"

    def __init__(self, returns: str = "output", **kwargs: Any) -> None:
        self.returns, self.vocab_size, self.num_labels_, self.hidden_size = returns, 11, 5, 8
        super().__init__(**kwargs)


class Tagger(PreTrainedModel):
    """Predicts a label per token without context; the config sets the type of its outputs."""

    config_class = TaggerConfig

    def __init__(self, config: TaggerConfig) -> None:
        super().__init__(config)
        self.embeddings = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.inner = torch.nn.Linear(config.hidden_size, 16)
        self.head = torch.nn.Linear(16, config.num_labels_)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.5)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.nn.functional.gelu(self.inner(self.embeddings(input_ids))))
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        if self.config.returns == "tuple":
            return (logits,) if loss is None else (loss, logits)
        if self.config.returns == "dict":
            return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}
        return TokenClassifierOutput(loss=loss, logits=logits)


class CountingTagger(Tagger):
    """Divides the loss by the number of items in the global batch, as transformers' models do."""

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **kwargs):
        logits = super().forward(input_ids).logits
        loss = None
        if labels is not None:
            mean = num_items_in_batch is None
            reduction = {"reduction": "mean" if mean else "sum", "ignore_index": IGNORE}
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **reduction)
            loss = loss if mean else loss / num_items_in_batch
        return TokenClassifierOutput(loss=loss, logits=logits)


def tagged(count: int, seed: int = 0, **columns: Any) -> list[dict[str, Any]]:
    """Returns rows of three to seven tokens whose labels are functions of the tokens."""
    source = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        ids = torch.randint(1, 11, (3 + index % 5,), generator=source)
        rows.append({"input_ids": ids, "labels": ids % 5, **columns})
    return rows


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    fill = {"input_ids": 0, "labels": IGNORE}
    pad = torch.nn.utils.rnn.pad_sequence
    return {key: pad([row[key] for row in examples], True, value) for key, value in fill.items()}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from tagged(30)


class Recorder(TrainerCallback):
    """Records the events in order, with the step and the control's flags."""

    def __init__(self) -> None:
        self.events: list[tuple] = []


def _recording(event: str) -> Callable[..., None]:
    def record(self, args, state, control, **kwargs):
        asked = tuple(name for name, value in sorted(vars(control).items()) if value is True)
        self.events.append((event, state.global_step, asked))

    return record


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Recorder, _event, _recording(_event))


class StopAfter(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step == 1
        control.should_log = True
        control.should_training_stop = state.global_step == 3


class OutOfMemoryOnce(TrainerCallback):
    """Raises the error that `auto_find_batch_size` catches, at the first batch size."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.train_batch_size > 7:
            raise RuntimeError("CUDA out of memory.")


def accuracy(prediction: Any) -> dict[str, float]:
    valid = prediction.label_ids != IGNORE
    extra = {} if prediction.inputs is None else {"inputs": float(prediction.inputs.sum())}
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids)[valid].mean()), **extra}


class Running:
    """`compute_metrics` for `batch_eval_metrics`, called for each batch."""

    def __init__(self) -> None:
        self.correct = self.total = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        valid = prediction.label_ids != IGNORE
        self.correct += int((prediction.predictions.argmax(-1) == prediction.label_ids)[valid].sum())
        self.total += int(valid.sum())
        return {"accuracy": self.correct / self.total} if compute_result else {}


def squared(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return (loss + outputs.logits.square().sum()) / num_items_in_batch


def sgd(model: torch.nn.Module) -> tuple:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def train(trainer: Trainer) -> Any:
    return trainer.train().metrics


def twice(trainer: Trainer) -> Any:
    return [train(trainer), train(trainer)]


def around(trainer: Trainer) -> Any:
    found = [trainer.evaluate(), train(trainer), trainer.evaluate()]
    return [*found, trainer.evaluate(tagged(5, seed=9), metric_key_prefix="more")]


def predict(trainer: Trainer) -> Any:
    train(trainer)
    done = trainer.predict(tagged(7, seed=4))
    return [done.predictions, done.label_ids, done.metrics]


def save(trainer: Trainer) -> Any:
    metrics = train(trainer)
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"loss": metrics["train_loss"]})
    again = type(trainer.model).from_pretrained(trainer.args.output_dir)
    return [parameter.sum().item() for parameter in again.parameters()]


def resume(trainer: Trainer) -> Any:
    """Train, resume from the middle in the same Trainer, and check that both runs end with the same weights."""
    train(trainer)
    end = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-3")
    for resumed, uninterrupted in zip(trainer.model.parameters(), end, strict=True):
        torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=1e-7)
    return trainer.state.global_step


@dataclass(frozen=True)
class Scenario:
    """Arguments of TrainingArguments and Trainer (from functions, since each run needs its own), and what to run."""

    arguments: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Callable[[], Any]] = field(default_factory=dict)
    act: Callable[[Trainer], Any] = train
    model: Callable[[], torch.nn.Module] = lambda: Tagger(TaggerConfig())
    optimizers: Callable[[torch.nn.Module], tuple] | None = None
    # Why ONNX Runtime refuses the scenario; empty if it can run it.
    no_ort: str = ""


THREE = {"gradient_accumulation_steps": 3, "max_steps": 3}
EVERY_2 = {"eval_strategy": "steps", "eval_steps": 2}
PAIRS = {"eval_accumulation_steps": 1, "per_device_eval_batch_size": 2}
BEST = {"save_strategy": "best", "metric_for_best_model": "loss"}
SAVED_2 = {**EVERY_2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}
EVERY = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}
THIRDS = {"save_strategy": "steps", "save_steps": 3}
ACCURACY = {"compute_metrics": lambda: accuracy}
SCENARIOS = {
    "logging": Scenario({"logging_steps": 1, "logging_first_step": True}),
    "logging-epochs": Scenario({"max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch"}),
    "accumulation": Scenario({**THREE, "logging_steps": 1}),
    "accumulation-counted": Scenario(THREE, model=lambda: CountingTagger(TaggerConfig())),
    "eval-steps": Scenario({**EVERY_2, "eval_on_start": True}, ACCURACY),
    "eval-epochs": Scenario({"eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2, "eval_delay": 1}),
    "eval-inputs": Scenario({**EVERY_2, "include_for_metrics": ["inputs"]}, ACCURACY),
    "eval-batches": Scenario({**EVERY_2, "batch_eval_metrics": True}, {"compute_metrics": Running}),
    "eval-accumulation": Scenario({**EVERY_2, **PAIRS}, ACCURACY),
    "eval-several": Scenario(EVERY_2, {"eval_dataset": lambda: {"a": tagged(4, seed=1), "b": tagged(3, seed=2)}}),
    "eval-loss-only": Scenario({**EVERY_2, "prediction_loss_only": True}),
    "best-model": Scenario({**SAVED_2, "metric_for_best_model": "accuracy", "learning_rate": 0.5}, ACCURACY),
    "save-best": Scenario({**EVERY_2, **BEST, "save_only_model": True}),
    "early-stopping": Scenario(
        {**EVERY, "load_best_model_at_end": True, "learning_rate": 3.0, "max_steps": 12},
        {"callbacks": lambda: [EarlyStoppingCallback(1)]},
    ),
    "plateau": Scenario({**EVERY_2, **PLATEAU, "learning_rate": 2.0}),
    "resume": Scenario(THIRDS, act=resume),
    "resume-accumulation": Scenario({**THIRDS, "gradient_accumulation_steps": 2}, act=resume),
    "save": Scenario(act=save),
    "predict": Scenario({}, ACCURACY, act=predict),
    "evaluate-around": Scenario(act=around),
    "train-twice": Scenario(act=twice),
    "model-init": Scenario({}, {"model_init": lambda: lambda: Tagger(TaggerConfig())}, act=twice),
    "tuple": Scenario(EVERY_2, model=lambda: Tagger(TaggerConfig(returns="tuple"))),
    "dict": Scenario(EVERY_2, model=lambda: Tagger(TaggerConfig(returns="dict"))),
    "label-smoothing": Scenario({"label_smoothing_factor": 0.1, **EVERY_2}),
    "own-loss": Scenario({"gradient_accumulation_steps": 2}, {"compute_loss_func": lambda: squared}),
    "neftune": Scenario({"neftune_noise_alpha": 5.0}, no_ort="its noise has no export"),
    "optimizer-class": Scenario(
        {}, {"optimizer_cls_and_kwargs": lambda: (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3})}
    ),
    "own-optimizer": Scenario({"logging_steps": 1}, optimizers=sgd),
    "schedule": Scenario({"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "logging_steps": 1}),
    "adafactor": Scenario({"optim": "adafactor", "max_grad_norm": 0.1}),
    "unused-columns": Scenario({"remove_unused_columns": False}, {"train_dataset": lambda: tagged(18, name="text")}),
    "iterable": Scenario({}, {"train_dataset": Stream}),
    "by-length": Scenario({"train_sampling_strategy": "group_by_length"}),
    "per-row": Scenario({"per_device_train_batch_size": 1, "max_steps": 8, "average_tokens_across_devices": False}),
    "drop-last": Scenario({"dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 2}),
    "stopped": Scenario({}, {"callbacks": lambda: [StopAfter()]}),
    "find-batch-size": Scenario(
        {"auto_find_batch_size": True, "per_device_train_batch_size": 8}, {"callbacks": lambda: [OutOfMemoryOnce()]}
    ),
    "empty-cache": Scenario({"torch_empty_cache_steps": 2}),
    "memory-metrics": Scenario({"skip_memory_metrics": False}),
    "tokens-seen": Scenario({"include_num_input_tokens_seen": "all", "logging_steps": 1}),
    "bf16": Scenario({"bf16": True, **EVERY_2}, no_ort="no bf16 on the CPU"),
    "bf16-eval": Scenario({"bf16_full_eval": True}, act=around, no_ort="no bf16 on the CPU"),
}


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def comparable(result: Any) -> Any:
    """Remove times and measured memory from dictionaries; other values are unchanged."""
    if isinstance(result, dict):
        drop = re.compile("_runtime|_per_second|_preparation_time|mem_")
        return {key: value for key, value in result.items() if not drop.search(key)}
    return [comparable(part) for part in result] if isinstance(result, list) else result


def script(scenario: Scenario) -> Callable[[Path, Memopt], Outcome]:
    def act(folder: Path, memopt: Memopt) -> Outcome:
        recorder = Recorder()
        made = {name: make() for name, make in scenario.trainer.items()}
        own = {"train_dataset": tagged(18), "eval_dataset": tagged(6, seed=1), "data_collator": collate} | made
        if "model_init" not in own:
            own["model"] = scenario.model()
            if scenario.optimizers is not None:
                own["optimizers"] = scenario.optimizers(own["model"])
        trainer = Trainer(args=arguments(TrainingArguments, folder, **scenario.arguments), **own)
        trainer.add_callback(recorder)
        memopt.attach(trainer)
        result = comparable(scenario.act(trainer))
        done = outcome(trainer, files=written(folder), events=recorder.events)
        done.logs = comparable(done.logs)
        done.extra["result"] = result
        return done

    return act


# One scenario for each part of Trainer: its loss, evaluation, checkpoints, callbacks, precision.
COMPILED = ["accumulation-counted", "best-model", "bf16", "evaluate-around", "find-batch-size", "label-smoothing"]
COMPILED += ["model-init", "own-loss", "own-optimizer", "resume-accumulation", "save"]


# "memory-metrics" is nightly: its tracemalloc makes compilation several times slower.
@pytest.mark.parametrize("name", nightly(SCENARIOS, but=COMPILED))
def test_compiled_as_stock(name, stock, tmp_path):
    done = script(SCENARIOS[name])
    assert_equal(run(done, tmp_path, "compile", memory_opt_level=0), stock(name, done))


# Trainer's part of a scenario is the same for both engines; these scenarios could break in an ONNX Runtime session.
ON_ORT = ["accumulation-counted", "best-model", "dict", "find-batch-size", "label-smoothing", "own-loss"]
ON_ORT += ["predict", "resume-accumulation"]


@pytest.mark.parametrize(
    "name", nightly([name for name, scenario in SCENARIOS.items() if not scenario.no_ort], but=ON_ORT)
)
def test_on_onnx_runtime_as_stock(name, stock, tmp_path):
    done = script(SCENARIOS[name])
    assert_equal(run(done, tmp_path, "ort", memory_opt_level=0), stock(name, done), ORT_TOLERANCE)


@pytest.mark.parametrize("engine", ["compile", "ort"])
def test_accumulated_batches_are_the_large_batch(engine, tmp_path):
    """Accumulated micro-batches equal the large batch: with rows of unequal length, only a loss divided by the global
    number of items is right."""
    model = {"model": lambda: CountingTagger(TaggerConfig())}
    steps = {"max_steps": 2, "max_grad_norm": 0.0}
    small = Scenario({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, **steps}, **model)
    large = Scenario({"per_device_train_batch_size": 6, **steps}, **model)
    ours, expected = (run(script(one), tmp_path, engine, memory_opt_level=0) for one in (small, large))
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(ours.weights[name], tensor, rtol=1e-4, atol=1e-5)
