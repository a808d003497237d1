"""All options of ORTModule: the `--ort_…` flags, checks whether they can work, and the corresponding environment
variables of ORT. No variable is ignored silently.

Source of the variables: onnxruntime-training 1.19.2, ortmodule/{__init__,options,_fallback,_custom_autograd_function,
_custom_autograd_function_exporter,_graph_transition_manager,_custom_op_symbolic_registry}.py,
ortmodule/graph_optimizers/__init__.py, ort_triton/. Importing this module does not import onnxruntime.
"""

import copy
import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch

from optimum_memopt.compat.installed import installed_version
from optimum_memopt.engines.api.run import EngineOptions
from optimum_memopt.engines.ort.compat import extensions, installation
from optimum_memopt.errors import MemOptError, UnsupportedModelError, excerpt, path_excerpt
from optimum_memopt.option_values import Numbers, check_written, flag
from optimum_memopt.plans.plan_file import read_json

if TYPE_CHECKING:
    from transformers import TrainingArguments

NO_SKIP = "SKIP_CHECK_DISABLED"
# The consequence of skipping each check.
_SKIPS = {
    "SKIP_CHECK_DEVICE": "inputs on another device than the model's are not detected",
    "SKIP_CHECK_BUILD_GRADIENT": "changed keyword arguments or dtypes are ignored or fail",
    "SKIP_CHECK_EXECUTION_AGENT": "a change of device or of torch.use_deterministic_algorithms() is not detected",
}
_NEED_CUDA = (
    "ort_embedding_sparse_optimizer",
    "ort_efficient_attention",
    "ort_triton",
    "ort_triton_config",
    "ort_flash_attention",
    "ort_tuning",
    "ort_tuning_duration_ms",
    "ort_tuning_results",
    "ort_conv_search",
    "ort_zero_stage3",
)
_NEED_EXTENSIONS = (
    "ort_custom_autograd",
    "ort_mem_efficient_grad_mgmt",
    "ort_allow_autograd_checkpoint",
    "ort_label_sparse_optimizer",
    "ort_embedding_sparse_optimizer",
    "ort_efficient_attention",
)
_NEED_ANOTHER = {
    "ort_triton_config": "ort_triton",
    "ort_flash_attention": "ort_triton",
    "ort_tuning_duration_ms": "ort_tuning",
}
# Parameters get their gradients inside the backward of ONNX Runtime's single autograd node, not from torch's graph.
_HIDE_PARAMETERS = ("ort_mem_efficient_grad_mgmt", "ort_allow_autograd_checkpoint")
# The last DeepSpeed that ORT's hooks support; later ones changed ZeRO stage 3's parameter hooks (DeepSpeed PR 4966).
_LAST_DEEPSPEED = (0, 13, 1)
_LARGEST_FILE = 64 * 2**20


