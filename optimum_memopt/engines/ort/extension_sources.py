"""Patches for a copy of the wheel's C++ sources, applied before they are compiled.

onnxruntime-training 1.19.2 was written for torch ~2.4. Every replacement compiles before and after the change in torch
that makes it necessary (`auto`, `decltype`, functions that torch exports), so none depends on the installed version.
Built and run on torch 2.13.0; compiled against 2.9.1 and 2.15.0.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from optimum_memopt.errors import MemOptError

# torch >= 2.7 hides symbols of libtorch_python.so without TORCH_PYTHON_API.
_HIDDEN = "https://github.com/pytorch/pytorch/issues/154105"
# torch >= 2.13: autograd nodes are owned by c10::intrusive_ptr instead of std::shared_ptr ...
_INTRUSIVE = "https://github.com/pytorch/pytorch/pull/181782"
# ... and PyNode no longer holds its Python object in a field `obj`, nor THPFunction its node weakly.
_WRAPPING = "https://github.com/pytorch/pytorch/pull/181390"


@dataclass(frozen=True)
class Substitution:
    """A replacement in one file.

    Args:
        file: path below the wheel's `torch_cpp_extensions/cpu`.
        old: text or pattern that occurs exactly once in that file.
        new: the replacement.
        since: first torch release with which `old` fails; `any`: fails with all.
        why: how it fails.
        link: pull request or issue of torch.
    """

    file: str
    old: str | re.Pattern[str]
    new: str
    since: str
    why: str
    link: str


SUBSTITUTIONS: tuple[Substitution, ...] = (
    Substitution(
        file="torch_interop_utils/setup.py",
        old='["-O3", "-std=c++17"]',
        new='["-O3"]',
        since="2.14",
        why="torch's headers need C++20; without a -std flag torch's BuildExtension sets the right one",
        link="https://github.com/pytorch/pytorch/pull/178150",
    ),
    Substitution(
        file="torch_interop_utils/custom_function_shared.h",
        old="#include <torch/extension.h>\n",
        new="""#include <ATen/DLConvertor.h>
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
        since="2.7",
        why="replaces torch::utils::tensor_fromDLPack in the two files below, with exported functions only",
        link=_HIDDEN,
    ),
    *(
        Substitution(
            file=f"torch_interop_utils/{file}",
            old="torch::utils::tensor_fromDLPack(args[arg_index])",
            new="tensor_from_capsule(args[arg_index])",
            since="2.7",
            why="torch::utils::tensor_fromDLPack is not exported: undefined symbol when the extension is imported",
            link=_HIDDEN,
        )
        for file in ("custom_function_fw.cc", "custom_function_bw.cc")
    ),
    Substitution(
        file="torch_interop_utils/custom_function_fw.cc",
        old=re.compile(r"static std::vector<bool> are_tensors_marked_as_dirty\(.*?\n}\n", re.DOTALL),
        new="""static std::vector<bool> are_tensors_marked_as_dirty(at::Tensor&, std::vector<at::Tensor>& inputs) {
  std::vector<bool> dirty;
  for (const auto& tensor : inputs) {
    // Clones made for this call: version 0, unless the function wrote into them.
    dirty.push_back(tensor._version() > 0);
  }
  return dirty;
}
""",
        since="2.7",
        why="typeinfo of PyNode is not exported: undefined symbol. It was used to read ctx.dirty_tensors, which torch "
        "has always cleared by then: no input counted as dirty, and the second step of an in-place function failed "
        "(a leaf Variable that requires grad has been used in an in-place operation)",
        link=_HIDDEN,
    ),
    Substitution(
        file="torch_interop_utils/custom_function_fw.cc",
        old="""  const std::shared_ptr<torch::autograd::Node>& cdata = tensor_owning_ctx.value().grad_fn();
  auto py_node_fn = dynamic_cast<torch::autograd::PyNode*>(cdata.get());
  TORCH_CHECK(py_node_fn != nullptr, "cdata is not PyNode type.");

  // ret is THPFunction
  THPFunction* py_fn = (THPFunction*)py_node_fn->obj;
  py::object ret = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(cdata));

  TORCH_CHECK(py_fn != nullptr, "cdata is not THPFunction type.");
""",
        new="""  const auto& cdata = tensor_owning_ctx.value().grad_fn();
  py::object ret = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(cdata));
  TORCH_CHECK(THPFunction_Check(ret.ptr()), "cdata is not PyNode type.");
  THPFunction* py_fn = (THPFunction*)ret.ptr();
""",
        since="2.7",
        why="typeinfo of PyNode is not exported (2.7): undefined symbol; PyNode::obj and shared_ptr are gone (2.13)",
        link=_WRAPPING,
    ),
    Substitution(
        file="torch_interop_utils/custom_function_fw.cc",
        old="auto saved_for = py_fn->cdata.lock();",
        new="const auto& saved_for = cdata;",
        since="2.13",
        why="THPFunction::cdata is no weak pointer any more; the node that it names is the output's grad_fn",
        link=_WRAPPING,
    ),
    Substitution(
        file="torch_interop_utils/custom_function_bw.cc",
        old="""          auto& config = fw_kernel_info.materialize_grads_config.at(arg_index - 1);
          tensor = at::zeros(std::get<0>(config), std::get<1>(config));  // shift by 1 to skip context input.
""",
        new="""          if (THPFunction_Check(ctx.ptr())) {
            at::OptionalDeviceGuard guard;
            tensor = reinterpret_cast<THPFunction*>(ctx.ptr())->output_info.at(arg_index - 1).zeros(guard);
          } else {
            auto& config = fw_kernel_info.materialize_grads_config.at(arg_index - 1);
            tensor = at::zeros(std::get<0>(config), std::get<1>(config));
          }
""",
        since="any",
        why="the gradient of an unused output always had the shape of the first batch: an error, or a wrong "
        "broadcast, as soon as the batch changes; torch's own record of this call has the right shape",
        link="https://github.com/pytorch/pytorch/blob/v2.9.1/torch/csrc/autograd/python_function.cpp",
    ),
    Substitution(
        file="torch_interop_utils/ctx_pool.h",
        old="std::unordered_map<size_t, std::shared_ptr<torch::autograd::Node>> grad_fns_;",
        new="std::unordered_map<size_t, decltype(torch::autograd::AutogradMeta::grad_fn_)> grad_fns_;",
        since="2.13",
        why="AutogradMeta::grad_fn_ is an intrusive_ptr: no conversion to shared_ptr",
        link=_INTRUSIVE,
    ),
)


def substitute(text: str, substitution: Substitution) -> str:
    """`text` with the substitution applied.

    Raises:
        MemOptError: the text does not occur exactly once: not the sources of onnxruntime-training 1.19.2.
    """
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


def patch_source(file: str, text: str, substitutions: Iterable[Substitution] = SUBSTITUTIONS) -> str:
    """The text of `file` (a path below the wheel's `torch_cpp_extensions/cpu`) with its substitutions applied."""
    for substitution in substitutions:
        if substitution.file == file:
            text = substitute(text, substitution)
    return text
