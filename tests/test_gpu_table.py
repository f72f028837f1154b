from __future__ import annotations

import pytest

from invpool.gpu import DEFAULT_ARCHS, DEFAULT_GPU, KNOWN_ARCHS, KNOWN_GPUS, check_arch, gpu_named, known_gpu


def test_the_defaults_are_known() -> None:
    assert DEFAULT_GPU in KNOWN_GPUS
    assert set(DEFAULT_ARCHS) <= set(KNOWN_ARCHS)


def test_every_entry_is_plausible() -> None:
    for gpu in KNOWN_GPUS.values():
        assert 48 * 1024 <= gpu.shared_per_block <= gpu.shared_per_sm
        assert gpu.shared_per_sm - gpu.shared_per_block in (0, 1024)
        assert gpu.threads_per_sm in (1024, 1536, 2048)
        assert 1e9 < gpu.clock < 3e9
        assert 1e11 < gpu.dram < 1e13


@pytest.mark.parametrize("arch", ["sm_70", "sm_9", "90", "sm_90a", "compute_90", "", "sm_999"])
def test_unknown_archs_list_the_legal_ones(arch: str) -> None:
    with pytest.raises(ValueError, match="legal: sm_75, sm_80"):
        check_arch(arch)


def test_unknown_gpu_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'v100' is not listed; legal: t4, a100"):
        known_gpu("v100")


def test_resident_blocks_by_each_limit() -> None:
    h200 = known_gpu("h200")
    assert h200.blocks_per_sm(1024, 0, 32) == 2  # threads
    assert h200.blocks_per_sm(128, 0, 255) == 2  # registers
    assert h200.blocks_per_sm(128, 100 * 1024, 32) == 2  # shared memory
    assert h200.blocks_per_sm(32, 0, 16) == 32  # blocks
    assert h200.blocks_per_sm(128, 227 * 1024, 32) == 1
    assert h200.wave(128, 100 * 1024, 32) == 2 * 132
    assert h200.wave(1024, 0, 255) == 132  # a plan that fits no SM is refused elsewhere


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("Tesla V100", None),
    ],
)
def test_a_device_is_the_gpu_of_the_longest_name(device: str, name: str | None) -> None:
    found = gpu_named(device, KNOWN_GPUS.values())
    assert (found and found.name) == name
