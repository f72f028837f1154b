"""What the commands print: rich tables for people, plain dictionaries for ``--json``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from invpool.abi import DIRECTIONS
from invpool.algorithms import ALGORITHMS, best_plan
from invpool.check import Finding, Proof
from invpool.generate import Generated
from invpool.gpu import Gpu
from invpool.spec import PoolSpec

NOT_RUN = "compiled, not run"
_P = TypeVar("_P", Proof, dict[str, Any])
_NOWHERE = "there is no GPU here that can run them, and no g++ for the emulator"


def print_json(console: Console, data: Any) -> None:
    console.out(json.dumps(data, indent=1, allow_nan=False), highlight=False)


def plain_table(title: str, *columns: str, left: tuple[str, ...] = ()) -> Table:
    """A table that still reads at 80 columns: thin rules, numbers to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column in left[:1], justify="left" if column in left else "right")
    return table


def _plan_text(knobs: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in knobs.items())


def _kib(count: int) -> str:
    return f"{count / 1024:.1f} KiB"


def _proof_cell(finding: Finding) -> str:
    sign = "[green]ok[/]" if finding.ok else "[red]WRONG[/]"
    return f"{sign} {finding.error:.1e} <= {finding.tolerance:.1e}"


def generated_dict(result: Generated) -> dict[str, Any]:
    """Everything that ``invpool generate`` reports, for scripts."""
    spec = result.request.spec
    kernels = []
    for kernel in result.kernels:
        launch = kernel.algorithm.launch(spec, kernel.plan)
        kernels.append(
            {
                "direction": kernel.plan.direction,
                "algorithm": kernel.algorithm.name,
                "plan": kernel.plan.knobs,
                "shared_bytes": launch.shared_bytes,
                "threads": launch.threads,
                "resources": {
                    target.name: dataclasses.asdict(compiled.resources)
                    for target, compiled in kernel.images
                    if compiled.resources
                },
            }
        )
    return {
        "slug": spec.slug,
        "path": str(result.request.out),
        "gpu": result.gpu.name,
        "gpu_is_present": result.gpu_is_present,
        "archs": list(result.archs),
        "tuned_on": result.planned.tuned_on,
        "table": [dataclasses.asdict(row) for row in result.planned.table()],
        "kernels": kernels,
        "kernel_proof": result.kernel_proof.as_dict() if result.kernel_proof else None,
        "emulated_proof": result.emulated_proof.as_dict() if result.emulated_proof else None,
        "closed_form_proof": result.cpu_proof.as_dict(),
    }


