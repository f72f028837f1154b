from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers import run_processes
from invpool import cache as cache_room
from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import find_algorithm
from invpool.cache import CACHE_VARIABLE, KernelCache, default_root, lock_for
from invpool.compile import Compiled, Resources, Target
from invpool.errors import CompilerNotFoundError
from invpool.render import entry_name, render_kernel
from invpool.spec import PoolSpec

SM90 = Target("sm_90")
SOURCE = "// a source\n"


class CountingCompiler:
    """Leaves one file a compile, so that other processes' compiles are counted too."""

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        self.folder, self.seconds = folder, seconds
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, source: str, target: Target) -> Compiled:
        (self.folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        time.sleep(self.seconds)
        return Compiled(f"code of {source!r} for {target.name}".encode(), Resources(40, 0, 0, 0, 0))

    @property
    def count(self) -> int:
        return len(list(self.folder.iterdir()))


def _entries(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("kernels/*/*/meta.json"))


def test_a_second_process_finds_the_entry(tmp_path: Path) -> None:
    compiler = CountingCompiler(tmp_path / "compiles")
    first = KernelCache(tmp_path / "c", compiler).get(SOURCE, SM90)
    second = KernelCache(tmp_path / "c", compiler).get(SOURCE, SM90)
    assert first == second
    assert compiler.count == 1
    (entry,) = _entries(tmp_path / "c")
    assert (entry / "kernel.cu").read_text() == SOURCE
    assert sorted(path.name for path in entry.iterdir()) == ["kernel.cu", "kernel.cubin", "meta.json"]


def test_threads_compile_different_sources_at_the_same_time(tmp_path: Path) -> None:
    both_are_in = threading.Barrier(2, timeout=60)

    def compiler(source: str, target: Target) -> Compiled:
        both_are_in.wait()
        return Compiled(source.encode(), None)

    cache = KernelCache(tmp_path / "c", compiler)
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda source: cache.get(source, SM90).code, ["// one\n", "// two\n"]))
    assert codes == [b"// one\n", b"// two\n"]


def test_the_key_covers_what_decides_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        KernelCache.key(SOURCE, SM90),
        KernelCache.key(SOURCE + " ", SM90),
        KernelCache.key(SOURCE, Target("sm_90a")),
        KernelCache.key(SOURCE, Target("sm_80")),
        KernelCache.key(SOURCE, Target.ptx("sm_90")),
    ]
    monkeypatch.setattr(cache_room, "__version__", "99")
    keys.append(KernelCache.key(SOURCE, SM90))
    monkeypatch.setattr(cache_room, "CODE_FLAGS", ("-O0",))
    keys.append(KernelCache.key(SOURCE, SM90))
    assert len(set(keys)) == len(keys)


def test_another_nvcc_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CountingCompiler(tmp_path / "compiles")
    monkeypatch.setattr(cache_room, "find_nvcc", lambda: Path("nvcc"))
    for version in ("12.6.1", "13.0.88", "12.6.1"):
        monkeypatch.setattr(cache_room, "nvcc_version", lambda nvcc, version=version: version)
        KernelCache(tmp_path / "c", compiler).get(SOURCE, SM90)
    assert compiler.count == 2


def test_a_hit_needs_no_nvcc_and_a_miss_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CountingCompiler(tmp_path / "compiles")
    expected = KernelCache(tmp_path / "c", compiler).get(SOURCE, SM90)

    def absent() -> Path:
        raise CompilerNotFoundError("no nvcc was found")

    monkeypatch.setattr(cache_room, "find_nvcc", absent)
    assert KernelCache(tmp_path / "c", compiler).get(SOURCE, SM90) == expected
    with pytest.raises(CompilerNotFoundError):
        KernelCache(tmp_path / "c", compiler).get(SOURCE + "x", SM90)
    assert compiler.count == 1


@pytest.mark.parametrize(
    "damage", ["truncated code", "other code", "no meta", "half a meta", "meta of another schema", "empty folder"]
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path: Path, damage: str) -> None:
    compiler = CountingCompiler(tmp_path / "compiles")
    expected = KernelCache(tmp_path / "c", compiler).get(SOURCE, SM90)
    (entry,) = _entries(tmp_path / "c")
    code, meta = entry / "kernel.cubin", entry / "meta.json"
    if damage == "truncated code":
        code.write_bytes(code.read_bytes()[:-3])
    elif damage == "other code":
        code.write_bytes(b"x" * len(code.read_bytes()))
    elif damage == "no meta":
        meta.unlink()
    elif damage == "half a meta":
        meta.write_text(meta.read_text()[:20])
    elif damage == "meta of another schema":
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"schema": 0}))
    else:
        for path in entry.iterdir():
            path.unlink()
    assert KernelCache(tmp_path / "c", compiler).get(SOURCE, SM90) == expected
    assert compiler.count == 2
    assert KernelCache(tmp_path / "c", compiler).get(SOURCE, SM90) == expected
    assert compiler.count == 2


def _get(root: str, compiles: str, barrier: object, source: str) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    compiled = KernelCache(Path(root), CountingCompiler(Path(compiles), 0.3)).get(source, SM90)
    assert compiled.code == f"code of {source!r} for sm_90".encode()


