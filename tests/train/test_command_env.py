"""`optimum-cli memopt env`, run in processes as a user starts them."""

import json
import os
import subprocess
import sys
import sysconfig
from argparse import ArgumentParser
from pathlib import Path

import pytest

from optimum_memopt import MemOptError
from optimum_memopt.cache_files import CACHE_VARIABLE
from optimum_memopt.commands.memopt import EnvCommand
from optimum_memopt.engines.compile.capture.backend import check_compiler
from optimum_memopt.engines.ort.compat import extensions, installation
from optimum_memopt.engines.ort.compat.installation import clash, install_command, missing
from tests import fresh_process

CLI = "import sys; from optimum.commands.optimum_cli import main; sys.argv[0] = 'optimum-cli'; main()"
TRAINING = "onnxruntime-training-cpu"
needs_ort = pytest.mark.skipif(bool(missing()), reason="no onnxruntime-training")


def cli(*arguments: str, cache: Path, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    """Run `optimum-cli memopt env …` with its own cache; `path` comes first on the module search path."""
    environment = {**os.environ, CACHE_VARIABLE: str(cache), **variables}
    if path:
        environment["PYTHONPATH"] = str(path)
    return fresh_process.run("-c", CLI, "memopt", "env", *arguments, environment=environment, cwd=cache.parent)


def pretend_installed(folder: Path, name: str, version: str) -> None:
    """Write the metadata of a second package whose files another one has overwritten."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def works(report: dict) -> dict[str, dict]:
    return {ability["what"]: ability for ability in report["works"]}


def test_clash():
    assert clash({}) == clash({TRAINING: "1.19.2", "onnx": "1.23", "onnxruntime": None}) == []
    assert clash({TRAINING: "1.19.2", "onnxruntime": "1.30"}) == [TRAINING, "onnxruntime"]
    assert clash({TRAINING: "1.19.2", "onnxruntime-training": "1.19.2"}) == ["onnxruntime-training", TRAINING]


@pytest.mark.parametrize(
    "versions, cuda, command",
    [
        ({}, None, f"pip install {TRAINING}==1.19.2 onnx"),
        ({}, "13.0", "pip install onnxruntime-training==1.19.2 onnx"),
        ({"onnxruntime": "1"}, None, f"pip uninstall -y onnxruntime && pip install {TRAINING}==1.19.2 onnx"),
        (
            {"onnxruntime": "1", TRAINING: "1"},
            None,
            f"pip uninstall -y {TRAINING} onnxruntime && pip install {TRAINING}==1.19.2 onnx",
        ),
    ],
)
def test_the_command_leaves_one_onnxruntime(versions, cuda, command):
    assert install_command(versions, cuda) == command


@needs_ort
def test_what_works_without_the_extensions_and_how_to_get_them(tmp_path):
    done = cli("--json", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["installed"]["python"] == sys.version.split()[0]
    assert report["installed"]["onnxruntime"] is None
    assert report["extensions"] == {}
    abilities = works(report)
    assert abilities["ort engine"]["works"]
    custom = abilities["custom torch.autograd.Function"]
    assert not custom["works"] and custom["command"] == extensions.BUILD_COMMAND
    assert abilities["memory-efficient gradient management"] == {
        **custom,
        "what": "memory-efficient gradient management",
    }
    cuda_options = abilities["efficient and flash attention, Triton, tuning"]
    assert cuda_options["works"] is not bool(installation.cuda_missing())


@needs_ort
@pytest.mark.nightly
def test_the_table_names_a_missing_compiler_and_the_command(tmp_path):
    done = cli(cache=tmp_path / "cache", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert "apt-get install g++" in " ".join(done.stdout.split())
    assert f"custom torch.autograd.Function: {extensions.BUILD_COMMAND}" in done.stdout
    assert "C++ compiler              -" in done.stdout


@needs_ort
@pytest.mark.nightly
def test_two_packages_that_overwrite_each_other_are_told(tmp_path):
    pretend_installed(tmp_path / "second", "onnxruntime", "1.30.0")
    report = json.loads(cli("--json", cache=tmp_path / "cache", path=tmp_path / "second").stdout)
    engine = works(report)["ort engine"]
    assert not engine["works"]
    assert "onnxruntime are installed together" in engine["why"]
    assert engine["command"].startswith("pip uninstall -y ")
    assert not works(report)["custom torch.autograd.Function"]["works"]


@needs_ort
@pytest.mark.nightly
def test_an_onnxruntime_that_cannot_be_imported_is_no_traceback(tmp_path):
    broken = tmp_path / "first" / "onnxruntime"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libonnxruntime.so: cut off')\n")
    done = cli("--json", cache=tmp_path / "cache", path=tmp_path / "first")
    assert done.returncode == 0, done.stderr
    engine = works(json.loads(done.stdout))["ort engine"]
    assert not engine["works"] and "libonnxruntime.so: cut off" in engine["why"]


def test_a_failed_build_is_one_line_and_exit_code_1(tmp_path):
    done = cli("--build", cache=tmp_path / "cache", CXX="no-such-compiler")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


@needs_ort
def test_build_finds_what_is_built_and_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = extensions.cache_dir()
    folder.mkdir(parents=True)
    for path in extensions.expected_paths(folder).values():
        path.touch()
    done = cli("--build", "--json", cache=tmp_path / "cache", CXX="no-such-compiler")
    assert json.loads(done.stdout)["extensions"] == {n: str(p) for n, p in extensions.find().items()}


def in_this_process(capsys, *arguments: str) -> str:
    parser = ArgumentParser()
    EnvCommand.parse_args(parser)
    EnvCommand(None, parser.parse_args(arguments), from_defaults_factory=True, parser=parser).run()
    return capsys.readouterr().out


def test_the_compile_engine_is_there_without_onnxruntime_and_recommended(monkeypatch, capsys):
    monkeypatch.setattr(installation, "installed_version", lambda names: None)
    report = json.loads(in_this_process(capsys, "--json"))
    abilities = works(report)
    assert not abilities["ort engine"]["works"]
    for what in ("compile engine", "compiler aot_eager", "bf16, fp16 on the compile engine", "attention kernels"):
        assert abilities[what]["works"] and abilities[what]["why"], what
    assert report["advice"][0].startswith("recommended: --memory_opt_engine compile, for every model ")
    assert report["advice"][-1].startswith("--memory_opt_engine auto selects compile (")
    assert len(report["advice"]) == 2
    assert "which engine:\n  recommended: --memory_opt_engine compile" in in_this_process(capsys)


def test_what_inductor_lacks_and_the_command_that_gets_it(monkeypatch, capsys, tmp_path):
    what = "compiler inductor on the CPU"
    with monkeypatch.context() as patched:
        patched.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
        headers = works(json.loads(in_this_process(capsys, "--json")))[what]
        if not headers["command"].startswith("apt-get install g++"):
            assert "Python.h" in headers["why"] and headers["command"].endswith("-dev")
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler = works(json.loads(in_this_process(capsys, "--json")))[what]
    assert not compiler["works"] and compiler["command"].startswith("apt-get install g++")
    with pytest.raises(MemOptError, match=r"--memory_opt_compiler inductor: there is no C\+\+ compiler"):
        check_compiler("inductor", "cpu")


def test_the_command_starts_without_loading_torch(tmp_path):
    script = "import sys; import optimum_memopt.commands.memopt; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
