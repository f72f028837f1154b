"""What may be tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invpool.abi import DIRECTIONS
from invpool.algorithms import choose, find_algorithm
from invpool.gpu import KNOWN_GPUS
from invpool.spec import PoolSpec
from invpool.sweep.space import Candidate, list_space, read_plans

H200 = KNOWN_GPUS["h200"]
SPEC = PoolSpec(128, 32)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_default_spec_has_hundreds_of_legal_candidates_its_default_among_them(direction) -> None:
    space = list_space(SPEC, H200, direction)
    assert len(space.candidates) >= 200
    assert len(set(space.candidates)) == len(space.candidates)
    for candidate in space.candidates:
        assert candidate.algorithm.reject(SPEC, candidate.plan, H200) is None
    default = choose(SPEC, H200)
    assert Candidate(default.algorithm, default.plan(direction)) in space.candidates
    assert space.partners[default.algorithm.name] == default


@pytest.mark.parametrize("gpu", ["t4", "a100", "rtx5090"])
def test_an_algorithm_that_needs_another_architecture_has_no_candidates(gpu: str) -> None:
    space = list_space(SPEC, KNOWN_GPUS[gpu], "forward")
    names = {candidate.algorithm.name for candidate in space.candidates}
    assert "one_pass_wgmma" not in names
    assert ("one_pass_mma" in names) == (gpu != "t4")


def test_neighbours_differ_in_one_parameter() -> None:
    space = list_space(SPEC, H200, "forward")
    alone = 0
    for candidate in space.candidates[::7]:
        around = space.neighbours(candidate)
        alone += not around
        assert candidate not in around
        for other in around:
            assert other.algorithm is candidate.algorithm
            mine, theirs = candidate.plan.knobs, other.plan.knobs
            assert [name for name in mine if mine[name] != theirs[name] and name != "most_blocks"].__len__() == 1
    assert alone == 0


def test_extra_plans_are_judged_by_the_same_predicate(tmp_path: Path) -> None:
    legal = find_algorithm("one_pass").legal(SPEC, H200, "forward")[0].knobs
    entries = [
        {"algorithm": "one_pass", "direction": "forward", "plan": legal | {"registers": 72}},
        {"algorithm": "one_pass", "direction": "forward", "plan": legal | {"k_step": 17}},
        {"algorithm": "one_pass", "direction": "backward", "plan": legal},
        {"algorithm": "one_pass", "direction": "forward", "plan": legal},
    ]
    (tmp_path / "plans.json").write_text(json.dumps(entries))
    plain = list_space(SPEC, H200, "forward")
    space = list_space(SPEC, H200, "forward", extra=read_plans(tmp_path / "plans.json"))
    asked_for = [candidate for candidate in space.candidates if candidate.asked_for]
    assert [candidate.plan.knobs["k_step"] for candidate in asked_for] == [legal["k_step"], 17, legal["k_step"]]
    assert [candidate.rejected is None for candidate in asked_for] == [False, False, True]
    assert "registers is 72" in str(asked_for[0].rejected)
    assert "k_step is 17" in str(asked_for[1].rejected)
    # One of them is in the space anyway, and is there once.
    assert len(space.candidates) == len(plain.candidates) + 2
    assert {(c.algorithm, c.plan) for c in plain.candidates} < {(c.algorithm, c.plan) for c in space.candidates}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ('[{"algorithm": "no_such", "direction": "forward", "plan": {}}]', "no_such"),
        ('[{"algorithm": "one_pass", "direction": "up", "plan": {}}]', "direction is 'up'; legal: forward, backward"),
        ('[{"algorithm": "one_pass", "direction": "forward", "plan": {"tile": 1}}]', "no plan parameter tile"),
        ("[1]", "not subscriptable"),
    ],
)
def test_a_file_of_plans_that_is_none_says_what_one_looks_like(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        read_plans(path)
    assert '"algorithm": "one_pass"' in str(error.value)
    with pytest.raises(ValueError, match="holds no plans"):
        read_plans(tmp_path / "none.json")
