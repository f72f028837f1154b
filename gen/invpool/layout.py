"""Shared memory as data: named regions, and what a warp's access to one costs in bank conflicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

_BANKS: Final = 32
_BANK_BYTES: Final = 4
_WAVEFRONT_BYTES: Final = _BANKS * _BANK_BYTES
_WIDEST_BYTES: Final = 16
_HALF_WARP: Final = 16


@dataclasses.dataclass(frozen=True)
class Region:
    """``elements`` values of ``element_bytes`` each, from byte ``offset`` on; ``pad`` of the elements hold nothing."""

    label: str
    offset: int
    elements: int
    element_bytes: int
    pad: int = 0

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclasses.dataclass(frozen=True)
class SharedLayout:
    """The regions of one block's dynamic shared memory, back to back."""

    regions: tuple[Region, ...]

    @classmethod
    def pack(cls, element_bytes: int, regions: Iterable[tuple[str, int, int]]) -> SharedLayout:
        """Lays out (label, elements, pad) one behind the other."""
        packed: list[Region] = []
        for label, elements, pad in regions:
            offset = packed[-1].end if packed else 0
            packed.append(Region(label, offset, elements, element_bytes, pad))
        return cls(tuple(packed))

    @property
    def bytes(self) -> int:
        return self.regions[-1].end


def wavefronts(addresses: Iterable[int], access_bytes: int) -> int:
    """Passes over the 32 banks that one warp instruction needs.

    Args:
        addresses: byte address of each active thread, in thread order.
        access_bytes: width of a thread's access: 2, 4, 8 or 16.

    A warp moves at most 128 bytes a pass, so 8-byte accesses are served by half warps and 16-byte
    ones by quarter warps; threads that read the same word share it. Threads with the same address
    count as one, but for 16-byte accesses only within a half warp: a broadcast of 16 bytes takes two
    passes (ncu, H200). Within a pass, the bank with the most different words decides.
    """
    threads = list(addresses)
    if access_bytes == _WIDEST_BYTES and len(threads) > _HALF_WARP:
        return sum(wavefronts(half, access_bytes) for half in (threads[:_HALF_WARP], threads[_HALF_WARP:]))
    threads = list(dict.fromkeys(threads))
    group = min(len(threads), max(1, _WAVEFRONT_BYTES // max(access_bytes, _BANK_BYTES)))
    total = 0
    for first in range(0, len(threads), group):
        words: set[int] = set()
        for address in threads[first : first + group]:
            words.update(range(address // _BANK_BYTES, (address + access_bytes - 1) // _BANK_BYTES + 1))
        per_bank = [0] * _BANKS
        for word in words:
            per_bank[word % _BANKS] += 1
        total += max(per_bank)
    return total