@dataclass
class OrtOptions(EngineOptions):
    """The `--ort_…` flags: how ORTModule exports and runs the model."""

    ort_fallback: bool = flag(
        True, "Train with plain PyTorch, with a warning, if ONNX Runtime cannot train the model; false: stop."
    )
    ort_arena: bool = flag(
        False,
        "Let ONNX Runtime keep freed CPU memory in its arena: faster steps at up to 10%% more peak, "
        "but memory that a plan saves is not available to the rest of the process.",
    )
    ort_cache_dir: os.PathLike | str | None = flag(
        None,
        "Keep exported graphs in this folder and skip most of the export when the same model runs again "
        "with a first batch of the same shape.",
    )
    ort_save_onnx: os.PathLike | str | None = flag(
        None, "Write the exported, optimized and executed ONNX graphs into this folder."
    )
    ort_opset: Annotated[int | None, Numbers(12, 20, "12 to 20, the opsets that ONNX Runtime 1.19 trains")] = flag(
        None, "ONNX opset of the export; ONNX Runtime's default is 17."
    )
    ort_module_with_loss: bool = flag(
        False,
        "Compute the loss in ONNX Runtime, including label smoothing, only from tokens that have a label "
        "(masked LM: 15%% of them). A training forward then returns only the loss.",
    )
    ort_fp16_optimizer: bool = flag(
        False,
        "Wrap DeepSpeed's or Apex's fp16 optimizer in ONNX Runtime's FP16_Optimizer, or warn if its version "
        "is not supported.",
    )
    ort_custom_autograd: bool | None = flag(
        None,
        "Run the model's own torch.autograd.Functions with their own backward; false: refuse such a model. "
        "Default: on if the torch extensions are built.",
    )
    ort_mem_efficient_grad_mgmt: bool = flag(
        False,
        "Accumulate each gradient as soon as it is computed, instead of all at the end of backward: "
        "a lower peak. Needs the torch extensions.",
    )
    ort_allow_autograd_checkpoint: bool = flag(
        False,
        "Train a model with re-entrant activation checkpointing: PyTorch runs the checkpointed layers, "
        "ONNX Runtime the rest. Needs the torch extensions.",
    )
    ort_compute_optimizer: bool = flag(True, "Let ONNX Runtime move operators that shrink tensors ahead of others.")
    ort_label_sparse_optimizer: bool | None = flag(
        None,
        "Skip ignored labels in the loss and in the operators before it: with --ort_module_with_loss, or if "
        "the model holds an nn.CrossEntropyLoss, the torch extensions are built and more than 10%% of the first "
        "batch's labels are ignored. ONNX Runtime's default is on.",
    )
    ort_embedding_sparse_optimizer: bool | None = flag(
        None,
        "Skip padding in the layers, if it is more than 10%% of the first batch. ONNX Runtime's default is on, "
        "and does nothing without CUDA.",
    )
    ort_deepcopy_before_export: bool = flag(
        True,
        "Run a copy of the model to find its outputs; false: run the model itself, which briefly saves memory "
        "of the model's size, but counters in its forward advance once more.",
    )
    ort_skip_check: str | None = flag(
        None,
        "Checks that ONNX Runtime skips from the second step on, separated by |: SKIP_CHECK_DEVICE, "
        "SKIP_CHECK_BUILD_GRADIENT, SKIP_CHECK_EXECUTION_AGENT. If the second is skipped, changed keyword arguments "
        "or dtypes are ignored or fail. Default: SKIP_CHECK_DISABLED.",
    )
    ort_efficient_attention: bool = flag(False, "Use torch's memory-efficient attention in the graph; needs CUDA.")
    ort_triton: bool = flag(
        False, "Fuse operators into Triton kernels; needs CUDA. Once on, it stays on in the process."
    )
    ort_triton_config: os.PathLike | str | None = flag(
        None, "JSON file that lists the operators that Triton may fuse; with --ort_triton."
    )
    ort_flash_attention: bool = flag(False, "Use flash attention written in Triton; with --ort_triton.")
    ort_tuning: bool = flag(False, "Time several kernels for an operator and keep the fastest; needs CUDA.")
    ort_tuning_duration_ms: Annotated[int | None, Numbers(1)] = flag(
        None, "Maximum time to spend on one operator, in ms; with --ort_tuning."
    )
    ort_tuning_results: os.PathLike | str | None = flag(
        None, "JSON file of the selected kernels: written with --ort_tuning, read without it; needs CUDA."
    )
    ort_conv_search: str | None = flag(
        None,
        "How cuDNN searches for a convolution's algorithm; ONNX Runtime's default is HEURISTIC. Needs CUDA.",
        choices=("HEURISTIC", "EXHAUSTIVE"),
    )
    ort_zero_stage3: bool = flag(
        False, "ONNX Runtime's support for ZeRO stage 3; needs CUDA and DeepSpeed 0.13.1 or older."
    )

    def check_ort(self) -> None:
        """Refuse options that are invalid, or cannot work on this machine, before a model or data is loaded.

        Raises:
            MemOptError: one line that names the option and the allowed values, or makes a suggestion.
        """
        if self.ort_save_onnx is not None and not os.path.isdir(self.ort_save_onnx):
            raise MemOptError(f"--ort_save_onnx {path_excerpt(self.ort_save_onnx)}: no such folder; create it first")
        if self.ort_cache_dir is not None:
            folder = Path(self.ort_cache_dir)
            # `Path.exists` would raise for a name that is too long.
            there = (path for path in (folder, *folder.parents) if os.path.exists(path))
            if file := next((path for path in there if not os.path.isdir(path)), None):
                raise MemOptError(
                    f"--ort_cache_dir {path_excerpt(folder)}: {path_excerpt(file)} is a file; give a folder"
                )
        given = _given(self)
        for name in _NEED_CUDA:
            if name in given and (missing := installation.cuda_missing()):
                raise MemOptError(f"{given[name]} needs CUDA, and {missing}; leave it out")
        for name in _NEED_EXTENSIONS:
            marks_itself = name == "ort_label_sparse_optimizer" and self.ort_module_with_loss
            if name in given and not marks_itself and extensions.find() is None:
                raise MemOptError(
                    f"{given[name]} needs ONNX Runtime's torch extensions; build them with: {extensions.BUILD_COMMAND}"
                )
        for name, needed in _NEED_ANOTHER.items():
            if name in given and needed not in given:
                raise MemOptError(f"{given[name]} without --{needed} has no effect; give both or neither")
        _check_combinations(self, given)
        _check_files(self)
        if self.ort_skip_check is not None:
            _check_skips(self.ort_skip_check)
        if self.ort_zero_stage3:
            _check_deepspeed()


