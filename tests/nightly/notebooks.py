"""Runs a notebook's cells as Jupyter does, without Jupyter."""

import ast
import json
import sys
import types
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"


def values_of(name: str) -> list[Any]:
    """The value of the last expression of each code cell, None where its last line is none."""
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    # dynamo looks for the names of a function in its module.
    module = types.ModuleType("notebook_cells")
    sys.modules[module.__name__] = module
    try:
        return [run("".join(cell["source"]), vars(module)) for cell in cells if cell["cell_type"] == "code"]
    finally:
        del sys.modules[module.__name__]


def run(source: str, names: dict[str, Any]) -> Any:
    """One cell, among the names of those before it."""
    *statements, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        statements, value = [*statements, last], None
    else:
        value = ast.Expression(last.value)
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    return None if value is None else eval(compile(value, "cell", "eval"), names)
