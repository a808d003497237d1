"""Runs a notebook's cells as Jupyter does, without Jupyter."""

import ast
import json
import sys
import types
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"


def values_of(name: str) -> list[Any]:
    """Returns the value of each code cell's last expression; None if its last line is none."""
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    # dynamo looks up a function's names in its module.
    module = types.ModuleType("notebook_cells")
    sys.modules[module.__name__] = module
    try:
        return [run("".join(cell["source"]), vars(module)) for cell in cells if cell["cell_type"] == "code"]
    finally:
        del sys.modules[module.__name__]


def run(source: str, names: dict[str, Any]) -> Any:
    """Run one cell with the names of earlier cells; returns its last expression's value."""
    *statements, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        statements, value = [*statements, last], None
    else:
        value = ast.Expression(last.value)
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    return None if value is None else eval(compile(value, "cell", "eval"), names)
