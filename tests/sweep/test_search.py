"""The search: what it tries, in which order, and how soon it is near the best of spaces whose times are known."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest

from invpool.gpu import KNOWN_GPUS
from invpool.spec import PoolSpec
from invpool.sweep.search import EXHAUSTIVE, Search
from invpool.sweep.space import Candidate, Space, list_space

H200 = KNOWN_GPUS["h200"]
Times = Callable[[Candidate], dict[int, float] | None]


def chance(*words: object) -> float:
    """A number of [0, 1) that is the same every day."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def rugged(space: Space, batches: tuple[int, ...], seed: int) -> Times:
    """Times that Cost foretells as badly as it does on an H200.

    Each algorithm is off by a factor of its own, each value of a knob by another, and each plan by some per cent.
    """

    def times(candidate: Candidate) -> dict[int, float]:
        name, plan = candidate.algorithm.name, candidate.plan
        factor = 2 ** (chance(seed, name) - 0.5)
        for knob in plan.knobs.items():
            factor *= 1 + 0.25 * (chance(seed, name, knob) - 0.5)
        factor *= 1 + 0.04 * (chance(seed, name, plan) - 0.5)
        return {batch: factor * candidate.seconds(space.spec, space.gpu, batch) for batch in batches}

    return times


def run(space: Space, batches: tuple[int, ...], times: Times, most: int) -> tuple[list[Candidate], dict[int, float]]:
    """What is tried, and the best time found at each batch."""
    search, tried, best = Search(space, batches), [], dict.fromkeys(batches, math.inf)
    while len(tried) < most and (candidate := search.next()) is not None:
        found = times(candidate)
        search.tell(candidate, found)
        tried.append(candidate)
        for batch, time in (found or {}).items():
            best[batch] = min(best[batch], time)
    return tried, best


SPECS = (PoolSpec(128, 32), PoolSpec(7, 96), PoolSpec(321, 96), PoolSpec(862, 96, "bfloat16"), PoolSpec(137, 96))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "spec", [pytest.param(s, marks=[] if i < 2 else [pytest.mark.slow], id=s.slug) for i, s in enumerate(SPECS)]
)
def test_a_quarter_of_the_space_is_enough(spec: PoolSpec, direction: str) -> None:
    space, batches = list_space(spec, H200, direction), (16, 4096)  # type: ignore[arg-type]
    for seed in range(2):
        times = rugged(space, batches, seed)
        least = {batch: min(times(c)[batch] for c in space.candidates) for batch in batches}  # type: ignore[index]
        tried, best = run(space, batches, times, len(space.candidates) // 4)
        assert len(set(tried)) == len(tried)
        assert {batch: best[batch] / least[batch] <= 1.03 for batch in batches} == dict.fromkeys(batches, True)


def test_a_search_is_the_same_every_time_and_goes_on_past_failures() -> None:
    space = list_space(PoolSpec(33, 20), H200, "forward")
    times = rugged(space, (256,), 0)

    def often_failing(candidate: Candidate) -> dict[int, float] | None:
        return None if chance("fails", str(candidate)) < 0.4 else times(candidate)

    first, best = run(space, (256,), often_failing, 100)
    second, _ = run(space, (256,), often_failing, 100)
    assert first == second
    assert 20 < len(first) <= 100
    assert best[256] < math.inf


def test_all_may_fail() -> None:
    space = list_space(PoolSpec(9, 4), H200, "forward", ["one_pass"])
    tried, best = run(space, (16,), lambda _: None, 10_000)
    assert set(tried) == set(space.candidates)
    assert best == {16: math.inf}


def test_a_small_space_is_measured_whole() -> None:
    space = list_space(PoolSpec(128, 32), H200, "forward", ["one_pass_wgmma"])
    assert 1 < len(space.candidates) <= EXHAUSTIVE
    tried, _ = run(space, (16,), rugged(space, (16,), 0), 10_000)
    assert set(tried) == set(space.candidates)


def test_what_is_used_today_and_what_was_asked_for_come_first() -> None:
    plain = list_space(PoolSpec(33, 20), H200, "forward")
    used, asked = plain.candidates[-1], plain.candidates[-2]
    extra = Candidate(asked.algorithm, asked.plan, asked_for=True)
    smaller = Space(plain.spec, H200, "forward", (*plain.candidates[:-2], used, extra), plain.partners)
    search = Search(smaller, (16,), [used.choice(plain.partners)])
    assert [search.next(), search.next()] == [used, extra]


def test_what_correction_puts_far_behind_is_left_alone() -> None:
    """Algorithms that are many times slower than predicted are given up early."""
    space = list_space(PoolSpec(128, 32), H200, "forward")

    def times(candidate: Candidate) -> dict[int, float]:
        factor = 1.0 if candidate.algorithm.name == "one_pass_wgmma" else 50.0
        return {4096: factor * candidate.seconds(space.spec, space.gpu, 4096)}

    tried, _ = run(space, (4096,), times, 10_000)
    assert len(tried) < len(space.candidates) // 4
