import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import optimum_memopt
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.compat.installation import missing
from optimum_memopt.plans.grammar import parse
from tests.gradients import TOLERANCE, accumulate, wrong_gradients
from tests.model_zoo import ZOO

if TYPE_CHECKING:
    from optimum_memopt.engines.ort.engine import OrtEngine

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"

ROBERTA = ZOO["roberta-classification"]
MLM = ZOO["roberta-mlm"]
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}

Attach = Callable[..., "OrtEngine"]
# Takes the arguments of `attach`; returns the model, a plain copy and the engine.
Pair = Callable[..., tuple[Any, Any, "OrtEngine"]]

needs_ort = pytest.mark.skipif(bool(missing()), reason="no onnxruntime-training")


def train(name: str, selection: Selection) -> "OrtEngine":
    """Run one step of a model of the zoo; the engine stays attached."""
    from optimum_memopt.engines.ort.engine import OrtEngine
    from optimum_memopt.engines.ort.options import OrtOptions

    model, engine = ZOO[name].build(), OrtEngine(selection, OrtOptions(ort_fallback=False))
    engine.attach(model)
    accumulate(model, [ZOO[name].batch()])
    return engine


def config(text: str) -> Selection:
    return Selection(config=parse(text))


def optimize(model: torch.nn.Module, **options: Any) -> Engine:
    return optimum_memopt.optimize(model, **{"memory_opt_engine": "ort", "ort_fallback": False, **options})


def refusal(**options: Any) -> str:
    with pytest.raises(optimum_memopt.MemOptError) as error:
        optimum_memopt.MemOptOptions(**options).check()
    assert "\n" not in str(error.value)
    return str(error.value)


def environment_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ORTMODULE_")}


def count_lines(lines: Sequence[str], text: str) -> int:
    return sum(text in line for line in lines)


def inputs(case: Any, length: int = 12, **changes: Any) -> dict[str, Any]:
    """Returns a batch with some entries replaced, or left out if the replacement is None."""
    batch = {**case.batch(4, length), **changes}
    return {name: value for name, value in batch.items() if value is not None}


def assert_same_outputs(model: torch.nn.Module, plain: torch.nn.Module, batch: dict[str, Any]) -> None:
    """Assert equal outputs and gradients after a backward through the logits, and through the loss if any."""
    results = []
    for trained in (model, plain):
        trained.zero_grad(set_to_none=True)
        outputs = trained(**batch)
        (outputs.logits.square().mean() + (outputs.loss if "labels" in batch else 0)).backward()
        results.append((outputs, {name: parameter.grad for name, parameter in trained.named_parameters()}))
    (ours, our_gradients), (expected, gradients) = results
    assert set(ours) == set(expected)
    torch.testing.assert_close(ours.logits, expected.logits, rtol=1e-5, atol=1e-6)
    if "labels" in batch:
        torch.testing.assert_close(ours.loss, expected.loss, rtol=TOLERANCE, atol=0)
    assert wrong_gradients(our_gradients, gradients) == {}


def freeze(model: torch.nn.Module) -> None:
    """Freeze the embeddings and the first layer of a RoBERTa."""
    model.roberta.embeddings.requires_grad_(False)
    model.roberta.encoder.layer[0].requires_grad_(False)


class Tagger(torch.nn.Module):
    """Matches the compute optimizer's pattern: a loss module, and labels that are mostly ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = torch.nn.Embedding(97, 16), torch.nn.Linear(16, 16)
        self.head, self.loss = torch.nn.Linear(16, 97), torch.nn.CrossEntropyLoss()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.relu(self.hidden(self.embedding(ids))))
        return self.loss(logits.view(-1, 97), labels.view(-1))


def python(
    *arguments: object, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; the process can import the tests.

    Args:
        environment: environment of the process, by default this one's.
        options: options of `subprocess.run`.
    """
    variables = dict(os.environ if environment is None else environment)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), str(ROOT))))
    defaults = {"capture_output": True, "text": True, "timeout": 600}
    return subprocess.run([sys.executable, *map(str, arguments)], env=variables, **{**defaults, **options})


def run_script(
    name: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
    cwd: Path | None = None,
    run: Callable[..., subprocess.CompletedProcess[str]] = python,
) -> str:
    """Returns the output of a file of `scripts/`, which must exit with 0.

    Args:
        launcher: arguments of Python before the script.
        run: function that starts the process: `python`, or `fresh_process.run`.
    """
    done = run(*launcher, SCRIPTS / name, *arguments, environment=environment, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
