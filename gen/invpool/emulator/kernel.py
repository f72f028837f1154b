"""A generated kernel that runs on this CPU: compile, launch, read the results."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

from invpool.emulator.build import BUILDS, SANITIZED, Build, build_kernel
from invpool.emulator.counters import Counters
from invpool.errors import EmulationError, SanitizerError

Engine = Literal["fibers", "threads"]
Extent = int | tuple[int, ...]

_ENTRY: Final = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')
_REPORT_BYTES: Final = 1 << 16
_TIMEOUT: Final = 600.0
_MOST_THREADS: Final = 1024
_SANITIZER_OPTIONS: Final = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:strip_path_prefix=./",
    "UBSAN_OPTIONS": "print_stacktrace=1:strip_path_prefix=./",
    # ThreadSanitizer sleeps a second at exit unless told not to.
    "TSAN_OPTIONS": "atexit_sleep_ms=0:halt_on_error=1:strip_path_prefix=./",
}
_NO_RANDOM_ADDRESSES: Final = 0x0040000  # ADDR_NO_RANDOMIZE of personality(2)
# The engine keeps one launch in static variables, as a launch has the GPU to itself.
_ONE_LAUNCH: Final = threading.Lock()


class _Launch(ctypes.Structure):
    """emulator::Launch of native/engine.h."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("on_threads", ctypes.c_int32),
        ("ignored_line", ctypes.c_int32),
        ("argument_count", ctypes.c_uint64),
    ]


@dataclasses.dataclass(frozen=True)
class Output:
    """An array that the kernel has to write whole: made by the launch, full of NaN bytes beforehand.

    Attributes:
        shape: its extents.
        dtype: a torch dtype, or anything that NumPy takes for one.
    """

    shape: tuple[int, ...]
    dtype: Any

    def make(self) -> Any:
        """The poisoned array: a tensor for a torch dtype, else a NumPy array."""
        if type(self.dtype).__module__ == "torch":
            import torch

            made: Any = torch.empty(self.shape, dtype=self.dtype)
        else:
            import numpy  # an extra: only who passes NumPy's dtypes needs it

            made = numpy.empty(self.shape, self.dtype)
        poison(made)
        return made


@dataclasses.dataclass(frozen=True)
class SynchronisationPoint:
    """A place in the source where threads wait for each other, and how often blocks (or warps) did so."""

    operation: str
    line: int
    executions: int