def _given(options: OrtOptions) -> dict[str, str]:
    names = dict.fromkeys((*_NEED_CUDA, *_NEED_EXTENSIONS))
    values = {name: getattr(options, name) for name in names}
    return {
        name: f"--{name}" if value is True else f"--{name} {excerpt(value)}"
        for name, value in values.items()
        if value not in (None, False)
    }


def _check_combinations(options: OrtOptions, given: dict[str, str]) -> None:
    for name in _HIDE_PARAMETERS:
        if name in given and options.ort_custom_autograd is False:
            raise MemOptError(f"--{name} runs as a torch.autograd.Function; leave out --ort_custom_autograd false")
    for name in ("ort_label_sparse_optimizer", "ort_embedding_sparse_optimizer"):
        if getattr(options, name) and not options.ort_compute_optimizer:
            raise MemOptError(f"--{name} is turned off by --ort_compute_optimizer false; leave out one of them")
    if options.ort_triton and find_spec("triton") is None:
        raise MemOptError("--ort_triton needs the package triton; pip install triton")


def _check_files(options: OrtOptions) -> None:
    """Refuse missing or unreadable files. ORT silently ignores a missing file, and fails on an unreadable one in the
    middle of training. Raises MemOptError."""
    if options.ort_tuning and options.ort_tuning_results is not None:
        check_written("--ort_tuning_results", str(options.ort_tuning_results))
    read = ("ort_triton_config",) if options.ort_tuning else ("ort_triton_config", "ort_tuning_results")
    for name in read:
        if (path := getattr(options, name)) is not None:
            read_json(Path(path), f"--{name}", "nested too deeply", _LARGEST_FILE)


def _check_skips(policy: str) -> None:
    names = set(policy.split("|"))
    if names - {*_SKIPS, NO_SKIP}:
        raise MemOptError(
            f"--ort_skip_check {excerpt(policy)}: allowed: {NO_SKIP}, or any of {', '.join(_SKIPS)} joined by |"
        )
    if NO_SKIP in names and len(names) > 1:
        raise MemOptError(f"--ort_skip_check {excerpt(policy)}: {NO_SKIP} turns all others off; give it alone")
    if "SKIP_CHECK_EXECUTION_AGENT" in names and "SKIP_CHECK_BUILD_GRADIENT" not in names:
        raise MemOptError(
            f"--ort_skip_check {excerpt(policy)}: a new graph would run in the session of the old one; "
            "add SKIP_CHECK_BUILD_GRADIENT or leave out SKIP_CHECK_EXECUTION_AGENT"
        )


def skip_check_remark(policy: str | None) -> str:
    """Returns a log line about errors that `--ort_skip_check` leaves undetected; empty if there are none."""
    undetected = [_SKIPS[name] for name in (policy or NO_SKIP).split("|") if name in _SKIPS]
    return f"--ort_skip_check {policy}: from the second step on {'; '.join(undetected)}" if undetected else ""


