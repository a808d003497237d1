"""Which names a module may use, read from the sources; import-linter checks the imports (`pyproject.toml`)."""

import ast
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1] / "optimum_memopt"
PACKAGE = "optimum_memopt"
FOREIGN = ("torch", "onnxruntime", "transformers", "deepspeed")
# Parts of the package's own strings and attributes, documented Python functions, a tqdm list (see `errors.run`).
NOT_OF_A_LIBRARY = {"_dim", "_mib", "_config", "_files", "_checkpointing", "_memopt_counted", "_on_host", "_getframe"}
NOT_OF_A_LIBRARY |= {"_instances", "_replace"}
_ATTENTION = "_scaled_dot_product_{}_attention"
# By module or folder; a folder includes everything in it.
PRIVATE_NAMES_ALLOWED = {
    # Names needed to read a graph: an operator's name, schema and type, and the dispatch mode. They have no public
    # counterpart, have not changed since torch 2.0, and occur in nearly every line that reads a graph.
    "engines.compile": {"_opname", "_schema", "_ops", "_python_dispatch"},
    "engines.simulator.recorder": {"_python_dispatch"},
    "engines.simulator.work": {
        *("_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data", "_softmax"),
        *("_softmax_backward_data", "_to_copy", "_scaled_dot_product_", f"{_ATTENTION.format('flash')}_for_cpu"),
    },
    # Names of ATen's operators, as strings.
    "engines.simulator.workspaces": {
        *("_log_softmax_backward_data", "_softmax_backward_data", f"{_ATTENTION.format('flash')}_for_cpu"),
        *(f"{_ATTENTION.format(kind)}_backward" for kind in ("efficient", "flash")),
        f"{_ATTENTION.format('flash')}_for_cpu_backward",
    },
    "engines.compile.graph": {
        *("_fused_rms_norm", "_log_softmax", "_softmax", "_to_copy", "_unsafe_view"),
        *(_ATTENTION.format(kind) for kind in ("cudnn", "efficient", "flash")),
        f"{_ATTENTION.format('flash')}_for_cpu",
    },
}


@dataclass(frozen=True)
class Module:
    """A source file; `name` omits the package's, so it is empty for the package itself."""

    path: Path

    @property
    def name(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def is_compat(self) -> bool:
        return self.path.stem.startswith("compat") or bool({"compat", "torch_compat"} & set(self.path.parts))

    def imports(self) -> Iterator[str]:
        """Yields the full names of imported modules; `a.b` for `from a import b` if that is a module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{self.name}: a relative import"
                yield from (self._target(node.module or "", alias.name) for alias in node.names)

    @staticmethod
    def _target(module: str, name: str) -> str:
        return f"{module}.{name}" if f"{module}.{name}" in NAMES else module


NAMES = {
    ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
}
MODULES = {module.name: module for module in map(Module, sorted(ROOT.rglob("*.py")))}


def in_modules(read: Callable[[Module], Collection[str]]) -> dict[str, list[str]]:
    """Returns the names that `read` finds, by module; modules without any are left out."""
    names = {name: sorted(read(module)) for name, module in MODULES.items()}
    return {name: each for name, each in names.items() if each}


def engine(name: str) -> str:
    """Returns the engine that a module belongs to, or an empty string if it belongs to none."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "engines" and parts[1] in ("compile", "ort") else ""


# Private names of other libraries.


def private_names(module: Module) -> set[str]:
    """Returns the names with a leading underscore that this module takes from elsewhere: imports, attributes, and
    strings for `getattr` and the like."""
    tree = module.tree
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    found = {node.attr for node in attributes if _is_private(node.attr)}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    parts = {part for name in module.imports() if name.split(".")[0] in FOREIGN for part in name.split(".")}
    pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in pieces]
    texts = [node.value for node in constants if isinstance(node.value, str)]
    names = found | imported | parts | {text for text in texts if re.fullmatch(r"_\w+", text)}
    return {name for name in names if _is_private(name)} - own - _operators(tree) - NOT_OF_A_LIBRARY


def _operators(tree: ast.Module) -> set[str]:
    """Returns the names of ATen operators: these name graph nodes, with or without an underscore."""
    chains = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in chains if "aten" in ast.unparse(node.value).split(".")}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def not_allowed(module: Module) -> set[str]:
    allowed = {
        name
        for owner, names in PRIVATE_NAMES_ALLOWED.items()
        if f"{module.name}.".startswith(f"{owner}.")
        for name in names
    }
    return set() if module.is_compat else private_names(module) - allowed


def test_private_names_of_other_libraries_are_in_compat_files():
    assert not in_modules(not_allowed)


# ONNX Runtime.

_NAMES_IT = re.compile(r"onnx|ortmodule|(?<![a-z])ort(?![a-z])|(?<![A-Za-z])Ort[A-Z]|(?<![A-Z])ORT(?![A-Z])")


def of_onnxruntime(module: Module) -> set[str]:
    """Returns the imports, identifiers and strings (except docstrings) that name ONNX Runtime."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    }
    words = set(module.imports())
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words.add(node.value)
        for attribute in ("id", "attr", "name", "arg", "asname"):
            if isinstance(word := getattr(node, attribute, None), str):
                words.add(word)
    return {word for word in words if re.search(_NAMES_IT, word) or "onnx" in word.lower()}


def test_onnx_runtime_is_named_in_its_folder_only():
    assert not in_modules(lambda module: set() if engine(module.name) == "ort" else of_onnxruntime(module))


def test_a_folders_map_names_its_files() -> None:
    """A folder whose `__init__.py` is only a docstring lists each of its files and folders there, one per line."""
    for path in ROOT.rglob("__init__.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        beside = {
            each.stem for each in path.parent.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()
        }
        if len(tree.body) == 1 and len(beside) > 2:
            rows = re.findall(r"^(\w+) {2,}\S", ast.get_docstring(tree) or "", re.MULTILINE)
            assert sorted(rows) == sorted(beside - {"__init__"}), path
