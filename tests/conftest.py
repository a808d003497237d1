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

# Tests start like a fresh installation, without the built torch extensions; set this variable to a cache that has them
# to test with them.
os.environ.setdefault("OPTIMUM_MEMOPT_CACHE", os.path.join(tempfile.gettempdir(), "optimum_memopt-no-extensions"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Each test solves for its own budget.
os.environ.setdefault("OPTIMUM_MEMOPT_PLAN_CACHE", "0")
# Models of one or two layers repeat too few operators for torch's fake tensor cache: tracing takes a fifth less
# without it. `make test-nightly` leaves it on, as users have it.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
# pytest (9.2) listens to non-propagating loggers, which makes torch log every graph, tensor and guard for its trace;
# that takes about a tenth of the tracing time.
logging.getLogger("torch.__trace").propagate = True

# Every run uses the same examples, however slow the machine; the nightly workflow uses many more, and new ones.
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
        # Building the extensions takes minutes.
        if nightly in item.path.parents or item.get_closest_marker("extensions"):
            item.add_marker(pytest.mark.nightly)
    left_out = [item for item in items if not share.has(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(autouse=True)
def _log_level():
    """Restore the log level, which a test may set by a flag or a variable."""
    before = get_logger().level
    yield
    get_logger().setLevel(before)


@pytest.fixture(autouse=True)
def _is_not_left_to_plain_pytorch(request: pytest.FixtureRequest):
    """Fail if the compile engine fell back to plain PyTorch: every comparison with plain PyTorch would pass."""
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
    """Freeze imported and cached objects: a Trainer collects garbage three times a run and would scan them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _guards_are_not_timed():
    """Do not time guards: torch flushes the processor's caches for that after each graph, which takes 30 ms."""
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
