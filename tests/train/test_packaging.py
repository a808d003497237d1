"""The files of a wheel: an editable install would hide a package that `setup.cfg` forgets."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.cfg", "pyproject.toml", "LICENSE", "README.md", "optimum", "optimum_memopt")
COMMAND = "optimum/commands/register/register_memopt.py"


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory) -> set[str]:
    """Returns the file names in a wheel built from a copy, since setuptools writes files into its source folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*build, "-w", str(target), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = target.glob("optimum_memopt-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_module_the_pages_template_and_the_mark_for_type_checkers_are_in_the_wheel(wheel_files):
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "optimum_memopt").rglob("*.py")}
    assert modules and modules <= wheel_files
    assert {"optimum_memopt/report/page.html.jinja", "optimum_memopt/py.typed"} <= wheel_files


def test_only_the_package_is_installed(wheel_files):
    """Only the package and its command are installed, and nothing shadows the `optimum` that the command extends."""
    assert {name for name in wheel_files if name.startswith("optimum/")} == {COMMAND}
    tops = {name.split("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"optimum", "optimum_memopt"}
