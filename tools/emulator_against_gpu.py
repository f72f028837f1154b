"""Holds the emulator against the hardware: the same sources and inputs, forward and backward, element by element.

    python tools/emulator_against_gpu.py [--out docs/results/emulator_against_gpu.json]

For each kernel: the largest difference in units of the last place of the larger of the two values and of the tensor's
root mean square (an element that cancels to near zero has no small ulp of its own), the share of elements that are
bitwise equal, and the norm error of both against float64. Needs a GPU and g++.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import torch
from record import RESULTS, write_result
from torch import Tensor

from invpool.binding import import_package
from invpool.check import make_inputs
from invpool.emulator.op import EmulatedOp
from invpool.generate import Request, generate
from invpool.reference import norm_error, pool_ref
from invpool.spec import DTYPES, PoolSpec

ITEMS = 3
SHAPES = ((128, 32), (33, 72), (7, 20), (65, 136))


def ulps(a: Tensor, b: Tensor) -> float:
    """The largest |a - b| in units of the last place, of the larger value or of the tensor's size if that is more."""
    eps = torch.finfo(a.dtype).eps
    a, b = a.double(), b.double()
    size = torch.maximum(torch.maximum(a.abs(), b.abs()), a.square().mean().sqrt())
    return float(((a - b).abs() / (size * eps).clamp(min=1e-300)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "emulator_against_gpu.json")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for (shape, dtype), algorithm in itertools.product(
            zip(SHAPES, DTYPES, strict=True), ("one_pass", "three_pass")
        ):
            layout = "bkh" if shape[0] % 2 else "bhk"
            spec = PoolSpec(*shape, dtype, layout)  # type: ignore[arg-type]
            folder = Path(name) / algorithm / spec.slug
            generate(Request(spec, folder, algorithm=algorithm))
            op, emulated = import_package(folder).op, EmulatedOp(folder)
            g = torch.randn(ITEMS, spec.H, generator=torch.Generator().manual_seed(1)).to(op.dtype)
            for kind, x in make_inputs(spec, ITEMS, "cpu").items():
                truth = pool_ref(x, g, layout)
                here = emulated.cpu_forward(x, None, None)
                there = op.cuda_forward(x.cuda(), None, None)
                state = op.backward_state(there)
                # Both backwards get the state that the GPU left, so that each kernel is compared by itself.
                on_cpu = [None if tensor is None else tensor.cpu() for tensor in state]
                dx_here = emulated.cpu_backward(g, x, None, None, *on_cpu)
                dx_there = op.cuda_backward(g.cuda(), x.cuda(), None, None, *state).cpu()
                pairs = {"out": (here[0], there[0].cpu(), truth.out), "dx": (dx_here, dx_there, truth.dx)}
                for what, (ours, gpu, exact) in pairs.items():
                    rows.append(
                        {
                            "kernel": f"{algorithm} {'forward' if what == 'out' else 'backward'} {spec.slug}",
                            "input": kind,
                            "ulps": ulps(ours, gpu),
                            "bitwise_equal": float((ours == gpu).double().mean()),
                            "emulator_error": norm_error(ours, exact),
                            "gpu_error": norm_error(gpu, exact),
                        }
                    )
                    row = rows[-1]
                    print(
                        f"{row['kernel']:<42} {kind:<8} {row['ulps']:7.2f} ulp"
                        f"  {100 * row['bitwise_equal']:5.1f} % equal"
                        f"  error {row['emulator_error']:.1e} / {row['gpu_error']:.1e}"
                    )
    worst = max(row["ulps"] for row in rows)
    print(f"worst {worst:.2f} ulp over {len(rows)} comparisons")
    write_result(options.out, {"worst_ulps": worst, "rows": rows})


if __name__ == "__main__":
    main()
