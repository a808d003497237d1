"""Plan files: the plan of each graph of a forward, activation by activation; and how a JSON file of a user's is read.
Pure.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from optimum_memopt.errors import MemOptError, abbreviate, excerpt, path_excerpt, reason_of, writing


def read_json(path: Path, kind: str, shape: str, largest: int) -> Any:
    """The JSON value in a file.

    Args:
        kind: of the file, for errors; `shape` is what they expect in it.
        largest: bytes, since a path may have no end (`/dev/zero`).

    Raises:
        MemOptError: one line that says why it cannot be read.
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
    # Nested too deeply, or a number with more digits than Python parses.
    except (RecursionError, ValueError):
        raise MemOptError(f"{kind} {shown}: {shape}") from None


FORMAT, VERSION = "optimum-memopt plan", 1
LOSSES = ("plain", "chunked")
_SHAPE = f'expected "format": "{FORMAT}", as optimum-cli memopt plan --budget … --output writes it'
LARGEST_FILE = 64 * 2**20
# Fields that files of this version may lack, since they came after it.
_LATER_FIELDS = ("compress",)
# Of operators, parameters and their numbers.
_MOST = 2**63


@dataclass(frozen=True)
class LayerEntry:
    """The plan of a class of equal layers; operators as paths from the layer, `output.dense/addmm`.

    Attributes:
        layers: their paths; "" for all that is outside of layers.
        recompute: activations that are recomputed in the backward.
        offload: activations that wait for the backward on the host.
        compress: activations that are saved in fp8.
        save: what is saved beside the other activations.
    """

    layers: tuple[str, ...]
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    compress: tuple[str, ...] = ()
    save: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphSignature:
    """The facts that a graph shares with the one that a plan was made for. Sizes of batches are not in it.

    Attributes:
        parameters: how many, and how many numbers they hold, by dtype as `float32`.
        operators: of the forward, how often each occurs.
        digest: of all of their paths, in order.
    """

    parameters: Mapping[str, tuple[int, int]]
    operators: Mapping[str, int]
    digest: str

    def difference(self, other: "GraphSignature") -> str:
        """The differences to another graph in a few words; empty where they are equal."""
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
            return "the same operators in other modules, or in another order"
        return abbreviate(texts, separator="; ")


@dataclass(frozen=True)
class GraphEntry:
    """The plan of a compiled graph.

    Attributes:
        by_torch: torch's own partition; `layers` is empty.
        layers: a class of layers each.
    """

    signature: GraphSignature
    by_torch: bool
    layers: tuple[LayerEntry, ...] = ()


@dataclass(frozen=True)
class PlanFile:
    """The plans of all graphs of a training forward.

    Attributes:
        why: who chose it, as `level 1`.
        loss: one of `LOSSES`.
        solved_for: model, device, compiler, sizes of the batch, the attention masks that it needs, and versions,
            for whoever reads the file.
        graphs: in the order in which they are compiled.
    """

    why: str
    loss: str
    solved_for: Mapping[str, Any]
    graphs: tuple[GraphEntry, ...]

    @classmethod
    def load(cls, path: Path) -> "PlanFile":
        """Read a file.

        Raises:
            MemOptError: it cannot be read, is no plan file, or one of a later version.
        """
        return cls._of(read_json(path, "plan", _SHAPE, LARGEST_FILE), path_excerpt(path))

    @classmethod
    def parse(cls, content: bytes, shown: str) -> "PlanFile":
        """The plan in the content of a file. Raises as `load`, with what is shown as its path."""
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
                raise ValueError(f"loss {excerpt(plan.loss)}: allowed are {', '.join(LOSSES)}")
            return plan
        except (KeyError, TypeError, ValueError) as error:
            raise MemOptError(f"plan {shown}: {type(error).__name__}: {excerpt(str(error))}") from None

    def to_json(self) -> str:
        """As `load` reads it, an operator a line."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    def save(self, path: Path | str) -> None:
        """Write a file.

        Raises:
            MemOptError: it cannot be written.
        """
        with writing("plan file", path):
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @property
    def has_padding(self) -> bool:
        """True where it was made for batches with padding, which have attention masks, or does not say."""
        return self.solved_for.get("padding") is not False

    @property
    def has_local_masks(self) -> bool:
        """False where it was made for rows that are shorter than the window of local attention."""
        return self.solved_for.get("local_masks") is not False

    @property
    def digest(self) -> str:
        """Equal for files that do the same."""
        does = [asdict(graph) for graph in self.graphs]
        return hashlib.sha256(json.dumps([self.loss, does], sort_keys=True).encode()).hexdigest()


def _parameters(counts: Sequence[int] | None) -> str:
    return f"{counts[0]} of {counts[1]:,} numbers" if counts else "none"


# What JSON has for a type, and how it is called.
_IN_JSON: dict[Any, tuple[Any, str]] = {
    str: (str, "a string"),
    bool: (bool, "true or false"),
    tuple: (list, "a list"),
    Mapping: (dict, "an object"),
}


def _parsed(kind: Any, value: Any) -> Any:
    """A value of JSON as the type of a field. Raises KeyError, TypeError or ValueError."""
    if kind is Any:
        return value
    if kind is int:
        # An exact type, since true is a number of Python's.
        if type(value) is not int or not 0 <= value < _MOST:
            raise ValueError(f"expected a count from 0 on, not {excerpt(value) or repr(value)}")
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
