import gc
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from optimum_memopt.logs import get_logger
from tests.rotation import Share

# Tests start where a newcomer does, without the built torch extensions; name a cache with them to test with them.
os.environ.setdefault("OPTIMUM_MEMOPT_CACHE", os.path.join(tempfile.gettempdir(), "optimum_memopt-no-extensions"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Each test solves for its budget itself.
os.environ.setdefault("OPTIMUM_MEMOPT_PLAN_CACHE", "0")
# Models of one or two layers repeat too little for torch's cache of traced operators: without it tracing takes a
# fifth less. `make test-nightly` leaves it on, as users have it.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
# pytest (9.2) listens to loggers that pass nothing on, which makes torch write down every graph, tensor and guard for
# its trace, for about a tenth of what tracing takes.
logging.getLogger("torch.__trace").propagate = True

# The same examples in every run, however slow the machine is; the nightly workflow looks at many more, and new ones.
_ALIKE = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("fast", max_examples=50, derandomize=True, **_ALIKE)
settings.register_profile("thorough", max_examples=1000, **_ALIKE)
settings.load_profile("fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly",
        type=Share,
        default="all",
        metavar="K/N",
        help="of the nightly tests those whose hash is K modulo N",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, nightly = config.option.nightly, Path(__file__).parent / "nightly"
    for item in items:
        # Building them takes minutes.
        if nightly in item.path.parents or item.get_closest_marker("extensions"):
            item.add_marker(pytest.mark.nightly)
    left_out = [item for item in items if not share.has(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(autouse=True)
def _log_level():
    """A level that a test asks for, as a flag or a variable, is not the next one's."""
    before = get_logger().level
    yield
    get_logger().setLevel(before)


@pytest.fixture(autouse=True)
def _is_not_left_to_plain_pytorch(request: pytest.FixtureRequest):
    """A model that the compile engine fails at is left to plain PyTorch, with which every comparison would pass."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    get_logger().addHandler(handler)
    yield
    get_logger().removeHandler(handler)
    left = [line for line in lines if line.startswith(("NOT under a plan: its", "NOT under a plan: torch cannot"))]
    assert not left or request.node.get_closest_marker("falls_back"), left


@pytest.fixture(autouse=True)
def _what_lasts_is_no_garbage():
    """A Trainer collects garbage three times a run, and each time would look through what is imported or cached."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _guards_are_not_timed():
    """torch flushes the processor's caches after each graph, to log how long its guards take: 30 milliseconds."""
    import torch._dynamo.guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *arguments: 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trainer_of(tmp_path: Path) -> Callable[..., Any]:
    import torch
    from transformers import RobertaConfig, RobertaForMaskedLM, Trainer, TrainingArguments

    def build(
        callbacks: list[Any], kind: type = Trainer, own: dict[str, Any] | None = None, **changes: Any
    ) -> Trainer:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        model = RobertaForMaskedLM(RobertaConfig(vocab_size=50, max_position_embeddings=20, **sizes))
        data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 50, (8, 10))]
        quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        steps = {"max_steps": 3, "per_device_train_batch_size": 2}
        args = TrainingArguments(str(tmp_path / "run"), **{**quiet, **steps, **changes})
        return kind(**{"model": model, "args": args, "train_dataset": data, "callbacks": callbacks, **(own or {})})

    return build
