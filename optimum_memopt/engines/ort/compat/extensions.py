"""Builds, finds and loads the two torch C++ extensions of ORTModule.

`torch_interop_utils` runs a user's `torch.autograd.Function` inside ONNX Runtime's graph, `aten_op_executor` runs
single torch operators there. onnxruntime-training ships them as sources only, and its own build writes into
site-packages and fails on torch >= 2.7. This module builds a patched copy in the user's cache.

The sources of onnxruntime-training 1.19.2 were written for torch ~2.4. Each replacement compiles before and after the
change in torch that makes it necessary (`auto`, `decltype`, functions that torch exports), so none depends on the
installed version. Built and run on torch 2.13.0; compiled against 2.9.1 and 2.15.0.

This module does not import `onnxruntime.training`, whose import already needs the extensions.
"""

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock

from optimum_memopt.cache_files import CACHE_VARIABLE, cache_folder
from optimum_memopt.engines.ort.compat.installation import onnxruntime_build, onnxruntime_dir
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import announced

# The package that onnxruntime imports the extensions from.
PACKAGE = "onnxruntime.training.ortmodule.torch_cpp_extensions"
NAMES = ("aten_op_executor", "torch_interop_utils")
BUILD_COMMAND = "optimum-cli memopt env --build"


class Substitution(NamedTuple):
    """A replacement in a source file.

    Attributes:
        file: path below the wheel's `torch_cpp_extensions/cpu`.
        old: text or pattern that occurs exactly once in the file.
    """

    file: str
    old: str | re.Pattern[str]
    new: str


# Each comment starts with the torch release that made the substitution necessary. Since 2.7, symbols of
# libtorch_python.so without TORCH_PYTHON_API are hidden (https://github.com/pytorch/pytorch/issues/154105): undefined
# symbol when the extension is imported.
SUBSTITUTIONS: tuple[Substitution, ...] = (
    # 2.14: torch's headers need C++20; without a -std flag torch's BuildExtension sets the right one
    # (https://github.com/pytorch/pytorch/pull/178150).
    Substitution("torch_interop_utils/setup.py", '["-O3", "-std=c++17"]', '["-O3"]'),
    # 2.7: torch::utils::tensor_fromDLPack is hidden; the replacement uses exported functions only.
    Substitution(
        "torch_interop_utils/custom_function_shared.h",
        "#include <torch/extension.h>\n",
        """#include <ATen/DLConvertor.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/extension.h>

// The tensor takes ownership of the capsule's memory; renaming tells the capsule's destructor (DLPack's protocol).
inline at::Tensor tensor_from_capsule(PyObject* capsule) {
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  TORCH_CHECK(managed != nullptr, "not a DLPack capsule that still owns its tensor");
  at::Tensor tensor = at::fromDLPack(managed);
  PyCapsule_SetName(capsule, "used_dltensor");
  return tensor;
}
""",
    ),
    *(
        Substitution(
            f"torch_interop_utils/{file}",
            "torch::utils::tensor_fromDLPack(args[arg_index])",
            "tensor_from_capsule(args[arg_index])",
        )
        for file in ("custom_function_fw.cc", "custom_function_bw.cc")
    ),
    # 2.7: typeinfo of PyNode is hidden. It was used to read ctx.dirty_tensors, which torch has always cleared by then,
    # so no input counted as dirty, and the second step of an in-place function failed (a leaf Variable that requires
    # grad has been used in an in-place operation).
    Substitution(
        "torch_interop_utils/custom_function_fw.cc",
        re.compile(r"static std::vector<bool> are_tensors_marked_as_dirty\(.*?\n}\n", re.DOTALL),
        """static std::vector<bool> are_tensors_marked_as_dirty(at::Tensor&, std::vector<at::Tensor>& inputs) {
  std::vector<bool> dirty;
  for (const auto& tensor : inputs) {
    // Clones made for this call: version 0, unless the function wrote into them.
    dirty.push_back(tensor._version() > 0);
  }
  return dirty;
}
""",
    ),
    # 2.7: typeinfo of PyNode is hidden. 2.13: PyNode no longer holds its Python object in a field `obj`
    # (https://github.com/pytorch/pytorch/pull/181390), and nodes are owned by c10::intrusive_ptr.
    Substitution(
        "torch_interop_utils/custom_function_fw.cc",
        """  const std::shared_ptr<torch::autograd::Node>& cdata = tensor_owning_ctx.value().grad_fn();
  auto py_node_fn = dynamic_cast<torch::autograd::PyNode*>(cdata.get());
  TORCH_CHECK(py_node_fn != nullptr, "cdata is not PyNode type.");

  // ret is THPFunction
  THPFunction* py_fn = (THPFunction*)py_node_fn->obj;
  py::object ret = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(cdata));

  TORCH_CHECK(py_fn != nullptr, "cdata is not THPFunction type.");
""",
        """  const auto& cdata = tensor_owning_ctx.value().grad_fn();
  py::object ret = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(cdata));
  TORCH_CHECK(THPFunction_Check(ret.ptr()), "cdata is not PyNode type.");
  THPFunction* py_fn = (THPFunction*)ret.ptr();
""",
    ),
    # 2.13: THPFunction no longer refers weakly to its node (same pull request); the node is the output's grad_fn.
    Substitution(
        "torch_interop_utils/custom_function_fw.cc",
        "auto saved_for = py_fn->cdata.lock();",
        "const auto& saved_for = cdata;",
    ),
    # Any torch: the gradient of an unused output always had the shape of the first batch, which gives an error or a
    # wrong broadcast for a batch of another shape. torch's own record of the call has the right shape
    # (https://github.com/pytorch/pytorch/blob/v2.9.1/torch/csrc/autograd/python_function.cpp).
    Substitution(
        "torch_interop_utils/custom_function_bw.cc",
        """          auto& config = fw_kernel_info.materialize_grads_config.at(arg_index - 1);
          tensor = at::zeros(std::get<0>(config), std::get<1>(config));  // shift by 1 to skip context input.
""",
        """          if (THPFunction_Check(ctx.ptr())) {
            at::OptionalDeviceGuard guard;
            tensor = reinterpret_cast<THPFunction*>(ctx.ptr())->output_info.at(arg_index - 1).zeros(guard);
          } else {
            auto& config = fw_kernel_info.materialize_grads_config.at(arg_index - 1);
            tensor = at::zeros(std::get<0>(config), std::get<1>(config));
          }
""",
    ),
    # 2.13: AutogradMeta::grad_fn_ is an intrusive_ptr (https://github.com/pytorch/pytorch/pull/181782), which does not
    # convert to shared_ptr.
    Substitution(
        "torch_interop_utils/ctx_pool.h",
        "std::unordered_map<size_t, std::shared_ptr<torch::autograd::Node>> grad_fns_;",
        "std::unordered_map<size_t, decltype(torch::autograd::AutogradMeta::grad_fn_)> grad_fns_;",
    ),
)


