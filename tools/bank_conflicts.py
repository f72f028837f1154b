"""Bank conflicts of each shared-memory order, counted by the profiler on this machine's GPU.

    python tools/bank_conflicts.py [--out docs/results/bank_conflicts.json]

Runs itself under ncu (clocks left alone) with one launch of forward and backward for each order, and
sets beside the counters what the layout predicts for a thread's access to its own row.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import torch
from record import RESULTS, write_result

from invpool.algorithms import Choice, find_algorithm
from invpool.algorithms.three_pass import SharedOrder, ThreePassPlan
from invpool.binding import TableRow, import_package, package_files, staged_package
from invpool.cache import KernelCache
from invpool.generate import Planned, build_kernels
from invpool.gpu import present_gpu
from invpool.spec import PoolSpec

SPEC = PoolSpec(128, 32)
ITEMS = 132
METRICS = {
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "ffma": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
}


def plans(order: str) -> Choice:
    algorithm = find_algorithm("three_pass")
    forward = ThreePassPlan("forward", order, columns=4, k_tile=32, registers=128)  # type: ignore[arg-type]
    return Choice(algorithm, forward, dataclasses.replace(forward, direction="backward"))


def launch_all() -> None:
    """What runs under the profiler: forward and backward of each order, once."""
    gpu = present_gpu()
    assert gpu is not None
    x = torch.randn(ITEMS, SPEC.H, SPEC.K, device="cuda")
    g = torch.randn(ITEMS, SPEC.H, device="cuda")
    with tempfile.TemporaryDirectory() as name:
        for order in get_args(SharedOrder):
            kernels = build_kernels(SPEC, Planned(((0, plans(order)),)), (gpu.arch,), KernelCache())
            files = package_files(SPEC, gpu.name, kernels, (TableRow(0, 0, 1),))
            with staged_package(Path(name) / order, files) as folder:
                op = import_package(folder).op
                state = op.backward_state(op.cuda_forward(x, None, None))
                op.cuda_backward(g, x, None, None, *state)
                torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "bank_conflicts.json")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch_all()
        return
    command = ["ncu", "--csv", "--clock-control", "none", "--kernel-name", "regex:three_pass", "--metrics"]
    command += [",".join(METRICS.values()), sys.executable, __file__, "--launch"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        sys.exit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    launches: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        launches.setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    names = [(order, direction) for order in get_args(SharedOrder) for direction in ("forward", "backward")]
    rows = []
    for (order, direction), counters in zip(names, launches.values(), strict=True):
        choice = plans(order)
        plan = choice.plan(direction)  # type: ignore[arg-type]
        gpu = present_gpu()
        assert gpu is not None
        cost = choice.algorithm.cost(SPEC, plan, gpu, ITEMS)
        row = {"order": order, "direction": direction, "items": ITEMS}
        row |= {name: counters[metric] for name, metric in METRICS.items()}
        row["predicted_own_row_wavefronts"] = choice.algorithm.access_wavefronts(SPEC, plan)["own"]  # type: ignore[attr-defined]
        row["predicted_wavefronts"] = cost.shared_wavefronts
        row["predicted_operations"] = cost.fma
        rows.append(row)
        print(row)
    write_result(options.out, {"spec": SPEC.slug, "rows": rows})


if __name__ == "__main__":
    main()
