from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from invpool import compile as compile_room
from invpool.algorithms import find_algorithm
from invpool.algorithms.three_pass import ThreePassPlan
from invpool.compile import (
    NVCC_VARIABLE,
    Resources,
    Target,
    compile_source,
    find_nvcc,
    has_pycuda,
    nvcc_argv,
    nvcc_version,
    parse_resources,
)
from invpool.errors import CompileError, CompilerNotFoundError
from invpool.render import render_kernel
from invpool.spec import PoolSpec

TINY = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] = 2 * x[threadIdx.x]; }\n'


def test_exact_argv() -> None:
    assert nvcc_argv(Path("/opt/nvcc"), Target("sm_90")) == [
        "/opt/nvcc",
        "--cubin",
        "-std=c++17",
        "-O3",
        "-gencode=arch=compute_90,code=sm_90",
        "-Xptxas=-v",
        "kernel.cu",
    ]
    assert nvcc_argv(Path("nvcc"), Target("sm_90a"))[4] == "-gencode=arch=compute_90a,code=sm_90a"
    assert nvcc_argv(Path("nvcc"), Target.ptx("sm_75")) == [
        "nvcc",
        "--ptx",
        "-std=c++17",
        "-O3",
        "-gencode=arch=compute_75,code=compute_75",
        "kernel.cu",
    ]


def test_resources_as_ptxas_words_them() -> None:
    text = """ptxas info    : Compiling entry function 'f' for 'sm_90'
ptxas info    : Function properties for f
    72 bytes stack frame, 176 bytes spill stores, 128 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 72 bytes cumulative stack size, 512 bytes smem"""
    assert parse_resources(text) == Resources(64, 176, 128, 72, 512)
    assert parse_resources("nothing") is None


def _program(path: Path, body: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in (NVCC_VARIABLE, "CUDA_HOME", "CUDA_ROOT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(compile_room.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(compile_room, "_pypi_nvcc", lambda: None)


def test_search_order(no_nvcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        CompilerNotFoundError, match=r"no nvcc that runs was found; install one with: pip install 'invpool\[nvcc\]'"
    ):
        find_nvcc()
    answer = "echo 'Cuda compilation tools, release 13.0, V13.0.88'"
    pypi = _program(tmp_path / "pypi" / "nvcc", answer)
    monkeypatch.setattr(compile_room, "_pypi_nvcc", lambda: pypi)
    assert find_nvcc() == pypi
    broken = _program(tmp_path / "broken" / "nvcc", "exec /usr/local/gone/nvcc")
    monkeypatch.setattr(compile_room.shutil, "which", lambda name, path=None: str(broken))
    assert find_nvcc() == pypi
    on_path = _program(tmp_path / "path" / "nvcc", answer)
    monkeypatch.setattr(compile_room.shutil, "which", lambda name, path=None: str(on_path))
    assert find_nvcc() == on_path
    root = _program(tmp_path / "root" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path / "root"))
    assert find_nvcc() == root
    explicit = _program(tmp_path / "explicit")
    monkeypatch.setenv(NVCC_VARIABLE, str(explicit))
    assert find_nvcc() == explicit
    monkeypatch.setenv(NVCC_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(CompilerNotFoundError, match="not an executable file"):
        find_nvcc()


def test_what_does_not_answer_like_nvcc(tmp_path: Path) -> None:
    with pytest.raises(CompilerNotFoundError, match="does not answer like nvcc: 'hello'"):
        nvcc_version(_program(tmp_path / "nvcc", "echo hello"))
    with pytest.raises(CompilerNotFoundError, match="cannot be run"):
        nvcc_version(tmp_path / "absent")


def test_an_nvcc_that_hangs_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_room, "_VERSION_TIMEOUT", 0.1)
    with pytest.raises(CompilerNotFoundError, match=r"nvcc --version did not answer in 0 s; install one with"):
        nvcc_version(_program(tmp_path / "nvcc", "exec sleep 20"))


def test_a_compiler_error_comes_first_and_the_source_is_kept() -> None:
    source = TINY.replace("2 *", "2 * undeclared *")
    with pytest.raises(CompileError) as caught:
        compile_source(source, Target("sm_90"))
    lines = str(caught.value).splitlines()
    assert 'identifier "undeclared" is undefined' in lines[0]
    assert "kernel.cu(1): error" in lines[0]
    assert "-gencode=arch=compute_90,code=sm_90" in lines[1]
    kept = Path(lines[2].split("source:")[1].strip())
    assert kept.read_text() == source
    assert "hint:" in lines[3]


def test_an_arch_that_nvcc_does_not_know_is_named() -> None:
    with pytest.raises(CompileError, match="take a newer toolkit, or leave the arch out"):
        compile_source(TINY, Target("sm_35"))


def test_a_missing_host_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc preprocesses with g++; on a bare machine that is the first thing that fails."""
    monkeypatch.setattr(compile_room, "has_pycuda", lambda: False)
    nvcc = _program(tmp_path / "nvcc", "echo 'sh: 1: gcc: not found' >&2; exit 1")
    with pytest.raises(CompileError, match="nvcc needs a host compiler: apt-get install g\\+\\+"):
        compile_source(TINY, Target("sm_90"), nvcc)


def test_code_is_reproducible_and_reported() -> None:
    first, second = (compile_source(TINY, Target("sm_90")) for _ in range(2))
    assert first.code == second.code
    assert first.code[:4] == b"\x7fELF"
    assert first.resources is not None
    assert first.resources.registers > 0
    ptx = compile_source(TINY, Target.ptx("sm_75"))
    assert b".target sm_75" in ptx.code
    assert ptx.resources is None


@pytest.mark.skipif(not has_pycuda(), reason="PyCUDA is not installed (extra 'cuda')")
def test_pycuda_and_subprocess_give_the_same_bytes() -> None:
    source = render_kernel(find_algorithm("three_pass"), PoolSpec(33, 6), ThreePassPlan("forward"))
    for target in (Target("sm_90"), Target.ptx("sm_75")):
        by_pycuda = compile_room._compile_with_pycuda(source, target, find_nvcc())
        by_subprocess = compile_room._compile_with_subprocess(source, target, find_nvcc())
        assert by_pycuda is not None
        assert by_pycuda == by_subprocess


@pytest.mark.skipif(not has_pycuda(), reason="PyCUDA is not installed (extra 'cuda')")
def test_pycuda_leaves_the_error_message_to_the_subprocess() -> None:
    with pytest.raises(CompileError, match="undeclared"):
        compile_source(TINY.replace("2 *", "undeclared *"), Target("sm_90"))


def test_pycuda_is_not_imported_by_planning_and_rendering(tmp_path: Path) -> None:
    code = (
        "import sys, invpool, invpool.generate, invpool.cli.app; "
        "sys.exit(any(name.split('.')[0] == 'pycuda' for name in sys.modules))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(compile_room.__file__).parent.parent)}
    import sys

    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path, env=env).returncode == 0
