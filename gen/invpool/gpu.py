"""The limits and rates of a GPU that a plan is judged against.

A :class:`Gpu` is an argument everywhere and is never looked up at import, so plans for any known
GPU can be made, compared and tested on a machine that has none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Final

# Below this much shared memory a block needs no opt-in, on every architecture.
DEFAULT_SHARED_BYTES: Final = 48 * 1024
WARP: Final = 32


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU model. Bytes are bytes, rates are per second, ``*_lanes`` are results per clock and SM.

    Attributes:
        name: what ``--gpu`` takes.
        arch: ``sm_90`` and the like, without a feature suffix.
        sm_count: streaming multiprocessors.
        shared_per_block: the most dynamic shared memory one block may opt in to.
        shared_per_sm: shared memory that the resident blocks of one SM divide among themselves.
        threads_per_sm: resident threads of one SM.
        clock: sustained SM clock in Hz.
        dram: DRAM bandwidth in bytes a second.
        fp32_lanes, fp64_lanes: fused multiply-adds.
        tensor_lanes: multiply-adds of fp16 numbers with float32 sums, by tensor cores.
        registers_per_sm: 32-bit registers.
    """

    name: str
    arch: str
    sm_count: int
    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    clock: float
    dram: float
    fp32_lanes: int
    fp64_lanes: int
    tensor_lanes: int
    registers_per_sm: int = 65536

    @property
    def mufu_lanes(self) -> int:
        """Transcendental results (ex2, lg2, rcp): 16 a clock and SM on every architecture here."""
        return 16

    @property
    def shared_reserved(self) -> int:
        """Shared memory the system takes from each resident block."""
        return 0 if self.arch == "sm_75" else 1024

    def blocks_per_sm(self, threads: int, shared_bytes: int, registers: int) -> int:
        """Resident blocks of one SM by the three limits (registers are handed out 256 to a warp)."""
        warps = -(-threads // WARP)
        per_warp = -(-registers * WARP // 256) * 256
        limits = [self.threads_per_sm // (warps * WARP), 32 if self.arch != "sm_75" else 16]
        if registers:
            limits.append(self.registers_per_sm // (per_warp * warps))
        if shared_bytes:
            limits.append(self.shared_per_sm // (shared_bytes + self.shared_reserved))
        return min(limits)

    def wave(self, threads: int, shared_bytes: int, registers: int) -> int:
        """Blocks that all SMs hold at once, at least one each: as many as a persistent kernel should have."""
        return max(1, self.blocks_per_sm(threads, shared_bytes, registers)) * self.sm_count


_KIB: Final = 1024
# Datasheet figures. The H200's clock and DRAM rate are what these kernels were measured to sustain.
KNOWN_GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4", "sm_75", 40, 64 * _KIB, 64 * _KIB, 1024, 1.35e9, 320e9, 64, 2, 512),
        Gpu("a100", "sm_80", 108, 163 * _KIB, 164 * _KIB, 2048, 1.41e9, 2039e9, 64, 32, 1024),
        Gpu("a10", "sm_86", 72, 99 * _KIB, 100 * _KIB, 1536, 1.69e9, 600e9, 128, 2, 256),
        Gpu("l4", "sm_89", 58, 99 * _KIB, 100 * _KIB, 1536, 1.6e9, 300e9, 128, 2, 256),
        Gpu("l40s", "sm_89", 142, 99 * _KIB, 100 * _KIB, 1536, 2.2e9, 864e9, 128, 2, 256),
        Gpu("h100", "sm_90", 132, 227 * _KIB, 228 * _KIB, 2048, 1.7e9, 3350e9, 128, 64, 2048),
        Gpu("h200", "sm_90", 132, 227 * _KIB, 228 * _KIB, 2048, 1.7e9, 4283e9, 128, 64, 2048),
        Gpu("b200", "sm_100", 148, 227 * _KIB, 228 * _KIB, 2048, 1.8e9, 8000e9, 128, 64, 4096),
        Gpu("rtx5090", "sm_120", 170, 99 * _KIB, 100 * _KIB, 1536, 2.4e9, 1792e9, 128, 2, 256),
    )
}
# What plans are made for where there is no GPU, unless --gpu says otherwise.
DEFAULT_GPU: Final = "h200"
# What is compiled where there is no GPU, unless --arch says otherwise.
DEFAULT_ARCHS: Final = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
KNOWN_ARCHS: Final = tuple(dict.fromkeys(gpu.arch for gpu in KNOWN_GPUS.values()))


def known_gpu(name: str) -> Gpu:
    """The listed GPU of that name.

    Raises:
        ValueError: no such GPU is listed.
    """
    try:
        return KNOWN_GPUS[name.lower()]
    except KeyError:
        raise ValueError(f"GPU {name!r} is not listed; legal: {', '.join(KNOWN_GPUS)}") from None


def arch_number(arch: str) -> int:
    """75 of ``sm_75``."""
    return int(arch.removeprefix("sm_"))


def check_arch(arch: str) -> str:
    """Returns ``arch`` if invpool builds for it.

    Raises:
        ValueError: anything but ``sm_75`` and the like, or older than sm_75.
    """
    match = re.fullmatch(r"sm_(\d{2,3})", arch)
    if not match or int(match[1]) < 75 or arch not in KNOWN_ARCHS:
        raise ValueError(f"arch is {arch!r}; legal: {', '.join(KNOWN_ARCHS)}")
    return arch


def gpu_named(name: str, gpus: Iterable[Gpu]) -> Gpu | None:
    """The GPU that a device's own name holds the name of, the longest one: "NVIDIA L40S" holds l4 too."""
    written = name.lower().replace(" ", "")
    return max((gpu for gpu in gpus if gpu.name in written), key=lambda gpu: len(gpu.name), default=None)


def present_gpu(index: int = 0) -> Gpu | None:
    """The GPU that torch sees on this machine, with limits read from the device; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}"
    name = str(properties.name)
    # The rates cannot be read from a device: they come from the listed GPU that is most like it.
    same_arch = [gpu for gpu in KNOWN_GPUS.values() if gpu.arch == arch] or list(KNOWN_GPUS.values())
    like = gpu_named(name, same_arch) or min(
        same_arch, key=lambda gpu: abs(gpu.sm_count - properties.multi_processor_count)
    )
    return dataclasses.replace(
        like,
        name=name,
        arch=arch,
        sm_count=properties.multi_processor_count,
        shared_per_block=properties.shared_memory_per_block_optin,
        shared_per_sm=properties.shared_memory_per_multiprocessor,
        threads_per_sm=properties.max_threads_per_multi_processor,
        registers_per_sm=properties.regs_per_multiprocessor,
    )