def _check_deepspeed() -> None:
    installed, last = installed_version(("deepspeed",)), ".".join(map(str, _LAST_DEEPSPEED))
    if installed is None:
        raise MemOptError(f"--ort_zero_stage3 needs DeepSpeed {last} or older, which is not installed")
    if tuple(int(part) for part in installed[1].split("+")[0].split(".")[:3] if part.isdigit()) > _LAST_DEEPSPEED:
        raise MemOptError(
            f"--ort_zero_stage3: ONNX Runtime 1.19 supports the hooks of DeepSpeed up to {last}, but {installed[1]} "
            "is installed; use ZeRO 0, 1 or 2"
        )


def check_model(options: OrtOptions, model: torch.nn.Module) -> None:
    """Refuse options that need CUDA for a model on the CPU. Raises UnsupportedModelError."""
    given = _given(options)
    needs_cuda = [given[name] for name in _NEED_CUDA if name in given]
    on_cpu = [name for name, parameter in model.named_parameters() if parameter.device.type == "cpu"]
    if needs_cuda and on_cpu:
        raise UnsupportedModelError(
            f"{needs_cuda[0]} needs CUDA, and {type(model).__name__} is on the CPU; move it to a GPU or leave out "
            "that option"
        )


def check_arguments(options: OrtOptions, args: "TrainingArguments") -> None:
    """Refuse Trainer arguments that conflict with ORT options.

    Raises:
        MemOptError: DDP would search the autograd graph for parameters that are not in it.
    """
    hidden = [name for name in _HIDE_PARAMETERS if getattr(options, name)]
    with_ddp = args.world_size > 1 and not args.deepspeed
    if hidden and with_ddp and args.ddp_find_unused_parameters is not False:
        raise MemOptError(
            f"--{hidden[0]} with {args.world_size} processes: DDP would find all parameters unused; "
            "add --ddp_find_unused_parameters false"
        )


PREFIX = "ORTMODULE_"


class EnvOption(NamedTuple):
    """An environment variable of ORT and the corresponding option.

    Attributes:
        variable: name of the variable, without `ORTMODULE_`.
        option: name of the corresponding field of `OrtOptions`.
        read: converts the variable's text to the option's value; raises a ValueError that names the allowed values.
        passed: whether ORT reads the value from this variable; otherwise the engine implements the option.
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
        """Returns the name of the attribute of ORT's `_RuntimeOptions` that holds the value; it may not exist."""
        return _ATTRIBUTES.get(self.variable, self.variable.lower())


# Attributes of `_RuntimeOptions` that are not named like their variable.
_ATTRIBUTES = {
    "ENABLE_MEM_EFFICIENT_GRAD_MGMT": "enable_mem_efficient_grad_management",
    "ENABLE_ZERO_STAGE3": "enable_zero_stage3_support",
    "USE_TRITON": "enable_triton",
}