@dataclasses.dataclass(frozen=True)
class Launched:
    """What a launch gave: its outputs in the order of the arguments, and what was counted.

    ``counters`` is None but for the build ``count``.
    """

    outputs: tuple[Any, ...]
    points: tuple[SynchronisationPoint, ...]
    counters: Counters | None


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Where an array lies."""

    address: int
    bytes: int

    @classmethod
    def of(cls, array: Any, position: int) -> _Memory:
        if hasattr(array, "data_ptr"):
            if array.device.type != "cpu" or not array.is_contiguous():
                raise ValueError(
                    f"argument {position} is a tensor on {array.device}; it must be contiguous, on the cpu"
                )
            return cls(array.data_ptr(), array.numel() * array.element_size())
        if hasattr(array, "__array_interface__"):
            if not array.flags["C_CONTIGUOUS"]:
                raise ValueError(f"argument {position} is a strided array; pass numpy.ascontiguousarray of it")
            return cls(array.__array_interface__["data"][0], array.nbytes)
        raise TypeError(
            f"argument {position} is {type(array).__name__}; legal: a tensor, a NumPy array, an Output, an int, None"
        )

    def view(self) -> ctypes.Array[ctypes.c_char]:
        return (ctypes.c_char * self.bytes).from_address(self.address)


def poison(array: Any) -> None:
    """Fills a tensor or NumPy array with NaN bytes (0xff), so that what a kernel does not write shows."""
    memory = _Memory.of(array, 0)
    ctypes.memset(memory.address, 0xFF, memory.bytes)


def require_written(what: str, array: Any) -> None:
    """Refuses an array that a kernel should have written whole, but of which an element is NaN bytes still.

    Raises:
        EmulationError: says how many, and where the first one is.
    """
    memory, count = _Memory.of(array, 0), _elements(array)
    size = memory.bytes // max(1, count)
    content, pattern = bytes(memory.view()), b"\xff" * size
    # The pattern may also straddle two elements: only multiples of the size count.
    missing = [i for i in range(count) if content[i * size : (i + 1) * size] == pattern] if pattern in content else []
    if missing:
        raise EmulationError(
            f"{what}: {len(missing)} of {count} elements are poison, first at {_coordinates(missing[0], array.shape)}: "
            "never written, or computed from shared memory that was read before it was written"
        )


def _elements(array: Any) -> int:
    count = 1
    for extent in array.shape:
        count *= extent
    return count


def _coordinates(position: int, shape: Sequence[int]) -> list[int]:
    coordinates = []
    for extent in reversed(tuple(shape)):
        coordinates.append(position % extent)
        position //= extent
    return coordinates[::-1]


def _extent(what: str, extent: Extent) -> tuple[int, int, int]:
    values = (extent,) if isinstance(extent, int) else tuple(extent)
    if not 1 <= len(values) <= 3 or any(value < 1 for value in values):
        raise ValueError(f"{what} is {extent!r}; legal: one to three numbers of at least 1")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


class EmulatedKernel:
    """One kernel of a .cu file, built for this CPU.

    Args:
        source: the text of the file, as nvcc gets it.
        entry: the kernel's ``extern "C"`` name; None where the source has just one.
        build: ``plain``, ``address``, ``thread`` or ``count``: see :func:`invpool.emulator.build.build_kernel`.
        portable_switch: switch fibers by ucontext rather than by assembly.

    Raises:
        ValueError: the build is unknown, or the entry cannot be told.
        CompileError, CompilerNotFoundError: see :func:`invpool.emulator.build.build_kernel`.
    """

    def __init__(
        self, source: str, entry: str | None = None, build: Build = "plain", portable_switch: bool = False
    ) -> None:
        if build not in BUILDS:
            raise ValueError(f"build is {build!r}; legal: {', '.join(BUILDS)}")
        if entry is None:
            entries = _ENTRY.findall(source)
            if len(entries) != 1:
                raise ValueError(f"the source has {len(entries)} kernels ({', '.join(entries)}); say which with entry=")
            entry = entries[0]
        self.entry: str = entry
        self.build: Build = build
        self.path = build_kernel(source, self.entry, build, portable_switch)
        self._library = None if build in SANITIZED else ctypes.CDLL(str(self.path), mode=os.RTLD_LOCAL | os.RTLD_NOW)

    def launch(
        self,
        grid: Extent,
        block: Extent,
        shared_bytes: int,
        arguments: Sequence[Any],
        *,
        seed: int = 0,
        engine: Engine = "fibers",
        ignore_line: int = 0,
        orders: int = 1,
    ) -> Launched:
        """Runs the kernel over a grid.

        Args:
            grid, block: blocks of the grid, threads of a block: x, or (x, y), or (x, y, z).
            shared_bytes: dynamic shared memory of one block.
            arguments: in the kernel's order. A contiguous CPU tensor or NumPy array (changed in place), an
                :class:`Output`, an int (64 bits), None (a null pointer).
            seed: orders the blocks, and the threads between two barriers; the same seed, the same order.
            engine: ``fibers``, or ``threads`` for the cross-check by one std::thread a CUDA thread.
            ignore_line: the barrier at this line of the source does nothing: a planted fault.
            orders: run this many times from the same contents, in as many orders, and compare bit by bit.

        Returns:
            The outputs, and what was counted.

        Raises:
            EmulationError: the block diverged, part of it returned before a barrier, a lane of a warp
                operation never came, an output was left unwritten, or the order of blocks matters.
            SanitizerError: a sanitizer found something.
            ValueError, TypeError: an argument or extent that cannot be launched.
        """
        if engine not in get_args(Engine):
            raise ValueError(f"engine is {engine!r}; legal: {', '.join(get_args(Engine))}")
        if engine == "threads" and self.build != "plain":
            raise ValueError(f"engine 'threads' is for the build 'plain' only, this one is {self.build!r}")
        blocks, threads = _extent("grid", grid), _extent("block", block)
        if threads[0] * threads[1] * threads[2] > _MOST_THREADS:
            raise ValueError(f"block is {block!r}; a block has at most {_MOST_THREADS} threads")
        arrays = [one.make() if isinstance(one, Output) else one for one in arguments]
        memory = [
            None if array is None or isinstance(array, int) else _Memory.of(array, position)
            for position, array in enumerate(arrays)
        ]
        values = [array if isinstance(array, int) else 0 for array in arrays]
        before = [bytes(place.view()) if place else b"" for place in memory] if orders > 1 else []
        after: list[bytes] = []
        launched: dict[str, Any] = {}
        for order in range(orders):
            launch = _Launch(blocks, threads, shared_bytes, seed + order, engine == "threads", ignore_line, len(arrays))
            if order:
                for place, content in zip(memory, before, strict=True):
                    if place:
                        place.view().raw = content
            launched = self._run(launch, values, memory)
            if orders > 1:
                now = [bytes(place.view()) if place else b"" for place in memory]
                if order:
                    self._require_same(arrays, after, now, seed, seed + order)
                after = now
        outputs = []
        for position, (wanted, array) in enumerate(zip(arguments, arrays, strict=True)):
            if isinstance(wanted, Output):
                require_written(f"{self.entry}: argument {position}", array)
                outputs.append(array)
        points = (SynchronisationPoint(p["operation"], p["line"], p["executions"]) for p in launched["points"])
        counters = Counters.from_report(launched["counters"]) if "counters" in launched else None
        return Launched(tuple(outputs), tuple(sorted(points, key=lambda point: point.line)), counters)

    def _require_same(
        self, arrays: Sequence[Any], one: list[bytes], other: list[bytes], seed: int, second: int
    ) -> None:
        for position, (array, a, b) in enumerate(zip(arrays, one, other, strict=True)):
            if a == b:
                continue
            size = len(a) // _elements(array)
            first = next(
                i for i in range(_elements(array)) if a[i * size : (i + 1) * size] != b[i * size : (i + 1) * size]
            )
            raise EmulationError(
                f"{self.entry}: argument {position} depends on the order of blocks or threads: "
                f"seeds {seed} and {second} first differ at {_coordinates(first, array.shape)}"
            )

    def _run(self, launch: _Launch, values: Sequence[int], memory: Sequence[_Memory | None]) -> dict[str, Any]:
        run = self._run_here if self._library is not None else self._run_apart
        failed, text = run(launch, values, memory)
        if failed:
            raise EmulationError(f"{self.entry}: {text}")
        report: dict[str, Any] = json.loads(text)
        return report

    def _run_here(self, launch: _Launch, values: Sequence[int], memory: Sequence[_Memory | None]) -> tuple[int, str]:
        library = self._library
        assert library is not None
        pairs: list[int] = []
        for value, place in zip(values, memory, strict=True):
            pairs += [place.address, place.bytes] if place else [value & (2**64 - 1), 0]
        packed = (ctypes.c_uint64 * len(pairs))(*pairs)
        text = ctypes.create_string_buffer(_REPORT_BYTES)
        entry = ctypes.cast(getattr(library, self.entry), ctypes.c_void_p)
        with _ONE_LAUNCH:
            failed = library.emulator_launch(entry, ctypes.byref(launch), packed, text, ctypes.c_uint64(_REPORT_BYTES))
        return failed, text.value.decode()

    def _run_apart(self, launch: _Launch, values: Sequence[int], memory: Sequence[_Memory | None]) -> tuple[int, str]:
        """One launch in a process of its own: see native/sanitized_main.cpp for what is exchanged."""
        with tempfile.TemporaryDirectory(prefix="invpool-") as folder:
            request = Path(folder, "request")
            with request.open("wb") as file:
                file.write(bytes(launch))
                for value, place in zip(values, memory, strict=True):
                    words = (0, place.bytes, place.address % 16) if place else (value & (2**64 - 1), 0, 0)
                    file.write(struct.pack("3Q", *words))
                contents = file.tell()
                for place in memory:
                    if place:
                        file.write(place.view())
            try:
                run = subprocess.run(
                    [self.path, request],
                    check=False,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=_TIMEOUT,
                    env=os.environ | _SANITIZER_OPTIONS,
                    preexec_fn=_fix_addresses,
                )
            except subprocess.TimeoutExpired as error:
                raise EmulationError(f"{self.entry}: the launch did not end in {_TIMEOUT:.0f} s") from error
            if run.returncode == 1 and not run.stderr:
                return 1, run.stdout.strip()
            if run.returncode:
                raise SanitizerError(f"{self.entry}: {_summary(run.stderr, run.returncode)}\n{run.stderr.strip()}")
            with request.open("rb") as file:
                file.seek(contents)
                for place in memory:
                    if place:
                        file.readinto(place.view())
            return 0, run.stdout


def _fix_addresses() -> None:
    """ThreadSanitizer of older compilers finds no room where the kernel scatters addresses widely."""
    if sys.platform == "linux":
        ctypes.CDLL(None).personality(_NO_RANDOM_ADDRESSES)


def _summary(report: str, returncode: int) -> str:
    """What a sanitizer found, in one line."""
    for pattern in (r"^SUMMARY: (.*)$", r"^(\S+: runtime error: .*)$", r"^==\d+==\s*ERROR: (.*)$"):
        match = re.search(pattern, report, re.MULTILINE)
        if match:
            return match[1]
    return f"the launch ended with exit code {returncode}"
