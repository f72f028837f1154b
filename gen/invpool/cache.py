"""Compiled kernels on disk: one folder an entry, safe among processes, correct after a crash.

    <root>/kernels/<sha256 of source, flags, target, generator version>/<nvcc version>/
        kernel.cu  kernel.cubin|kernel.ptx  meta.json

An entry is built in a temporary folder beside its place and the *folder* is renamed, under a lock
held over the compile, so nobody sees half an entry; ``meta.json`` holds the hash of the code and a
folder whose code does not match it is a miss. The nvcc version is a level of its own so that a hit needs no nvcc.
What the emulator builds with g++ lies beside it, under ``<root>/emulated``, kept by the same functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import filelock

from invpool._version import __version__
from invpool.compile import CODE_FLAGS, Compiled, Resources, Target, compile_source, find_nvcc, nvcc_version
from invpool.errors import CompilerNotFoundError

log = logging.getLogger("invpool")

CACHE_VARIABLE: Final = "INVPOOL_CACHE_DIR"
_SCHEMA: Final = 1
# Templates put the name of the kernel at the start of the line after its extern "C".
_ENTRY: Final = re.compile(r'^extern "C".*\n(\w+)\(', re.MULTILINE)


def is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def default_root() -> Path:
    """``$INVPOOL_CACHE_DIR``, else ``$XDG_CACHE_HOME/invpool``, else ``~/.cache/invpool``."""
    explicit = os.environ.get(CACHE_VARIABLE)
    if explicit:
        return Path(explicit)
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg, "invpool")
    try:
        return Path.home() / ".cache" / "invpool"
    except RuntimeError:  # no HOME and no passwd entry
        return private_folder()


def private_folder() -> Path:
    """``invpool-<uid>`` under the folder of temporary files if it is ours alone, else a fresh one of this process.

    Anybody could have made a folder of that name first.
    """
    folder = Path(tempfile.gettempdir(), f"invpool-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700:
        return folder
    return _fresh_folder()


@functools.lru_cache(maxsize=1)
def _fresh_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="invpool-"))


class KernelCache:
    """The compiled kernels under one root. An unwritable root is served from memory, after one warning.

    Args:
        root: where entries live; None takes :func:`default_root`.
        compiler: what makes the code of a miss; tests put their own here.
    """

    def __init__(self, root: Path | None = None, compiler: Callable[[str, Target], Compiled] = compile_source) -> None:
        self.root = root or default_root()
        self._compiler = compiler
        self._memory: dict[str, Compiled] = {}
        self._guard = threading.Lock()
        self._building: dict[str, threading.Lock] = {}
        self._warned = False

    @staticmethod
    def key(source: str, target: Target) -> str:
        """sha256 over everything that decides the code, but for the nvcc version."""
        parts = [__version__, target.kind, target.name, *CODE_FLAGS, source]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def get(self, source: str, target: Target) -> Compiled:
        """The code for a source, compiled at most once among all threads and processes that share the root.

        Threads that ask for different sources compile at the same time.

        Raises:
            CompileError: nvcc refused the source.
            CompilerNotFoundError: nothing is cached and there is no nvcc.
        """
        key = self.key(source, target)
        with self._guard:
            building = self._building.setdefault(key, threading.Lock())
        with building:
            if key not in self._memory:
                self._memory[key] = self._from_disk_or_build(key, source, target)
            return self._memory[key]

    def _from_disk_or_build(self, key: str, source: str, target: Target) -> Compiled:
        folder = self.root / "kernels" / key
        try:
            version = nvcc_version(find_nvcc())
        except CompilerNotFoundError:
            # Without nvcc any version's code will do: it is the same source for the same target.
            for entry in sorted(folder.glob("*/"), reverse=True):
                compiled = self._read(entry, target)
                if compiled:
                    return compiled
            raise
        place = folder / version
        compiled = self._read(place, target)
        if compiled:
            return compiled
        if not is_writable(folder):
            if not self._warned:
                self._warned = True
                log.warning(
                    "cache %s cannot be written; kernels are kept in memory only (set %s)", self.root, CACHE_VARIABLE
                )
            return self._compile(source, target)
        with lock_for(key, self.root):
            compiled = self._read(place, target)
            if compiled:
                return compiled
            sweep_leftovers(place)
            compiled = self._compile(source, target)
            self._write(place, source, target, compiled, version)
        return compiled

    def _compile(self, source: str, target: Target) -> Compiled:
        entry = _ENTRY.search(source)
        log.info("compiling %s for %s", entry[1] if entry else "kernel", target.name)
        return self._compiler(source, target)

    @staticmethod
    def _read(place: Path, target: Target) -> Compiled | None:
        entry = read_entry(place, f"kernel.{target.kind}")
        if entry is None:
            return None
        code, meta = entry
        try:
            return Compiled(code, Resources(**meta["resources"]) if meta["resources"] else None)
        except (KeyError, TypeError):
            return None

    @staticmethod
    def _write(place: Path, source: str, target: Target, compiled: Compiled, version: str) -> None:
        meta = {
            "nvcc": version,
            "target": target.name,
            "flags": list(CODE_FLAGS),
            "resources": dataclasses.asdict(compiled.resources) if compiled.resources else None,
        }
        files = {"kernel.cu": source.encode(), f"kernel.{target.kind}": compiled.code}
        if not write_entry(place, files, f"kernel.{target.kind}", meta):
            log.warning("the kernel is kept in memory only")


def read_entry(place: Path, code_name: str) -> tuple[bytes, dict[str, Any]] | None:
    """The code and the meta data of an entry that is whole and matches its recorded hash; anything else is a miss."""
    try:
        meta: dict[str, Any] = json.loads((place / "meta.json").read_text(encoding="utf-8"))
        code = (place / code_name).read_bytes()
        if meta["schema"] != _SCHEMA or meta["sha256"] != hashlib.sha256(code).hexdigest():
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return code, meta


def sweep_leftovers(place: Path) -> None:
    """Under the entry's lock, a temporary folder or an unreadable entry belongs to nobody alive."""
    for stale in (*place.parent.glob("tmp-*"), place):
        shutil.rmtree(stale, ignore_errors=True)


def write_entry(place: Path, files: Mapping[str, bytes], code_name: str, meta: Mapping[str, Any]) -> bool:
    """Puts an entry in place whole; False, after a warning, where that cannot be done. The caller holds its lock."""
    recorded = {
        "schema": _SCHEMA,
        "generator": __version__,
        "sha256": hashlib.sha256(files[code_name]).hexdigest(),
        **meta,
    }
    try:
        folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=place.parent))
        for name, data in files.items():
            write_durably(folder / name, data)
        write_durably(folder / "meta.json", (json.dumps(recorded, indent=1, sort_keys=True) + "\n").encode())
        folder.chmod(0o755)  # mkdtemp made it for us alone
        folder.rename(place)
    except OSError as error:
        log.warning("cache entry %s could not be written: %s", place, error)
        return False
    return True


def lock_for(name: str, root: Path | None = None) -> filelock.BaseFileLock:
    """A lock among processes that share the cache root; in a private temporary folder where that cannot be written."""
    root = root or default_root()
    locks = root / "locks"
    if not is_writable(locks):
        locks = private_folder() / "locks"
        locks.mkdir(exist_ok=True)
    return filelock.FileLock(locks / f"{hashlib.sha256(name.encode()).hexdigest()}.lock")


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file and waits until it is on the disk: a rename must not outrun the data."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