def substitute(text: str, substitution: Substitution) -> str:
    """Returns `text` with the substitution applied. Raises MemOptError unless the old text occurs exactly once, as in
    the sources of onnxruntime-training 1.19.2."""
    old = substitution.old
    pattern = old if isinstance(old, re.Pattern) else re.compile(re.escape(old))
    patched, count = pattern.subn(lambda _: substitution.new, text)
    if count != 1:
        first_line = (old if isinstance(old, str) else old.pattern).strip().splitlines()[0]
        raise MemOptError(
            f"{substitution.file}: expected once, found {count} times: `{first_line}`; "
            "the torch extensions can be built from the sources of onnxruntime-training 1.19.2 only"
        )
    return patched


def patch_source(file: str, text: str) -> str:
    """Returns the text of `file` (a path below the wheel's `torch_cpp_extensions/cpu`) with its substitutions
    applied."""
    for substitution in SUBSTITUTIONS:
        if substitution.file == file:
            text = substitute(text, substitution)
    return text


def sources_dir() -> Path:
    """Returns the folder of the wheel's C++ sources. Raises MemOptError if onnxruntime-training is not installed."""
    package = onnxruntime_dir()
    sources = package and package.joinpath("training", "ortmodule", "torch_cpp_extensions", "cpu")
    if not (sources and sources.is_dir()):
        raise MemOptError(
            "the torch extensions are built from the sources in onnxruntime-training, which is not installed; "
            "get it with: pip install onnxruntime-training-cpu==1.19.2 onnx"
        )
    return sources


def cache_root() -> Path:
    """Returns the package's cache folder.

    Raises:
        MemOptError: there is no home folder. A temporary folder is no alternative for programs: other users may write
            to it.
    """
    if (folder := cache_folder()) is None:
        raise MemOptError(f"the user has no home folder for the torch extensions; set {CACHE_VARIABLE}")
    return folder


def cache_dir() -> Path:
    """Returns the folder of the extensions for this exact torch, onnxruntime and Python; it may not exist yet."""
    accelerator = torch.version.cuda or torch.version.hip or "cpu"
    sources = hashlib.sha256(repr(SUBSTITUTIONS).encode()).hexdigest()[:8]
    key = (
        f"torch-{torch.__version__}-{accelerator}",
        f"ort-{onnxruntime_build().get('__version__', 'none')}",
        sysconfig.get_config_var("SOABI"),
        sources,
    )
    return cache_root() / "torch_extensions" / "_".join(key)


