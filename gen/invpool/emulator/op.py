"""A generated package whose kernels run on the emulator: what proves them where there is no GPU."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from invpool.emulator.build import find_gxx, gxx_version
from invpool.emulator.kernel import EmulatedKernel, poison, require_written
from invpool.runtime import GeneratedOp


class EmulatedOp(GeneratedOp):
    """The op of a generated package on CPU tensors, by its CUDA kernels.

    The same manifest, the same tensors and the same order of arguments as on a GPU; only the launch is another.
    It is for checking: a launch takes milliseconds an item.

    Args:
        folder: a generated package.

    Raises:
        LoadError: see :class:`invpool.runtime.GeneratedOp`.
        CompileError, CompilerNotFoundError: see :func:`invpool.emulator.build.build_kernel`.
    """

    namespace_prefix: ClassVar[str] = "invpool_emulated"
    kernel_devices: ClassVar[tuple[str, ...]] = ("cpu",)

    cpu_forward = GeneratedOp.cuda_forward
    cpu_backward = GeneratedOp.cuda_backward

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Built now: a package that is only staged moves away later.
        self._emulated = [
            EmulatedKernel((folder / kernel["source"]["file"]).read_text(encoding="utf-8"), kernel["entry"])
            for kernel in self.manifest["kernels"]
        ]

    @property
    def device_name(self) -> str:
        """``emulator (g++ 12.2.0, x86_64)``."""
        return f"emulator (g++ {gxx_version(find_gxx())}, {platform.machine()})"

    def _refuse_in_capture(self) -> None:
        pass  # there is no stream here, so none that is captured

    def _launch(self, direction: str, tensors: dict[str, Tensor | None]) -> None:
        written = {name: tensors[name] for name in (("out", *self.state) if direction == "forward" else ("dx",))}
        for tensor in written.values():
            poison(tensor)
        super()._launch(direction, tensors)
        for name, tensor in written.items():
            require_written(f"{self.manifest['slug']} {direction}: {name}", tensor)

    def _run_kernel(self, index: int, blocks: int, arguments: Sequence[Tensor | int | None], device: int) -> None:
        kernel = self._kernels[index]
        self._emulated[index].launch(blocks, kernel.threads, kernel.shared_bytes, arguments, orders=2)
