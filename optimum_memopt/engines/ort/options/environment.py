"""ORT's environment variables and the options that correspond to them; no variable is ignored silently.

Read in onnxruntime-training 1.19.2: ortmodule/{__init__,options,_fallback,_custom_autograd_function,
_custom_autograd_function_exporter,_graph_transition_manager,_custom_op_symbolic_registry}.py,
ortmodule/graph_optimizers/__init__.py, ort_triton/. Importing this imports nothing of onnxruntime.
"""

import copy
import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from optimum_memopt.engines.ort.compat.installation import cuda_missing
from optimum_memopt.engines.ort.options.flags import NO_SKIP, OrtOptions
from optimum_memopt.errors import MemOptError

PREFIX = "ORTMODULE_"
Options = TypeVar("Options", bound=OrtOptions)


class EnvOption(NamedTuple):
    """One environment variable of ORT, without its prefix, and the corresponding field of `OrtOptions`.

    Attributes:
        read: converts the variable's text to the option's value; raises a ValueError that says what is allowed.
        passed: ORT itself reads the value from this variable; otherwise the engine implements the option.
    """

    variable: str
    option: str
    read: Callable[[str], Any] = str
    passed: bool = True

    @property
    def name(self) -> str:
        return PREFIX + self.variable

    @property
    def attribute(self) -> str:
        """That of ORT's `_RuntimeOptions` with the value, where it has one."""
        return _ATTRIBUTES.get(self.variable, self.variable.lower())


# Those that are not named like their variable.
_ATTRIBUTES = {
    "ENABLE_MEM_EFFICIENT_GRAD_MGMT": "enable_mem_efficient_grad_management",
    "ENABLE_ZERO_STAGE3": "enable_zero_stage3_support",
    "USE_TRITON": "enable_triton",
}