def expected_paths(folder: Path) -> dict[str, Path]:
    """Returns the paths of the extensions in `folder` after a build, by name."""
    return {name: folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}" for name in NAMES}


def find() -> dict[str, Path] | None:
    """Returns the paths of the built extensions by name; None unless both exist."""
    try:
        paths = expected_paths(cache_dir())
    except MemOptError:
        return None
    return paths if all(path.is_file() for path in paths.values()) else None


def check_compiler() -> str:
    """Returns the C++ compiler that a build would call.

    Raises:
        MemOptError: no compiler or no Python headers; the message says what to install.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        raise MemOptError(
            f"no C++ compiler: `{compiler}` is not on PATH; install one (Debian, Ubuntu: apt-get install g++; "
            "Fedora: dnf install gcc-c++; conda: conda install -c conda-forge gxx) or name it in CXX"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise MemOptError(
            "no Python headers (Python.h): install them (Debian, Ubuntu: apt-get install python3-dev; "
            "Fedora: dnf install python3-devel)"
        )
    return compiler


def build() -> dict[str, Path]:
    """Compile both extensions into `cache_dir()` unless they exist; returns their paths by name.

    Takes 1 to 3 minutes. Concurrent processes wait for the first one and use its result. Files appear atomically.

    Raises:
        MemOptError: onnxruntime-training or a compiler is missing, or the compilation failed; the message then has the
            first error and the path of the compiler's full output.
    """
    if built := find():
        return built
    sources, folder = sources_dir(), cache_dir()
    check_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    task, waiting = "the torch extensions", "waiting for another process that builds them"
    announcement = announced(f"building {task}", f"built {task}", str(folder), stage=waiting)
    with announcement as progress, FileLock(folder / "lock"):
        if built := find():
            return built
        work, log = folder / "build", folder / "build.log"
        # Remove the remains of a killed build; the lock guarantees that no other process uses the folder.
        shutil.rmtree(work, ignore_errors=True)
        try:
            for source in sorted(path for name in NAMES for path in (sources / name).iterdir()):
                if source.suffix in (".py", ".cc", ".h"):
                    target = work / source.relative_to(sources)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    text = source.read_text(encoding="utf-8")
                    target.write_text(patch_source(f"{target.parent.name}/{source.name}", text), encoding="utf-8")
            for number, name in enumerate(NAMES, 1):
                progress.stage = f"{name} ({number}/{len(NAMES)})"
                _compile(work / name, log)
            for name, path in expected_paths(folder).items():
                os.replace(work / name / "out" / path.name, path)
            log.unlink()
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return expected_paths(folder)


def load(paths: dict[str, Path]) -> None:
    """Import the built extensions under the names that onnxruntime imports; a second call has no effect.

    Raises:
        MemOptError: a file cannot be loaded, for instance one that another machine built in a shared home folder.
    """
    for name, path in paths.items():
        full_name = f"{PACKAGE}.{name}"
        module = sys.modules.get(full_name)
        if module is None:
            spec = importlib.util.spec_from_file_location(full_name, path)
            try:
                assert spec is not None and spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            except ImportError as error:
                raise MemOptError(f"{error}; delete {path.parent} and run: {BUILD_COMMAND}") from error
            sys.modules[full_name] = module
        # If the parent is imported later, its import finds the module in sys.modules.
        if parent := sys.modules.get(PACKAGE):
            setattr(parent, name, module)


def _compile(folder: Path, log: Path) -> None:
    """Build the extension in `folder` and import it, each in a subprocess with output to `log`.

    The import detects symbols that torch hides; the linker does not.
    """
    # Python's own flags include debug information, which costs 40 MB of files and half a minute.
    environment = {**os.environ, "CFLAGS": f"{os.environ.get('CFLAGS', '')} -g0"}
    for arguments in (
        ["setup.py", "build_ext", "--build-lib", "out", "--build-temp", "tmp"],
        ["-c", f"import sys, torch; sys.path.insert(0, 'out'); import {folder.name}"],
    ):
        with log.open("w", encoding="utf-8") as output:
            command = [sys.executable, *arguments]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            reason = first_error(log.read_text(encoding="utf-8", errors="replace"))
            raise MemOptError(f"building {folder.name} failed: {reason} (full output: {log})")


def first_error(output: str) -> str:
    """Returns the first error line in a compiler's or linker's output; the last line if there is none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    error = re.compile(r"\b(fatal )?error: |undefined reference|cannot find -l|No space left")
    return next(filter(error.search, lines), lines[-1] if lines else "no output")
