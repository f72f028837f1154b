"""The cost of the ancestor's mistake: recompute against three_pass, forward and backward, in one run on one GPU.

    python tools/ablation.py [--out docs/results/ablation.json]

Each time is the median of event-timed launches with L2 flushed between them; both directions of both
algorithms alternate, so a drifting clock meets all alike. Bandwidth is that of a copy in the same run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from record import RESULTS, write_result

import invpool
from invpool.abi import DIRECTIONS
from invpool.algorithms import choose
from invpool.generate import Request, generate
from invpool.gpu import present_gpu
from invpool.spec import PoolSpec

SPEC = PoolSpec(128, 32)
BATCHES = (16384, 64)
ROUNDS = 30
ALGORITHMS = ("three_pass", "recompute")


def measure(calls: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Median and quartiles in microseconds of each call, taken in turns."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(ROUNDS + 3):
        for name, call in calls.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            if round_number >= 3:
                times[name].append(1e3 * start.elapsed_time(end))
    result = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        result[name] = {"median_us": median, "lower_quartile_us": low, "upper_quartile_us": high}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "ablation.json")
    options = parser.parse_args()
    gpu = present_gpu()
    assert gpu is not None, "this measures a GPU"
    big = torch.empty(2**29, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(big)
    copy = measure({"copy": functools.partial(target.copy_, big)})["copy"]["median_us"]
    copy_rate = 2 * big.numel() * 4 / copy / 1e3
    del big, target
    print(f"copy {copy_rate:.0f} GB/s on {gpu.name}")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        ops = {}
        for algorithm in ALGORITHMS:
            folder = Path(name) / algorithm / SPEC.slug
            generate(Request(SPEC, folder, algorithm=algorithm))
            ops[algorithm] = invpool.load(folder)
        for batch in BATCHES:
            x = torch.randn(batch, SPEC.H, SPEC.K, device="cuda")
            g = torch.randn(batch, SPEC.H, device="cuda")
            calls: dict[str, Callable[[], object]] = {}
            for algorithm, op in ops.items():
                state = op.backward_state(op.cuda_forward(x, None, None))
                calls[f"{algorithm} forward"] = functools.partial(op.cuda_forward, x, None, None)
                calls[f"{algorithm} backward"] = functools.partial(op.cuda_backward, g, x, None, None, *state)
            times = measure(calls)
            for direction in DIRECTIONS:
                pair = {algorithm: times[f"{algorithm} {direction}"] for algorithm in ALGORITHMS}
                ratio = pair["recompute"]["median_us"] / pair["three_pass"]["median_us"]
                predicted = {}
                for algorithm in ALGORITHMS:
                    choice = choose(SPEC, gpu, algorithm)
                    cost = choice.algorithm.cost(SPEC, choice.plan(direction), gpu, batch)
                    predicted[algorithm] = 1e6 * cost.seconds(gpu)
                rows.append(
                    {
                        "B": batch,
                        "direction": direction,
                        "measured": pair,
                        "ratio": ratio,
                        "predicted_us": predicted,
                        "predicted_ratio": predicted["recompute"] / predicted["three_pass"],
                    }
                )
                print(
                    f"B={batch:<6} {direction:<9}"
                    + "".join(
                        f" {a} {pair[a]['median_us']:8.1f} us (predicted {predicted[a]:7.1f})" for a in ALGORITHMS
                    )
                    + f"  ratio {ratio:.2f} (predicted {rows[-1]['predicted_ratio']:.2f})"
                )
    write_result(options.out, {"spec": SPEC.slug, "copy_gb_per_s": copy_rate, "rows": rows})


if __name__ == "__main__":
    main()