def print_generated(console: Console, result: Generated) -> None:
    spec, out = result.request.spec, result.request.out
    where = "the GPU in this machine" if result.gpu_is_present else "not in this machine"
    table = plain_table(
        f"{spec.slug}, planned for {result.gpu.name} ({where})",
        *("direction", "registers", "spills", "shared", "occupancy", "error of the kernel"),
        left=("direction",),
    )
    shown_arch = result.gpu.arch if result.gpu.arch in result.archs else result.archs[0]
    for kernel in result.kernels:
        launch = kernel.algorithm.launch(spec, kernel.plan)
        target = kernel.algorithm.arch_target(shown_arch)
        resources = next(c.resources for t, c in kernel.images if t.name == target)
        assert resources is not None
        blocks = result.gpu.blocks_per_sm(launch.threads, launch.shared_bytes, resources.registers)
        proof = kernel_proofs(result.kernel_proof, result.emulated_proof)[0]
        prefix = "out" if kernel.plan.direction == "forward" else "dx"
        table.add_row(
            kernel.plan.direction,
            str(resources.registers),
            f"{resources.spill_stores + resources.spill_loads} B",
            _kib(launch.shared_bytes),
            f"{100 * blocks * launch.threads / result.gpu.threads_per_sm:.0f} %, {blocks} blocks",
            _proof_cell(proof.worst(prefix)) if proof else f"[yellow]{NOT_RUN}[/]",
        )
    console.print(table)
    for kernel in result.kernels:
        console.print(f"{kernel.plan.direction + ':':<10}{kernel.algorithm.name} {kernel.plan}", soft_wrap=True)
    for line in _rows_lines([dataclasses.asdict(row) for row in result.planned.table()], result.planned.tuned_on):
        console.print(line, soft_wrap=True)
    package, parent = escape(str(out)), escape(str(out.parent))
    lines = [
        *(
            f"kernels:  checked on {proof.device}, forward and backward, against float64"
            if proof
            else f"kernels:  {NOT_RUN}: {_NOWHERE}; where there is one: [bold]invpool check {package}[/]"
            for proof in kernel_proofs(result.kernel_proof, result.emulated_proof)
        ),
        f"closed form for CPU tensors: {_closed_form_line(result.cpu_proof)}",
        f"targets:  {', '.join(target.name for target, _ in result.kernels[0].images)}",
        f"package:  {package}",
        f'use it:   [bold]import invpool; op = invpool.load("{package}")[/]',
        f"or, with {parent} on sys.path and torch alone: [bold]from {out.name} import inverted_attention_pool[/]",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


def _rows_lines(rows: list[dict[str, int]], tuned_on: str | None) -> list[str]:
    """Where plans come from, and which kernels serve which batches if not all serve all."""
    lines = [f"plans:    tuned on {tuned_on}" if tuned_on else "plans:    predicted; to measure: invpool sweep"]
    if len(rows) > 1:
        lines += [
            f"          from B={row['min_batch']}: kernels {row['forward'] + 1} and {row['backward'] + 1}"
            for row in rows
        ]
    return lines


def kernel_proofs(on_gpu: _P | None, emulated: _P | None) -> list[_P | None]:
    """The proofs of the kernels that there are, the GPU's first; one None where the kernels ran nowhere."""
    return [proof for proof in (on_gpu, emulated) if proof is not None] or [None]


def _closed_form_line(proof: Proof) -> str:
    worst = max(proof.findings, key=lambda finding: finding.error / finding.tolerance if finding.tolerance else 0.0)
    return f"{'ok' if proof.ok else 'WRONG'}, {len(proof.findings)} checks, nearest {worst.name} {worst.error:.1e}"


def print_proof(console: Console, title: str, proof: Proof | None) -> None:
    if proof is None:
        console.print(f"{title}: [yellow]{NOT_RUN}[/]: {_NOWHERE}")
        return
    table = plain_table(
        f"{title} on {proof.device}", "check", "error", "allowed", "against", "", left=("check", "against", "")
    )
    for finding in proof.findings:
        table.add_row(
            finding.name,
            f"{finding.error:.2e}",
            f"{finding.tolerance:.2e}",
            finding.against,
            "[green]ok[/]" if finding.ok else "[red]WRONG[/]",
        )
    console.print(table)


def print_manifest(console: Console, folder: Path, manifest: dict[str, Any], proof: dict[str, Any] | None) -> None:
    table = plain_table(
        f"{manifest['slug']} in {escape(str(folder))}, planned for {manifest['planned_for']}",
        *("direction", "target", "registers", "spills", "file"),
        left=("direction", "target", "file"),
    )
    for kernel in manifest["kernels"]:
        for position, image in enumerate(kernel["images"]):
            resources = image["resources"]
            table.add_row(
                kernel["direction"] if position == 0 else "",
                image["target"],
                str(resources["registers"]) if resources else "by driver",
                f"{resources['spill_stores'] + resources['spill_loads']} B" if resources else "",
                image["file"],
            )
    console.print(table)
    for kernel in manifest["kernels"]:
        launch = kernel["launch"]
        console.print(
            f"{kernel['direction'] + ':':<10}{kernel['algorithm']} {_plan_text(kernel['plan'])}, "
            f"{launch['threads']} threads, {_kib(launch['shared_bytes'])} shared",
            soft_wrap=True,
        )
    for line in _rows_lines(manifest["table"], manifest.get("tuned_on")):
        console.print(line, soft_wrap=True)
    for kernels in kernel_proofs(*((proof or {}).get(where) for where in ("kernels", "emulated"))):
        console.print(
            f"kernels: last checked on {kernels['device']}: {'ok' if kernels['ok'] else 'WRONG'}"
            if kernels
            else f"kernels: {NOT_RUN}"
        )
    console.print(f"regenerate with: {manifest['regenerate']}", highlight=False)


def explain_rows(spec: PoolSpec, gpu: Gpu, batch: int) -> list[dict[str, Any]]:
    """One row for each algorithm and direction: its best plan and what that costs, or why there is none."""
    rows: list[dict[str, Any]] = []
    for algorithm in ALGORITHMS.values():
        for direction in DIRECTIONS:
            row: dict[str, Any] = {"algorithm": algorithm.name, "direction": direction, "summary": algorithm.summary}
            best = best_plan(algorithm, spec, gpu, direction, batch)
            if best is None:
                plans = list(algorithm.candidates(spec, direction))
                least = min(plans, key=lambda plan: algorithm.layout(spec, plan).bytes)
                rows.append(row | {"rejected": algorithm.reject(spec, least, gpu)})
                continue
            plan, cost = best
            rows.append(
                row
                | {
                    "plan": plan.knobs,
                    "legal_plans": len(algorithm.legal(spec, gpu, direction)),
                    **dataclasses.asdict(cost),
                    "seconds": cost.seconds(gpu),
                    "bound": cost.bound(gpu),
                    "occupancy": cost.occupancy(gpu),
                }
            )
    return rows


def print_explain(console: Console, spec: PoolSpec, gpu: Gpu, batch: int, rows: list[dict[str, Any]]) -> None:
    table = plain_table(
        f"{spec.slug}, B={batch}, on {gpu.name} ({gpu.arch}): the best plan of each algorithm, predicted",
        *("algorithm", "direction", "Gop", "Gexp", "DRAM MB", "scratch", "KiB", "us", "bound"),
        left=("algorithm", "direction", "bound"),
    )
    for row in rows:
        if "rejected" in row:
            table.add_row(row["algorithm"], row["direction"], *["-"] * 7)
            continue
        table.add_row(
            row["algorithm"],
            row["direction"],
            f"{row['fma'] / 1e9:.1f}",
            f"{row['mufu'] / 1e9:.2f}",
            f"{row['dram_bytes'] / 1e6:.0f}",
            f"{row['scratch_bytes'] / 1e6:.0f}",
            f"{row['shared_bytes'] / 1024:.1f}",
            f"{row['seconds'] * 1e6:.0f}",
            row["bound"],
        )
    console.print(table)
    least = {direction: spec.least_bytes(direction, batch) / 1e6 for direction in DIRECTIONS}
    console.print(f"least traffic: forward {least['forward']:.0f} MB, backward {least['backward']:.0f} MB")
    console.print("Gop: multiply-adds, additions and products; scratch: MB of DRAM beyond x, out, lse, g and dx;")
    console.print("KiB: shared memory of a block; lsu: the unit of loads and stores")
    for row in rows:
        what = f"[red]not legal[/]: {row['rejected']}" if "rejected" in row else _plan_text(row["plan"])
        legal = "" if "rejected" in row else f" (of {row['legal_plans']} legal)"
        console.print(f"{row['algorithm']} {row['direction']}: {what}{legal}", soft_wrap=True)