def _one_of(values: Mapping[str, Any], allowed: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text not in values:
            raise ValueError(f"allowed are {allowed}")
        return values[text]

    return read


_switch = _one_of({"0": False, "1": True}, "0 and 1")
_level = _one_of({"0": 0, "1": 1, "2": 2}, "0, 1 and 2")
# ORT's names to those of --memory_opt_log_level, which has nothing below a warning.
_LOG_LEVELS = {"VERBOSE": "verbose", "DEVINFO": "devinfo", "INFO": "info"} | dict.fromkeys(
    ("WARNING", "ERROR", "FATAL"), "warning"
)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("allowed are whole numbers") from None


def _fallback(text: str) -> bool:
    unsupported = (f"FALLBACK_UNSUPPORTED_{what}" for what in ("DEVICE", "DATA", "TORCH_MODEL", "ONNX_MODEL"))
    allowed = ("FALLBACK_DISABLE", *unsupported, "FALLBACK_BAD_INITIALIZATION")
    if text not in allowed:
        forced = "; the forced policies are for ONNX Runtime's own tests" if "FORCE_TORCH" in text else ""
        raise ValueError(f"allowed are {', '.join(allowed)}{forced}")
    return text != "FALLBACK_DISABLE"


ENV_OPTIONS = (
    EnvOption("MEMORY_OPT_LEVEL", "memory_opt_level", _level, passed=False),
    EnvOption("MEMORY_OPT_CONFIG", "memory_opt_config", passed=False),
    EnvOption("LOG_LEVEL", "memory_opt_log_level", _one_of(_LOG_LEVELS, ", ".join(_LOG_LEVELS)), passed=False),
    EnvOption("FALLBACK_POLICY", "ort_fallback", _fallback, passed=False),
    EnvOption("SAVE_ONNX_PATH", "ort_save_onnx", passed=False),
    EnvOption("CACHE_DIR", "ort_cache_dir", passed=False),
    EnvOption("ENABLE_CUSTOM_AUTOGRAD", "ort_custom_autograd", _switch, passed=False),
    EnvOption("ONNX_OPSET_VERSION", "ort_opset", _number),
    EnvOption("ALLOW_AUTOGRAD_CHECKPOINT", "ort_allow_autograd_checkpoint", _switch),
    EnvOption("ENABLE_MEM_EFFICIENT_GRAD_MGMT", "ort_mem_efficient_grad_mgmt", _switch),
    EnvOption("ENABLE_COMPUTE_OPTIMIZER", "ort_compute_optimizer", _switch),
    EnvOption("ENABLE_LABEL_SPARSE_OPTIMIZER", "ort_label_sparse_optimizer", _switch),
    EnvOption("ENABLE_EMBEDDING_SPARSE_OPTIMIZER", "ort_embedding_sparse_optimizer", _switch),
    EnvOption("DEEPCOPY_BEFORE_MODEL_EXPORT", "ort_deepcopy_before_export", _switch),
    EnvOption("SKIPCHECK_POLICY", "ort_skip_check"),
    EnvOption("USE_EFFICIENT_ATTENTION", "ort_efficient_attention", _switch),
    EnvOption("USE_TRITON", "ort_triton", _switch),
    EnvOption("TRITON_CONFIG_FILE", "ort_triton_config"),
    EnvOption("USE_FLASH_ATTENTION", "ort_flash_attention", _switch),
    EnvOption("ENABLE_TUNING", "ort_tuning", _switch),
    EnvOption("MAX_TUNING_DURATION_MS", "ort_tuning_duration_ms", _number),
    EnvOption("TUNING_RESULTS_PATH", "ort_tuning_results"),
    EnvOption("CONV_ALGO_SEARCH", "ort_conv_search"),
    EnvOption("ENABLE_ZERO_STAGE3", "ort_zero_stage3", _switch),
)

# Other variables that ORT reads, or that are easily mistaken for one of them, with a remark for the user.
_NOT_USED = {
    "PRINT_INPUT_DENSITY": "not used; --log_input_density shows it",
    "PRINT_MEMORY_STATS": "not used; --log_memory_phases shows them",
    "FALLBACK_RETRY": "not used; after --ort_fallback has fallen back, a changed model is tried again",
    "JSON_CONFIG_PATH": "not used; ONNX Runtime reads it in load_config_from_json only, give the flags instead",
    "IS_DETERMINISTIC": "no variable of ONNX Runtime; it follows torch.use_deterministic_algorithms()",
    "TORCH_CPP_DIR": "no variable of ONNX Runtime; OPTIMUM_MEMOPT_CACHE sets the folder of its extensions",
    "EXTERNAL_TORCH_CPP_EXTENSION_DIR": "not read by ONNX Runtime; OPTIMUM_MEMOPT_CACHE sets their folder",
    "EXTERNAL_TORCH_CUDA_EXTENSION_DIR": "not read by ONNX Runtime; OPTIMUM_MEMOPT_CACHE sets their folder",
}
# Read once, when ORT is imported, for the whole process.
SDPA_FALLBACK = f"{PREFIX}ATEN_SDPA_FALLBACK"
_PROCESS_WIDE = {
    "ATEN_SDPA_FALLBACK": "for all models of this process, sdpa runs as torch's memory-efficient attention",
    "TRITON_DEBUG": "for all models of this process, the Triton kernels of --ort_triton are written to triton_debug/",
}
KNOWN = tuple(PREFIX + name for name in (*(option.variable for option in ENV_OPTIONS), *_NOT_USED, *_PROCESS_WIDE))


def from_environment(options: Options, environ: Mapping[str, str]) -> tuple[Options, tuple[str, ...]]:
    """Options with values from the environment: a variable that the user has set for ORT overrides the flag.

    Args:
        options: a `MemOptOptions`; not changed.
        environ: like `os.environ`; a variable without a value counts as not set.

    Returns:
        A checked copy with the variables' values, and a log line for each variable.

    Raises:
        MemOptError: a variable's value is not allowed; the message names both.
    """
    effective: Any = copy.copy(options)
    remarks, sources = [], []
    given = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value}
    defaults = options.__dataclass_fields__
    for env_option in ENV_OPTIONS:
        if env_option.name not in given:
            continue
        source = f"{env_option.name}={given[env_option.name]}"
        try:
            value = env_option.read(given[env_option.name])
        except ValueError as error:
            raise MemOptError(f"{source} in the environment: {error}") from error
        flag = getattr(options, env_option.option)
        overrides = (
            f", not --{env_option.option} {flag}" if flag not in (value, defaults[env_option.option].default) else ""
        )
        remarks.append(f"{source} in the environment is used{overrides or f', as --{env_option.option} {value}'}")
        sources.append(source)
        setattr(effective, env_option.option, value)
    remarks.extend(_decide_between_plans(options, effective, given))
    if sources:
        try:
            effective.check_values()
        except MemOptError as error:
            raise MemOptError(f"{error} (from the environment: {', '.join(sources)})") from error
    if SDPA_FALLBACK in given and (reason := cuda_missing()):
        raise MemOptError(
            f"{SDPA_FALLBACK}={given[SDPA_FALLBACK]} in the environment: torch's memory-efficient attention needs "
            f"CUDA, and {reason}; unset it"
        )
    remarks.extend(_other_remarks(given))
    return effective, tuple(remarks)


