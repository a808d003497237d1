"""PEFT adapters of planned models, and the quantized weights below them."""

import difflib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from optimum_memopt.compat.bitsandbytes import cast_biases, quantize
from optimum_memopt.errors import MemOptError, excerpt, path_excerpt
from optimum_memopt.step_settings import DTYPES

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

_STORAGE = ("uint8", *DTYPES)
_PREPARES = "prepare"
# The fields of each kind.
_OF_4_BITS = ("double", "compute", _PREPARES, "storage")
_KINDS = {"nf4": _OF_4_BITS, "fp4": _OF_4_BITS, "int8": (_PREPARES,)}
_QUANTIZATION = (
    "allowed: nf4 and fp4, with fields such as nf4,double=false,compute=float32,prepare=false,storage=bfloat16, and "
    "int8 or int8,prepare=false"
)


@dataclass(frozen=True)
class Quantization:
    """How weights are quantized, as in transformers' `BitsAndBytesConfig` with `load_in_4bit` or `load_in_8bit`.

    Attributes:
        kind: `nf4`, `fp4` or `int8`; the fields but `prepare` are for 4 bits.
        double: whether the scales are quantized too.
        compute: the dtype of matrix products, `bnb_4bit_compute_dtype`.
        prepare: whether PEFT's `prepare_model_for_kbit_training` casts weights that are not quantized to float32.
        storage: the dtype of packed weights, `bnb_4bit_quant_storage`; FSDP2 shards floating-point ones.
    """

    kind: str
    double: bool = True
    compute: str = "bfloat16"
    prepare: bool = True
    storage: str = _STORAGE[0]


def parse_quantization(text: str) -> Quantization:
    """Parse a value of `--quantize`.

    Args:
        text: a kind, and fields of `Quantization` separated by commas.

    Raises:
        MemOptError: the text is invalid.
    """
    kind, *parts = (part.strip() for part in text.split(","))
    given: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition("=")
        given[name] = {"true": True, "false": False}.get(value, value)
    is_known = kind in _KINDS and given.keys() <= set(_KINDS[kind])
    are_switches = all(isinstance(given.get(name, True), bool) for name in ("double", _PREPARES))
    are_types = given.get("compute", DTYPES[0]) in DTYPES and given.get("storage", _STORAGE[0]) in _STORAGE
    if not (is_known and are_switches and are_types):
        raise MemOptError(f"--quantize {excerpt(text) or repr(text)}: {_QUANTIZATION}")
    return Quantization(kind, **given)


def quantized(model: torch.nn.Module, quantization: Quantization) -> torch.nn.Module:
    """Returns a model on the meta device with quantized weights, ready for an adapter.

    Raises:
        MemOptError: bitsandbytes or PEFT is missing.
    """
    try:
        import bitsandbytes  # noqa: F401
        import peft
    except ImportError as error:
        raise MemOptError(f"--quantize needs {error.name}; pip install bitsandbytes peft") from error
    quantize(model, _config_of(quantization))
    if quantization.prepare:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    cast_biases(model)
    return model


def _config_of(quantization: Quantization) -> "BitsAndBytesConfig":
    from transformers import BitsAndBytesConfig

    if quantization.kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.kind,
        bnb_4bit_use_double_quant=quantization.double,
        bnb_4bit_compute_dtype=getattr(torch, quantization.compute),
        bnb_4bit_quant_storage=getattr(torch, quantization.storage),
    )


# Short names of LoRA's fields.
_FIELDS = {"target": "target_modules", "alpha": "lora_alpha", "dropout": "lora_dropout", "type": "peft_type"}
_ALLOWED = "allowed: fields of PEFT's config such as r=16,target=q_proj+v_proj, and an adapter_config.json"
_FILE = "adapter_config.json"


def parse_adapter(text: str) -> dict[str, Any]:
    """Returns the fields of PEFT's config; the type is LoRA if none is given.

    Args:
        text: fields separated by commas, with several values of a field joined by a plus; or the path of an
            adapter_config.json or of its folder.

    Raises:
        MemOptError: the text is neither.
    """
    path = os.path.join(text, _FILE) if os.path.isdir(text) else text
    if "=" not in text:
        return _read(path)
    config: dict[str, Any] = {"peft_type": "LORA"}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        if not (sign and name.strip() and value.strip()):
            raise MemOptError(f"--peft {excerpt(text)}: {excerpt(part) or repr(part)} is not a field; {_ALLOWED}")
        config[_FIELDS.get(name.strip(), name.strip())] = _value(value.strip())
    config["peft_type"] = str(config["peft_type"]).upper()
    target = config.get("target_modules")
    # PEFT treats a string as a regular expression for the whole path.
    if isinstance(target, str) and target.replace(".", "").isidentifier():
        config["target_modules"] = [target]
    return config


def _read(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise MemOptError(f"--peft {path_excerpt(path)}: {excerpt(reason)}; {_ALLOWED}") from error
    if not isinstance(config, dict) or "peft_type" not in config:
        raise MemOptError(f"--peft {path_excerpt(path)}: no peft_type in it; {_ALLOWED}")
    return config


def _value(text: str) -> Any:
    if "+" in text:
        return [_value(part) for part in text.split("+")]
    try:
        return json.loads(text.lower() if text in ("True", "False", "None") else text)
    except ValueError:
        return text


def with_adapter(model: torch.nn.Module, config: Mapping[str, Any]) -> torch.nn.Module:
    """Returns the model with an adapter, from PEFT's `get_peft_model`.

    Raises:
        MemOptError: PEFT is missing, or refuses the config.
    """
    try:
        import peft
    except ImportError as error:
        raise MemOptError("--peft needs PEFT; pip install peft") from error
    kinds = {kind.value: config for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = kinds.get(str(config["peft_type"]))
    if kind is None:
        raise MemOptError(f"--peft peft_type={excerpt(config['peft_type'])}: allowed: {', '.join(sorted(kinds))}")
    given = {name: value for name, value in config.items() if name != "peft_type" and value is not None}
    known = {field.name: field.type for field in fields(kind) if field.init}
    for name in given.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise MemOptError(f"--peft {excerpt(name)}: {kind.__name__} has no such field{hint}")
    for name, value in given.items():
        # Strings where annotations are not evaluated.
        if known[name] in (int, float, "int", "float") and not isinstance(value, int | float):
            raise MemOptError(f"--peft {name}={excerpt(value)}: allowed: numbers")
    try:
        with warnings.catch_warnings():
            # PEFT (0.21) calls deprecated functions of transformers.
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, kind(**given))
    # A user's config may raise any error in PEFT.
    except Exception as error:
        raise MemOptError(f"--peft: PEFT rejects it: {excerpt(' '.join(str(error).split()), longest=300)}") from error
