from pathlib import Path
from typing import Any

import transformers

from tests.model_zoo import ZOO


def save(folder: Path, name: str, **changes: Any) -> str:
    """Save the config of the model `name`, with `changes` over its arguments; returns the folder's path."""
    case = ZOO[name]
    getattr(transformers, case.config)(**{**case.arguments, **changes}).save_pretrained(folder)
    return str(folder)