@pytest.mark.parametrize("sources", [1, 8])
def test_eight_processes_on_an_empty_cache_compile_each_source_once(tmp_path: Path, sources: int) -> None:
    barrier = multiprocessing.get_context("spawn").Barrier(8)
    folders = (str(tmp_path / "c"), str(tmp_path / "compiles"))
    assert run_processes(_get, [(*folders, barrier, f"{SOURCE}{i % sources}") for i in range(8)], 60) == [0] * 8
    assert CountingCompiler(tmp_path / "compiles").count == sources
    assert len(_entries(tmp_path / "c")) == sources
    assert not list((tmp_path / "c").rglob("tmp-*"))


def _compile_forever(root: str, started: object) -> None:
    def compiler(source: str, target: Target) -> Compiled:
        started.set()  # type: ignore[attr-defined]
        time.sleep(600)
        raise AssertionError

    KernelCache(Path(root), compiler).get(SOURCE, SM90)


def test_a_process_killed_in_mid_compile_holds_nobody_up(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_compile_forever, args=(str(tmp_path / "c"), started))
    process.start()
    assert started.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    (folder,) = (tmp_path / "c" / "kernels").iterdir()
    (folder / "tmp-left-behind").mkdir()  # as if the kill had come while the entry was being written
    compiler = CountingCompiler(tmp_path / "compiles")
    KernelCache(tmp_path / "c", compiler).get(SOURCE, SM90)
    assert compiler.count == 1
    assert len(_entries(tmp_path / "c")) == 1
    assert not list((tmp_path / "c").rglob("tmp-*"))


def test_an_unwritable_root_warns_once_and_keeps_kernels_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "file"
    root.write_text("a file where the root should be: nobody, root included, can make folders under it")
    compiler = CountingCompiler(tmp_path / "compiles")
    cache = KernelCache(root, compiler)
    with caplog.at_level(logging.WARNING, logger="invpool"):
        for _ in range(3):
            cache.get(SOURCE, SM90)
            cache.get(SOURCE + "x", SM90)
    assert compiler.count == 2
    assert [record.getMessage().count("cannot be written") for record in caplog.records] == [1]


def _get_as_nobody(root: str, compiles: str, queue: object) -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        KernelCache(Path(root), CountingCompiler(Path(compiles))).get(SOURCE, SM90)
        queue.put("served")  # type: ignore[attr-defined]
    except BaseException as error:
        queue.put(repr(error))  # type: ignore[attr-defined]


def test_a_read_only_root_serves_what_it_holds() -> None:
    """As somebody who may not write there; root may write anywhere, so root steps down first."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        KernelCache(base / "c", CountingCompiler(base / "compiles")).get(SOURCE, SM90)
        for path in (base / "c", *(base / "c").rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=_get_as_nobody, args=(str(base / "c"), str(base / "compiles"), queue))
        process.start()
        assert queue.get(timeout=60) == "served"
        process.join(60)
        assert CountingCompiler(base / "compiles").count == 1
        for path in (base / "c").rglob("*"):
            path.chmod(0o755)


@pytest.mark.parametrize(
    "spec", [PoolSpec(3, 3), PoolSpec(3, 3, layout="bkh", masked=True), PoolSpec(3, 3, precision="tf32")]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_info_line_before_a_compile_and_none_for_a_hit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spec: PoolSpec, direction: Direction
) -> None:
    algorithm = find_algorithm("three_pass")
    source = render_kernel(algorithm, spec, next(algorithm.candidates(spec, direction)))
    compiler = CountingCompiler(tmp_path / "compiles")
    with caplog.at_level(logging.INFO, logger="invpool"):
        for _ in range(2):
            KernelCache(tmp_path / "c", compiler).get(source, SM90)
    assert [record.getMessage() for record in caplog.records] == [
        f"compiling {entry_name(algorithm, spec, direction)} for sm_90"
    ]


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    assert default_root() == tmp_path / "own"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "invpool"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "höme with spaces"))
    assert default_root() == tmp_path / "höme with spaces" / ".cache" / "invpool"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_root() == tmp_path / f"invpool-{os.getuid()}"


@pytest.mark.parametrize("planted", ["readable by all", "a link", "a file", "of somebody else"])
def test_a_planted_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache_room._fresh_folder.cache_clear()
    ours = cache_room.private_folder()
    assert ours.stat().st_mode & 0o777 == 0o700
    assert cache_room.private_folder() == ours
    if planted == "readable by all":
        ours.chmod(0o755)
    elif planted == "of somebody else":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(ours, 65534, 65534)
    else:
        ours.rmdir()
        if planted == "a link":
            (tmp_path / "bait").mkdir(mode=0o700)
            ours.symlink_to("bait")
        else:
            ours.touch()
    fresh = cache_room.private_folder()
    assert fresh != ours
    assert fresh.stat().st_mode & 0o777 == 0o700
    (tmp_path / "root").touch()
    assert Path(lock_for("x", tmp_path / "root").lock_file).is_relative_to(fresh)
    cache_room._fresh_folder.cache_clear()
