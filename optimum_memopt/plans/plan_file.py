"""Reads and writes plan files: the plan of each graph of a forward, activation by activation. Also reads users' JSON
files. Pure.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from optimum_memopt.cache_files import write_file
from optimum_memopt.errors import MemOptError, abbreviate, excerpt, path_excerpt, reason_of, writing


def read_json(path: Path, kind: str, shape: str, largest: int) -> Any:
    """Returns the JSON value in a file.

    Args:
        kind: the kind of file, for errors.
        shape: the expected content, for errors.
        largest: size limit in bytes, since a file may be endless (`/dev/zero`).

    Raises:
        MemOptError: the file cannot be read; one line that says why.
    """
    shown = path_excerpt(path)
    try:
        with path.open("rb") as file:
            content = file.read(largest + 1)
    # ValueError: a path with a NUL.
    except (OSError, ValueError) as error:
        raise MemOptError(f"{kind} file {shown}: {reason_of(error)}") from None
    if len(content) > largest:
        raise MemOptError(f"{kind} file {shown}: larger than {largest // 2**20} MiB")
    return _json(content, kind, shown, shape)


def _json(content: bytes, kind: str, shown: str, shape: str) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError:
        raise MemOptError(f"{kind} file {shown}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise MemOptError(f"{kind} {shown}: not JSON, line {error.lineno} column {error.colno}: {error.msg}") from None
    # The value is nested too deeply, or has a number with more digits than Python parses.
    except (RecursionError, ValueError):
        raise MemOptError(f"{kind} {shown}: {shape}") from None


FORMAT, VERSION = "optimum-memopt plan", 1
LOSSES = ("plain", "chunked")
_SHAPE = f'expected "format": "{FORMAT}", as optimum-cli memopt plan --budget … --output writes it'
LARGEST_FILE = 64 * 2**20
# Fields that files of this version may lack, since they were added later.
_LATER_FIELDS = ("compress",)
# Upper bound for counts of operators, parameters and elements.
_MOST = 2**63


@dataclass(frozen=True)
class LayerEntry:
    """The plan of a class of equal layers; operators as paths from the layer, `output.dense/addmm`.

    Attributes:
        layers: paths of the layers; "" for the code outside of layers.
        recompute: activations that are recomputed in the backward.
        offload: activations that are kept on the host until the backward.
        compress: activations that are saved in fp8.
        save: values, such as constants, that are saved in addition to activations.
    """

    layers: tuple[str, ...]
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    compress: tuple[str, ...] = ()
    save: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphSignature:
    """The facts by which a graph matches a plan. Batch sizes are not included.

    Attributes:
        parameters: number of parameters and buffers, and of their elements, by dtype such as `float32`.
        operators: number of occurrences of each operator of the forward.
        digest: digest of all operator paths, in order.
    """

    parameters: Mapping[str, tuple[int, int]]
    operators: Mapping[str, int]
    digest: str

    def difference(self, other: "GraphSignature") -> str:
        """Returns a short text on the differences from another graph; empty if they are equal."""
        texts = [
            f"{dtype} parameters and buffers: {_parameters(self.parameters.get(dtype))} in the file, "
            f"{_parameters(other.parameters.get(dtype))} here"
            for dtype in sorted({*self.parameters, *other.parameters})
            if self.parameters.get(dtype) != other.parameters.get(dtype)
        ]
        texts += [
            f"{name}: {self.operators.get(name, 0)} in the file, {other.operators.get(name, 0)} here"
            for name in sorted({*self.operators, *other.operators})
            if self.operators.get(name, 0) != other.operators.get(name, 0)
        ]
        if not texts and self.digest != other.digest:
            return "the same operators, but in other modules or in another order"
        return abbreviate(texts, separator="; ")


@dataclass(frozen=True)
class GraphEntry:
    """The plan of a compiled graph.

    Attributes:
        by_torch: whether the graph uses torch's own partition; `layers` is empty then.
        layers: one entry for each class of equal layers.
    """

    signature: GraphSignature
    by_torch: bool
    layers: tuple[LayerEntry, ...] = ()


@dataclass(frozen=True)
class PlanFile:
    """The plans of all graphs of a training forward.

    Attributes:
        why: the origin of the plan, such as `level 1`.
        loss: one of `LOSSES`.
        solved_for: model, device, compiler, batch sizes, required attention masks, and versions, for human readers of
            the file.
        graphs: one entry per graph, in the order of compilation.
    """

    why: str
    loss: str
    solved_for: Mapping[str, Any]
    graphs: tuple[GraphEntry, ...]

    @classmethod
    def load(cls, path: Path) -> "PlanFile":
        """Read a plan file.

        Raises:
            MemOptError: it cannot be read, is not a plan file, or has another version.
        """
        return cls._of(read_json(path, "plan", _SHAPE, LARGEST_FILE), path_excerpt(path))

    @classmethod
    def parse(cls, content: bytes, shown: str) -> "PlanFile":
        """Parse the content of a plan file. Raises as `load` does, with `shown` as the path."""
        return cls._of(_json(content, "plan", shown, _SHAPE), shown)

    @classmethod
    def _of(cls, content: Any, shown: str) -> "PlanFile":
        if isinstance(content, list):
            raise MemOptError(f"plan {shown}: a list, as --memory_opt_config takes it; give it to that option")
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise MemOptError(f"plan {shown}: {_SHAPE}")
        if content.get("version") != VERSION:
            raise MemOptError(
                f"plan {shown}: version {excerpt(content.get('version'))}; this optimum-memopt reads {VERSION}"
            )
        try:
            plan: PlanFile = _parsed(cls, content)
            if plan.loss not in LOSSES:
                raise ValueError(f"loss {excerpt(plan.loss)}: allowed: {', '.join(LOSSES)}")
            return plan
        except (KeyError, TypeError, ValueError) as error:
            raise MemOptError(f"plan {shown}: {type(error).__name__}: {excerpt(str(error))}") from None

    def to_json(self) -> str:
        """Returns the JSON text that `load` reads, one operator per line."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    def save(self, path: Path | str) -> None:
        """Write the plan file.

        Raises:
            MemOptError: it cannot be written.
        """
        with writing("plan file", path):
            write_file(path, f"{self.to_json()}\n".encode())

    @property
    def has_padding(self) -> bool:
        """True if the plan was made for batches with padding, which have attention masks, or does not say."""
        return self.solved_for.get("padding") is not False

    @property
    def has_local_masks(self) -> bool:
        """False if the plan was made for rows shorter than the window of local attention, which need no local mask."""
        return self.solved_for.get("local_masks") is not False

    @property
    def digest(self) -> str:
        """Returns a digest that is equal for files with the same effect."""
        does = [asdict(graph) for graph in self.graphs]
        return hashlib.sha256(json.dumps([self.loss, does], sort_keys=True).encode()).hexdigest()