def _decide_between_plans(options: Any, effective: Any, given: Mapping[str, str]) -> tuple[str, ...]:
    """A level and a config exclude each other, so one from the environment replaces the other flag."""
    has_level = given.get(f"{PREFIX}MEMORY_OPT_LEVEL", "0") != "0"
    has_config = f"{PREFIX}MEMORY_OPT_CONFIG" in given
    if has_level and not has_config and options.memory_opt_config is not None:
        effective.memory_opt_config = None
        return (f"{PREFIX}MEMORY_OPT_LEVEL replaces --memory_opt_config {options.memory_opt_config}",)
    if has_config and not has_level and effective.memory_opt_level:
        effective.memory_opt_level = 0
        return (f"{PREFIX}MEMORY_OPT_CONFIG replaces --memory_opt_level {options.memory_opt_level}",)
    return ()


def _other_remarks(given: Mapping[str, str]) -> list[str]:
    lines = []
    for name in given:
        variable = name.removeprefix(PREFIX)
        if note := _NOT_USED.get(variable) or _PROCESS_WIDE.get(variable):
            lines.append(f"{name} in the environment: {note}")
        elif name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0)
            lines.append(f"{name} in the environment: ONNX Runtime has no such variable; the nearest is {near[0]}")
    return lines


def variables(options: OrtOptions) -> dict[str, str | None]:
    """The environment that ORT sees for one model: every variable it reads except the process-wide ones; None: unset.

    Plans and the fallback are the engine's own; ORT's fallback covers few errors.
    """
    values: dict[str, str | None] = {name: None for name in KNOWN if name.removeprefix(PREFIX) not in _PROCESS_WIDE}
    values |= {
        f"{PREFIX}FALLBACK_POLICY": "FALLBACK_DISABLE",
        f"{PREFIX}MEMORY_OPT_LEVEL": "0",
        # By default ORT runs the first batch's graph for every later batch: other keyword arguments, int32 ids, no
        # labels. With the checks it builds a new graph for these; new shapes alone do not need one.
        f"{PREFIX}SKIPCHECK_POLICY": NO_SKIP,
    }
    for env_option in ENV_OPTIONS:
        value = getattr(options, env_option.option, None)
        if env_option.passed and value is not None:
            values[env_option.name] = str(int(value)) if isinstance(value, bool) else str(value)
    return values


def ignored_options(options: OrtOptions, runtime_options: Any) -> tuple[str, ...]:
    """Flags that ORT silently ignored or changed.

    Args:
        options: what the user asked for.
        runtime_options: ORT's `_RuntimeOptions`, created while `variables` were set.
    """
    given = ((each, getattr(options, each.option)) for each in ENV_OPTIONS if each.passed)
    return tuple(
        f"--{each.option} {value}"
        for each, value in given
        if value is not None and getattr(runtime_options, each.attribute, value) != value
    )
