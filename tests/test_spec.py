from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invpool.spec import DTYPES, LAYOUTS, PoolSpec, canonical_dtype

specs = st.builds(
    PoolSpec,
    H=st.integers(1, 2000),
    K=st.integers(1, 2000),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    masked=st.booleans(),
)


def test_slug_of_the_default() -> None:
    assert PoolSpec(128, 32).slug == "h128_k32_f32_bhk"
    assert PoolSpec(7, 96, "float32", "bkh", "tf32", True).slug == "h7_k96_f32_bkh_tf32_mask"


@given(specs)
def test_slug_is_an_identifier_and_comes_back(spec: PoolSpec) -> None:
    assert spec.slug.isidentifier()
    assert PoolSpec.from_slug(spec.slug) == spec


@pytest.mark.parametrize("slug", ["", "h128", "h128_k32_f33_bhk", "h0128_k32_f32_bhk_x", "H128_K32_f32_bhk"])
def test_what_is_no_slug(slug: str) -> None:
    with pytest.raises(ValueError, match="slug"):
        PoolSpec.from_slug(slug)


@pytest.mark.parametrize(
    ("H", "K", "message"),
    [
        (0, 3, r"H is 0; it must be at least 1"),
        (3, 0, r"K is 0; it must be at least 1"),
        (-1, 3, r"H is -1"),
        (3, -7, r"K is -7"),
        (10**9, 3, r"fewer than 2\*\*31"),
        (3, 10**9, r"fewer than 2\*\*31"),
        (46341, 1, r"fewer than 2\*\*31"),
    ],
)
def test_numbers_out_of_range(H: int, K: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolSpec(H, K)


@pytest.mark.parametrize("value", [1.0, "3", True, None])
def test_numbers_that_are_not_integers(value: object) -> None:
    with pytest.raises(TypeError, match="must be an integer"):
        PoolSpec(value, 3)  # type: ignore[arg-type]


def test_unknown_words_name_the_legal_ones() -> None:
    with pytest.raises(TypeError, match="int8.*float32, float16, bfloat16, float64"):
        PoolSpec(3, 3, "int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'hbk'; legal: bhk, bkh"):
        PoolSpec(3, 3, layout="hbk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'fast'; legal: exact, tf32"):
        PoolSpec(3, 3, precision="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float32 only"):
        PoolSpec(3, 3, "float16", precision="tf32")


@pytest.mark.parametrize("given_dtype", ["f32", "fp32", "float32", "float", torch.float32])
def test_dtype_spellings(given_dtype: object) -> None:
    assert canonical_dtype(given_dtype) == "float32"


def test_least_traffic_of_the_standard_shape() -> None:
    spec = PoolSpec(128, 32)
    assert spec.least_bytes("forward", 16384) == 276_824_064
    assert spec.least_bytes("backward", 16384) == 553_648_128


def test_cli_arguments_make_the_spec_again() -> None:
    assert PoolSpec(128, 32).cli_arguments() == "--H 128 --K 32"
    spec = PoolSpec(7, 9, "float16", "bkh", masked=True)
    assert spec.cli_arguments() == "--H 7 --K 9 --dtype float16 --layout bkh --masked"
