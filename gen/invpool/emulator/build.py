"""From a generated .cu file to something a CPU runs: the one place that finds g++ and builds its argv.

A build is a shared library for speed (``plain``, ``count``), or an executable where a sanitizer must come
first in the process (``address``, ``thread``). Both are cached like cubins, under ``<cache root>/emulated``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.resources
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from invpool._version import __version__
from invpool.cache import default_root, is_writable, lock_for, read_entry, sweep_leftovers, write_entry
from invpool.compile import find_nvcc
from invpool.errors import CompileError, CompilerNotFoundError

log = logging.getLogger("invpool")

GXX_VARIABLE: Final = "INVPOOL_GXX"
_HINT: Final = f"install it (apt-get install g++), or set {GXX_VARIABLE}"
_TIMEOUT: Final = 600.0

Build = Literal["plain", "address", "thread", "count"]
BUILDS: Final[tuple[Build, ...]] = get_args(Build)
# Those that run in a process of their own.
SANITIZED: Final[tuple[Build, ...]] = ("address", "thread")

# Contraction of a*b+c depends on the CPU; results must not.
_KERNEL_FLAGS: Final[dict[Build, tuple[str, ...]]] = {
    # g++ 12 takes what one branch says of a pointer's alignment for true of the other branch, where it joins loads.
    "plain": ("-O2", "-fno-tree-slp-vectorize"),
    "address": (
        *("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"),
        # object-size would hide AddressSanitizer's own, better report.
        *("-fno-sanitize=object-size", "-fno-sanitize-recover=undefined", "-fsanitize-sections=emulated_shared*"),
    ),
    "thread": ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=thread"),
    # Inlined, since the hooks miss what calls pass in memory, but with each vector access whole, as nvcc has it.
    "count": (
        *("-O2", "-fno-tree-sra", "-fno-ipa-sra", "-fno-tree-vectorize", "-fno-store-merging"),
        *("-DEMULATOR_COUNT", "-fsanitize=thread"),
    ),
}
# Shared variables have no initialisers, so their being static needs no guard.
_COMMON_FLAGS: Final = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-threadsafe-statics")
_ENGINE_FLAGS: Final[dict[Build, tuple[str, ...]]] = {
    "plain": (),
    "address": ("-DEMULATOR_ASAN",),
    "thread": ("-DEMULATOR_TSAN",),
    "count": (),
}
_ENGINE_COMMON: Final = ("-std=c++20", "-O2", "-fPIC")
_ENGINE_SOURCES: Final[dict[Build, tuple[str, ...]]] = {
    "plain": ("engine.cpp",),
    "address": ("engine.cpp", "sanitized_main.cpp"),
    "thread": ("engine.cpp", "sanitized_main.cpp"),
    "count": ("engine.cpp", "counters.cpp"),
}
_LINK_FLAGS: Final[dict[Build, tuple[str, ...]]] = {
    "plain": ("-shared", "-Wl,-Bsymbolic"),
    "address": ("-fsanitize=address,undefined",),
    "thread": ("-fsanitize=thread",),
    # Not -fsanitize: the hooks that the compiler calls are ours, in counters.cpp.
    "count": ("-shared", "-Wl,-Bsymbolic"),
}


def find_gxx() -> Path:
    """g++ by ``$INVPOOL_GXX``, else on PATH.

    Raises:
        CompilerNotFoundError: there is none; the message says what to install.
    """
    explicit = os.environ.get(GXX_VARIABLE)
    if explicit and not os.access(explicit, os.X_OK):
        raise CompilerNotFoundError(f"{GXX_VARIABLE} is {explicit!r}, which is not an executable file; {_HINT}")
    found = explicit or shutil.which("g++")
    if not found:
        raise CompilerNotFoundError(f"the emulator needs g++, and none was found; {_HINT}")
    return Path(found)


@functools.lru_cache(maxsize=8)
def gxx_version(gxx: Path) -> str:
    """``12.2.0``.

    Raises:
        CompilerNotFoundError: the program does not answer like g++.
    """
    try:
        text = subprocess.run(
            [gxx, "-dumpfullversion"], check=False, capture_output=True, text=True, timeout=60
        ).stdout.strip()
    except OSError as error:
        raise CompilerNotFoundError(f"{gxx} cannot be run: {error}; {_HINT}") from error
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        raise CompilerNotFoundError(f"{gxx} does not answer like g++: {text[:200]!r}; {_HINT}")
    return text


def has_gxx() -> bool:
    """Whether the emulator can build anything here."""
    try:
        gxx_version(find_gxx())
    except CompilerNotFoundError:
        return False
    return True


def _native_files() -> dict[str, bytes]:
    folder = importlib.resources.files("invpool") / "emulator" / "native"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith((".h", ".cpp"))}


@functools.lru_cache(maxsize=1)
def _cuda_include() -> Path:
    """The folder of cuda_fp16.h and cuda_bf16.h, which g++ can compile: the toolkit's, else PyPI's.

    Raises:
        CompilerNotFoundError: there is none; kernels of 16-bit elements need it.
    """
    candidates: list[Path] = []
    with contextlib.suppress(CompilerNotFoundError):
        # nvcc may be a script that starts another: it alone knows where its headers are.
        argv = [str(find_nvcc()), "--dryrun", "-x", "cu", "-c", os.devnull]
        said = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60).stderr
        candidates += [Path(folder) for folder in re.findall(r'"?-I([^" ]+)"?', said)]
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        candidates += [Path(str(file.locate())).parent for file in files if file.name == "cuda_fp16.h"]
    for folder in candidates:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise CompilerNotFoundError(
        "16-bit kernels need cuda_fp16.h and cuda_bf16.h, and no toolkit was found; "
        "install the headers with: pip install nvidia-cuda-runtime"
    )


def _run_gxx(argv: Sequence[str], folder: Path, source: Path) -> None:
    try:
        run = subprocess.run(argv, check=False, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"g++ did not finish in {_TIMEOUT:.0f} s\n  command: {' '.join(argv)}") from error
    if run.returncode:
        lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
        first = next(
            (line for line in lines if re.search(r"\berror\b|undefined reference", line)), "g++ failed without a word"
        )
        raise CompileError(
            f"{first}\n  command: {' '.join(argv)}\n  source:  {source}\n"
            "  hint:    the emulator knows a part of CUDA: docs/emulator.md lists it"
        )


def _built(key: str, version: str, name: str, files: dict[str, bytes], make: Callable[[Path], None]) -> Path:
    """The path of a file that ``make`` leaves in a folder with ``files``, made at most once among all processes.

    It stays in the cache, or in a folder of this process where the cache cannot be written.
    """
    place = default_root() / "emulated" / key / version
    if read_entry(place, name):
        return place / name
    if not is_writable(place.parent):
        return _built_here(key, name, files, make)
    with lock_for(key), tempfile.TemporaryDirectory(prefix="invpool-") as temporary:
        if read_entry(place, name):
            return place / name
        sweep_leftovers(place)
        folder = Path(temporary)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        make(folder)
        if not write_entry(place, files | {name: (folder / name).read_bytes()}, name, {"gxx": version}):
            return _built_here(key, name, files, make)
        (place / name).chmod(0o755)
    return place / name


@functools.lru_cache(maxsize=1)
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    log.warning("the cache cannot be written; what the emulator builds lives as long as this process")
    return tempfile.TemporaryDirectory(prefix="invpool-")


def _built_here(key: str, name: str, files: dict[str, bytes], make: Callable[[Path], None]) -> Path:
    folder = Path(_private_folder().name, key)
    if not (folder / name).is_file():
        folder.mkdir(exist_ok=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        make(folder)
    return folder / name


def _key(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in (__version__, platform.machine(), *parts):
        digest.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()


def _engine(gxx: Path, version: str, build: Build, extra: tuple[str, ...]) -> Path:
    """The engine as one object file."""
    native = _native_files()
    flags = (*_ENGINE_COMMON, *_ENGINE_FLAGS[build], *extra)

    def make(folder: Path) -> None:
        # -r: several sources, one object.
        argv = [str(gxx), *flags, "-r", "-nostdlib", *_ENGINE_SOURCES[build], "-o", "engine.o"]
        _run_gxx(argv, folder, folder / "engine.cpp")

    return _built(_key("engine", *flags, *_ENGINE_SOURCES[build], *_digests(native)), version, "engine.o", native, make)


def _digests(files: dict[str, bytes]) -> list[str]:
    return [f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in sorted(files.items())]


def build_kernel(source: str, entry: str, build: Build, portable_switch: bool = False) -> Path:
    """Builds a kernel for this CPU, or finds it in the cache.

    Args:
        source: the text of the .cu file, as nvcc gets it.
        entry: the kernel's ``extern "C"`` name.
        build: ``plain`` for speed, ``address`` (with UndefinedBehaviorSanitizer) or ``thread`` for the
            sanitizers, ``count`` for counters.
        portable_switch: switch fibers by ucontext, as on CPUs that the assembly does not know.

    Returns:
        The shared library, or the executable of a sanitized build.

    Raises:
        CompileError: g++ refused the source.
        CompilerNotFoundError: there is no g++, or no CUDA header for a 16-bit type.
    """
    gxx = find_gxx()
    version = gxx_version(gxx)
    engine = _engine(gxx, version, build, ("-DEMULATOR_UCONTEXT",) if portable_switch else ())
    headers = {name: data for name, data in _native_files().items() if name.endswith(".h")}
    include = _cuda_include() if re.search(r"#include <cuda_", source) else None
    name = "kernel" if build in SANITIZED else "kernel.so"

    def commands(gxx: Path, folder: Path, engine: Path, include: Path | None) -> list[list[str]]:
        compile_argv = [
            *(str(gxx), *_COMMON_FLAGS, *_KERNEL_FLAGS[build], f"-ffile-prefix-map={folder}=."),
            *(("-isystem", str(include), "-DEMULATOR_CUDA_HEADERS") if include else ()),
            *("-include", "cuda_on_cpu.h", "-I.", "-x", "c++", "-c", "kernel.cu", "-o", "kernel.o"),
        ]
        entry_flag = (f"-Wl,--defsym=emulator_entry={entry}",) if build in SANITIZED else ()
        return [compile_argv, [str(gxx), "kernel.o", str(engine), *_LINK_FLAGS[build], *entry_flag, "-o", name]]

    # The key knows what is run and what it reads, but no paths.
    placeholder = Path("path")
    parts: list[str | bytes] = [word for argv in commands(*[placeholder] * 4) for word in argv]
    parts += [*_digests(headers), engine.read_bytes(), source]
    if include:
        parts += [(include / header).read_bytes() for header in ("cuda_fp16.h", "cuda_bf16.h")]

    def make(folder: Path) -> None:
        log.info("compiling %s for the emulator (%s)", entry, build)
        for argv in commands(gxx, folder, engine, include):
            _run_gxx(argv, folder, folder / "kernel.cu")

    return _built(_key(*parts), version, name, {"kernel.cu": source.encode(), **headers}, make)
