"""The one place that finds nvcc, builds its argv, runs it and reads what it says."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Final

from invpool.errors import CompileError, CompilerNotFoundError

NVCC_VARIABLE: Final = "INVPOOL_NVCC"
# Flags that change the code; ptxas -v only reports. No fast math: the sums are compensated on purpose.
CODE_FLAGS: Final = ("-std=c++17", "-O3")
_REPORT_FLAGS: Final = ("-Xptxas=-v",)
_TIMEOUT: Final = 600.0
_VERSION_TIMEOUT: Final = 60.0
_HINT: Final = (
    "install one with: pip install 'invpool[nvcc]' (it also needs g++: apt-get install g++), "
    f"or set {NVCC_VARIABLE} or CUDA_HOME"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """What a source is compiled for: the machine code of one arch, or PTX that a driver can finish."""

    arch: str
    kind: str = "cubin"

    @classmethod
    def ptx(cls, arch: str) -> Target:
        return cls(arch, "ptx")

    @property
    def name(self) -> str:
        """``sm_90``, ``sm_90a`` or ``compute_75``."""
        return self.arch if self.kind == "cubin" else self.arch.replace("sm_", "compute_")

    @property
    def flag(self) -> str:
        # -arch=sm_90a alone would also run a plain sm_90 pass, which knows no wgmma.
        return f"-gencode=arch={self.arch.replace('sm_', 'compute_')},code={self.name}"


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel; bytes a thread, but for static shared memory, which is a block's."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Machine code or PTX, and what ptxas said of it (None for PTX)."""

    code: bytes
    resources: Resources | None


@functools.lru_cache(maxsize=1)
def _pypi_nvcc() -> Path | None:
    """nvcc of the PyPI package nvidia-cuda-nvcc, which the extra ``nvcc`` installs."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvcc" and file.parent.name == "bin"), None)


def find_nvcc() -> Path:
    """nvcc by ``$INVPOOL_NVCC``, ``$CUDA_HOME``, ``$CUDA_ROOT``, PATH, ``/usr/local/cuda``, then PyPI's package.

    Raises:
        CompilerNotFoundError: none of them has one; the message says what to install.
    """
    explicit = os.environ.get(NVCC_VARIABLE)
    if explicit:
        if not os.access(explicit, os.X_OK):
            raise CompilerNotFoundError(f"{NVCC_VARIABLE} is {explicit!r}, which is not an executable file; {_HINT}")
        return Path(explicit)
    for variable in ("CUDA_HOME", "CUDA_ROOT"):
        root = os.environ.get(variable)
        if root and os.access(Path(root, "bin", "nvcc"), os.X_OK):
            return Path(root, "bin", "nvcc")
    searched = (shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin"), _pypi_nvcc())
    # A wrapper left behind by a toolkit that is gone must not hide the one that works.
    found = next((Path(path) for path in searched if path and _answers(Path(path))), None)
    if found is None:
        raise CompilerNotFoundError(f"no nvcc that runs was found; {_HINT}")
    return found


def _answers(nvcc: Path) -> bool:
    try:
        return bool(nvcc_version(nvcc))
    except CompilerNotFoundError:
        return False


@functools.lru_cache(maxsize=8)
def nvcc_version(nvcc: Path) -> str:
    """``13.0.88``.

    Raises:
        CompilerNotFoundError: the program does not answer like nvcc.
    """
    try:
        argv = [str(nvcc), "--version"]
        text = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_VERSION_TIMEOUT).stdout
    except subprocess.TimeoutExpired as error:
        raise CompilerNotFoundError(f"{nvcc} --version did not answer in {_VERSION_TIMEOUT:.0f} s; {_HINT}") from error
    except OSError as error:
        raise CompilerNotFoundError(f"{nvcc} cannot be run: {error}; {_HINT}") from error
    match = re.search(r"release [\d.]+, V([\d.]+)", text)
    if not match:
        raise CompilerNotFoundError(f"{nvcc} does not answer like nvcc: {text.strip()[:200]!r}; {_HINT}")
    return match[1]


def nvcc_options(target: Target) -> list[str]:
    """The options between ``nvcc --cubin`` (or ``--ptx``) and the file."""
    return [*CODE_FLAGS, target.flag, *(_REPORT_FLAGS if target.kind == "cubin" else ())]


def nvcc_argv(nvcc: Path, target: Target) -> list[str]:
    """The whole command, run in the folder that holds kernel.cu; PyCUDA builds the same one."""
    return [str(nvcc), f"--{target.kind}", *nvcc_options(target), "kernel.cu"]


def parse_resources(ptxas_log: str) -> Resources | None:
    """Reads ``ptxas -v`` for the one entry function of a source; None where nothing was reported."""
    used = re.search(r"Used (\d+) registers", ptxas_log)
    if not used:
        return None

    def number(pattern: str) -> int:
        match = re.search(pattern, ptxas_log)
        return int(match[1]) if match else 0

    return Resources(
        registers=int(used[1]),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        static_shared=number(r"(\d+) bytes smem"),
    )


def has_pycuda() -> bool:
    """Whether PyCUDA is installed; nothing of it is imported."""
    return importlib.util.find_spec("pycuda") is not None


# Python's record of warnings, by which PyCUDA says what ptxas used, is the whole process's: threads take turns there.
_one_listens: Final = threading.Lock()


def _compile_with_pycuda(source: str, target: Target, nvcc: Path) -> Compiled | None:
    """PyCUDA's compiler, which needs no driver; None when it fails, so that the subprocess can say why."""
    from pycuda.compiler import compile_plain

    with _one_listens, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            code: bytes = compile_plain(source, nvcc_options(target), False, str(nvcc), None, target.kind)
        except Exception:
            # Its own CompileError lives in pycuda.driver, which cannot be imported without a driver.
            return None
    return Compiled(code, parse_resources("\n".join(str(warning.message) for warning in said)))


