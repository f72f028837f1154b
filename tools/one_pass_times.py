"""Times of one_pass and three_pass at several shapes, forward and backward, kernel only, with what Cost foretold.

python tools/one_pass_times.py [--out docs/results/one_pass_times.json]
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path

import torch
from ablation import measure
from record import RESULTS, write_result

import invpool
from invpool.abi import DIRECTIONS
from invpool.errors import PlanError
from invpool.generate import Request, generate
from invpool.spec import PoolSpec

CASES = (
    (16384, PoolSpec(128, 32)),
    (16384, PoolSpec(128, 32, "bfloat16")),
    (65536, PoolSpec(7, 96)),
    (16384, PoolSpec(21, 96)),
    (2048, PoolSpec(137, 96)),
    (1024, PoolSpec(321, 96)),
    (256, PoolSpec(862, 96)),
    (64, PoolSpec(883, 720)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "one_pass_times.json")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for batch, spec in CASES:
            x = torch.randn(batch, spec.H, spec.K, device="cuda").to(getattr(torch, spec.dtype))
            g = torch.randn(batch, spec.H, device="cuda").to(x.dtype)
            for algorithm in ("one_pass", "three_pass"):
                folder = Path(name) / algorithm / spec.slug
                try:
                    made = generate(Request(spec, folder, algorithm=algorithm))
                except PlanError:
                    continue  # three_pass where the item does not fit a block
                op = invpool.load(folder)
                state = op.backward_state(op.cuda_forward(x, None, None))
                times = measure(
                    {
                        "forward": functools.partial(op.cuda_forward, x, None, None),
                        "backward": functools.partial(op.cuda_backward, g, x, None, None, *state),
                    }
                )
                for direction in DIRECTIONS:
                    cost = made.choice.algorithm.cost(spec, made.choice.plan(direction), made.gpu, batch)
                    row = {"B": batch, "spec": spec.slug, "algorithm": algorithm, "direction": direction}
                    row |= times[direction] | {
                        "predicted_us": 1e6 * cost.seconds(made.gpu),
                        "bound": cost.bound(made.gpu),
                    }
                    row["plan"] = str(made.choice.plan(direction))
                    rows.append(row)
                    print(
                        f"B={batch:<6} {spec.slug:<18} {algorithm:<10} {direction:<8} {row['median_us']:9.1f} us"
                        f" (predicted {row['predicted_us']:9.1f}, {row['bound']})",
                        flush=True,
                    )
    write_result(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
