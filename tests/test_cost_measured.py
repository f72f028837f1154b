"""Cost against the stop-watch: the plans that sweeps on an H200 measured (docs/results/plans_h200).

The constants of Cost were fitted to these very times: this holds the fit, it does not prove a prophecy.
"""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from invpool.algorithms import find_algorithm
from invpool.algorithms.base import Algorithm, Plan
from invpool.gpu import known_gpu
from invpool.spec import PoolSpec

H200 = known_gpu("h200")
RECORDED = sorted((Path(__file__).parents[1] / "docs" / "results" / "plans_h200").glob("*.json"))
# Launches that are long enough for the work to count.
LEAST_BATCH = 4000


def measured(path: Path) -> Iterator[tuple[str, Algorithm[Any], Plan, int, float, float]]:
    """(direction, algorithm, plan, batch, measured us, predicted us) of what is legal today."""
    data = json.loads(path.read_text())
    spec = PoolSpec.from_slug(data["slug"])
    for one in data["plans"]:
        algorithm = find_algorithm(one["algorithm"])
        plan = algorithm.plan_from_knobs(one["direction"], one["plan"])
        if algorithm.reject(spec, plan, H200) is not None:
            continue
        for batch, (_, median, _) in one["us"].items():
            predicted = 1e6 * algorithm.cost(spec, plan, H200, int(batch)).seconds(H200)
            yield one["direction"], algorithm, plan, int(batch), median, predicted


def test_something_was_recorded() -> None:
    assert len(RECORDED) >= 9


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_predictions_of_tensor_core_kernels(path: Path) -> None:
    ratios = collections.defaultdict(list)
    for direction, algorithm, _, batch, median, predicted in measured(path):
        if algorithm.name in ("one_pass_mma", "one_pass_wgmma", "one_pass_streamed") and batch >= LEAST_BATCH:
            ratios[direction, algorithm.name].append(predicted / median)
    assert ratios
    for key, own in ratios.items():
        assert 0.65 < statistics.median(own) < 1.35, key


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_plan_predicted_to_be_fastest_is_near_the_fastest(path: Path) -> None:
    plans = collections.defaultdict(list)
    for direction, _, _, batch, median, predicted in measured(path):
        if batch >= LEAST_BATCH:
            plans[direction, batch].append((predicted, median))
    for key, own in plans.items():
        chosen, fastest = min(own)[1], min(median for _, median in own)
        assert chosen <= 1.15 * fastest, key
