from __future__ import annotations

import pytest

from invpool.layout import SharedLayout, wavefronts


def test_regions_lie_back_to_back() -> None:
    layout = SharedLayout.pack(4, [("X", 4096, 0), ("Mean", 128, 0)])
    assert [(region.offset, region.end) for region in layout.regions] == [(0, 16384), (16384, 16896)]
    assert layout.bytes == 16896


@pytest.mark.parametrize(
    ("stride", "expected"),
    [(1, 1), (2, 2), (4, 4), (32, 32), (33, 1), (36, 4), (31, 1), (0, 1)],
)
def test_scalar_accesses(stride: int, expected: int) -> None:
    """Thread t reads float t * stride: gcd(stride, 32) threads meet in a bank, and equal words are shared."""
    assert wavefronts([4 * stride * t for t in range(32)], 4) == expected


@pytest.mark.parametrize(("stride", "expected"), [(4, 4), (36, 4), (32, 32), (40, 8)])
def test_sixteen_byte_accesses_go_by_quarter_warps(stride: int, expected: int) -> None:
    assert wavefronts([4 * stride * t for t in range(32)], 16) == expected


def test_doubles_go_by_half_warps() -> None:
    assert wavefronts([8 * t for t in range(32)], 8) == 2
    assert wavefronts([8 * 16 * t for t in range(32)], 8) == 32