def _compile_with_subprocess(source: str, target: Target, nvcc: Path) -> Compiled:
    folder = Path(tempfile.mkdtemp(prefix="invpool-"))
    kept = folder / "kernel.cu"
    kept.write_text(source, encoding="utf-8")
    argv = nvcc_argv(nvcc, target)
    try:
        run = subprocess.run(argv, check=False, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise CompileError(
            f"nvcc did not finish in {_TIMEOUT:.0f} s\n  command: {' '.join(argv)}\n  source:  {kept}"
        ) from error
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise CompilerNotFoundError(f"{nvcc} cannot be run: {error}; {_HINT}") from error
    said = run.stdout + run.stderr
    output = folder / f"kernel.{target.kind}"
    if run.returncode != 0 or not output.is_file():
        raise CompileError(_explain_failure(said, argv, kept))
    code = output.read_bytes()
    shutil.rmtree(folder, ignore_errors=True)
    return Compiled(code, parse_resources(said))


def _explain_failure(said: str, argv: list[str], kept: Path) -> str:
    """The first real error, then the command, the kept source and a hint."""
    lines = [line for line in said.splitlines() if line.strip()]
    first = next((line for line in lines if re.search(r"\berror\b|fatal", line, re.IGNORECASE)), None)
    hint = "the source is kept for you to look at; if the template is unchanged, this is a fault of invpool"
    if re.search(r"(gcc|g\+\+|cc1plus|host compiler).*(not found|No such file|cannot)|sh: .*not found", said):
        hint = "nvcc needs a host compiler: apt-get install g++"
    elif "unsupported gpu architecture" in said.lower():
        hint = "this nvcc does not know that arch: take a newer toolkit, or leave the arch out with --arch"
    return (
        f"{first or (lines[0] if lines else 'nvcc failed without a word')}\n"
        f"  command: {' '.join(argv)}\n  source:  {kept}\n  hint:    {hint}"
    )


def compile_source(source: str, target: Target, nvcc: Path | None = None) -> Compiled:
    """Compiles one self-contained source for one target; by PyCUDA where it is installed, else by a subprocess.

    Both run the same command in a fresh folder, so they give the same bytes.

    Raises:
        CompileError: nvcc refused the source; the message starts with its first real error.
        CompilerNotFoundError: there is no usable nvcc.
    """
    nvcc = nvcc or find_nvcc()
    if has_pycuda():
        compiled = _compile_with_pycuda(source, target, nvcc)
        if compiled is not None:
            return compiled
    return _compile_with_subprocess(source, target, nvcc)