def _parameters(counts: Sequence[int] | None) -> str:
    return f"{counts[0]} with {counts[1]:,} elements" if counts else "none"


# The JSON type for a Python type, and its name in errors.
_IN_JSON: dict[Any, tuple[Any, str]] = {
    str: (str, "a string"),
    bool: (bool, "true or false"),
    tuple: (list, "a list"),
    Mapping: (dict, "an object"),
}


def _parsed(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the type of a field. Raises KeyError, TypeError or ValueError."""
    if kind is Any:
        return value
    if kind is int:
        # Check the exact type, since a bool is an int in Python.
        if type(value) is not int or not 0 <= value < _MOST:
            raise ValueError(f"expected a count from 0 up, not {excerpt(value) or repr(value)}")
        return value
    origin, arguments = Mapping if is_dataclass(kind) else get_origin(kind) or kind, get_args(kind)
    json_kind, name = _IN_JSON[origin]
    if not isinstance(value, json_kind):
        raise TypeError(f"expected {name}, not {excerpt(value) or repr(value)}")
    if is_dataclass(kind):
        hints = get_type_hints(kind).items()
        given = {field: hint for field, hint in hints if field in value or field not in _LATER_FIELDS}
        return cast(type, kind)(**{field: _parsed(hint, value[field]) for field, hint in given.items()})
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return tuple(_parsed(*pair) for pair in zip(kinds, value, strict=True))
    return {key: _parsed(arguments[1], item) for key, item in value.items()} if origin is Mapping else value