def _one_of(values: Mapping[str, Any], allowed: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text not in values:
            raise ValueError(f"allowed: {allowed}")
        return values[text]

    return read


_switch = _one_of({"0": False, "1": True}, "0 and 1")
_level = _one_of({"0": 0, "1": 1, "2": 2}, "0, 1 and 2")
# ORT's log levels to those of --memory_opt_log_level, whose least verbose level is `warning`.
_LOG_LEVELS = {"VERBOSE": "verbose", "DEVINFO": "devinfo", "INFO": "info"} | dict.fromkeys(
    ("WARNING", "ERROR", "FATAL"), "warning"
)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("allowed: whole numbers") from None


def _fallback(text: str) -> bool:
    unsupported = (f"FALLBACK_UNSUPPORTED_{what}" for what in ("DEVICE", "DATA", "TORCH_MODEL", "ONNX_MODEL"))
    allowed = ("FALLBACK_DISABLE", *unsupported, "FALLBACK_BAD_INITIALIZATION")
    if text not in allowed:
        forced = "; the forced policies are for ONNX Runtime's own tests" if "FORCE_TORCH" in text else ""
        raise ValueError(f"allowed: {', '.join(allowed)}{forced}")
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

# Other variables of ORT, and names easily mistaken for one, with a remark for the user.
_NOT_USED = {
    "PRINT_INPUT_DENSITY": "not used; --log_input_density shows it",
    "PRINT_MEMORY_STATS": "not used; --log_memory_phases shows them",
    "FALLBACK_RETRY": "not used; after --ort_fallback has fallen back, a changed model is tried again",
    "JSON_CONFIG_PATH": "not used; ONNX Runtime reads it only in load_config_from_json, so give the flags instead",
    "IS_DETERMINISTIC": "not a variable of ONNX Runtime, which follows torch.use_deterministic_algorithms()",
    "TORCH_CPP_DIR": "not a variable of ONNX Runtime; OPTIMUM_MEMOPT_CACHE sets the folder of its extensions",
    "EXTERNAL_TORCH_CPP_EXTENSION_DIR": "not read by ONNX Runtime; OPTIMUM_MEMOPT_CACHE sets their folder",
    "EXTERNAL_TORCH_CUDA_EXTENSION_DIR": "not read by ONNX Runtime; OPTIMUM_MEMOPT_CACHE sets their folder",
}
# Variables that ORT reads once, when it is imported, for the whole process.
SDPA_FALLBACK = f"{PREFIX}ATEN_SDPA_FALLBACK"
_PROCESS_WIDE = {
    "ATEN_SDPA_FALLBACK": "for all models of this process, sdpa runs as torch's memory-efficient attention",
    "TRITON_DEBUG": "for all models of this process, the Triton kernels of --ort_triton are written to triton_debug/",
}
KNOWN = tuple(PREFIX + name for name in (*(option.variable for option in ENV_OPTIONS), *_NOT_USED, *_PROCESS_WIDE))


def from_environment(options: OrtOptions, environ: Mapping[str, str]) -> tuple[OrtOptions, tuple[str, ...]]:
    """Override options with the values of ORT's environment variables.

    Args:
        options: a `MemOptOptions`; not modified.
        environ: like `os.environ`; an empty variable counts as unset.

    Returns:
        A checked copy with the variables' values, and a log line for each variable.

    Raises:
        MemOptError: a variable has an invalid value; the message names both.
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
    if SDPA_FALLBACK in given and (reason := installation.cuda_missing()):
        raise MemOptError(
            f"{SDPA_FALLBACK}={given[SDPA_FALLBACK]} in the environment: torch's memory-efficient attention needs "
            f"CUDA, and {reason}; unset it"
        )
    remarks.extend(_other_remarks(given))
    return effective, tuple(remarks)


def _decide_between_plans(options: Any, effective: Any, given: Mapping[str, str]) -> tuple[str, ...]:
    """Drop the flag for a level if the environment has a config, and vice versa, since they are mutually exclusive;
    returns a log line if one was dropped."""
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
    """Returns the environment that ORT sees for one model: all variables but the process-wide ones; None: unset.

    ORT's own plans and fallback are off, since the engine implements both; ORT's fallback covers few errors.
    """
    values: dict[str, str | None] = {name: None for name in KNOWN if name.removeprefix(PREFIX) not in _PROCESS_WIDE}
    values |= {
        f"{PREFIX}FALLBACK_POLICY": "FALLBACK_DISABLE",
        f"{PREFIX}MEMORY_OPT_LEVEL": "0",
        # By default ORT runs the first batch's graph for every later batch, even with other keyword arguments, int32
        # ids or no labels. With the checks it builds a new graph for these; new shapes alone do not need one.
        f"{PREFIX}SKIPCHECK_POLICY": NO_SKIP,
    }
    for env_option in ENV_OPTIONS:
        value = getattr(options, env_option.option, None)
        if env_option.passed and value is not None:
            values[env_option.name] = str(int(value)) if isinstance(value, bool) else str(value)
    return values


def ignored_options(options: OrtOptions, runtime_options: Any) -> tuple[str, ...]:
    """Returns the flags that ORT silently ignored or changed.

    Args:
        options: the requested options.
        runtime_options: ORT's `_RuntimeOptions`, created while `variables` were set.
    """
    given = ((each, getattr(options, each.option)) for each in ENV_OPTIONS if each.passed)
    return tuple(
        f"--{each.option} {value}"
        for each, value in given
        if value is not None and getattr(runtime_options, each.attribute, value) != value
    )
