"""Tuned tables: which plans were measured to be fastest for a spec on a device, by batch size.

    <root>/<device>/<slug>.json        root: $INVPOOL_TUNED_DIR, else <cache root>/tuned, else what ships in this folder

A table belongs to the kernels it was measured with: each plan carries the digest of its source, and a plan whose source
is another one today is not taken. A table that cannot be used costs one warning that names the file and what to type,
never an error: the default plans are always there.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import Choice, find_algorithm
from invpool.cache import default_root, is_writable, lock_for, write_durably
from invpool.errors import OutputError, TemplateError
from invpool.gpu import KNOWN_GPUS, Gpu, gpu_named
from invpool.render import source_digest
from invpool.spec import PoolSpec

log = logging.getLogger("invpool")

TUNED_VARIABLE: Final = "INVPOOL_TUNED_DIR"
_SCHEMA: Final = 1
_warned: Final[set[Path]] = set()


@dataclasses.dataclass(frozen=True)
class TunedRow:
    """The plans for about ``batch`` items, and what was measured of them.

    Attributes:
        batch: items of the launches that were timed.
        choice: the plans.
        digests: of each direction's source, by :func:`invpool.render.source_digest`.
        evidence: by direction: median and quartiles in microseconds, the ratio to the default plan.
    """

    batch: int
    choice: Choice
    digests: Mapping[Direction, str]
    evidence: Mapping[Direction, Any]

    @classmethod
    def of(cls, spec: PoolSpec, batch: int, choice: Choice, evidence: Mapping[Direction, Any]) -> TunedRow:
        """A row of the kernels as they are rendered today."""
        return cls(batch, choice, digests(spec, choice), evidence)


@dataclasses.dataclass(frozen=True)
class TunedTable:
    """The rows of one spec on one device, in the order of their batches, all with the same state between directions."""

    device: str
    arch: str
    spec: PoolSpec
    rows: tuple[TunedRow, ...]
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def starts(self) -> list[tuple[int, Choice]]:
        """(first batch, plans) of each row: two rows meet at the geometric mean of theirs; like neighbours are one."""
        found: list[tuple[int, Choice]] = []
        for before, row in zip((None, *self.rows), self.rows, strict=False):
            start = 0 if before is None else math.isqrt(before.batch * row.batch - 1) + 1
            if not found or found[-1][1] != row.choice:
                found.append((start, row.choice))
        return found


def digests(spec: PoolSpec, choice: Choice) -> dict[Direction, str]:
    """The digest of each direction's source under a choice."""
    return {d: source_digest(choice.algorithm, spec, choice.plan(d)) for d in DIRECTIONS}


def device_folder(device: str) -> str:
    """``nvidia-h200`` for ``NVIDIA H200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"


def own_root() -> Path:
    """Where a sweep writes: ``$INVPOOL_TUNED_DIR``, else ``tuned`` in the cache."""
    override = os.environ.get(TUNED_VARIABLE)
    return Path(override) if override else default_root() / "tuned"


def roots() -> list[Path]:
    """Where tables are looked for, the first that has one wins."""
    shipped = importlib.resources.files("invpool") / "tuned"
    return [own_root(), *([shipped] if isinstance(shipped, Path) else [])]


def table_path(root: Path, device: str, spec: PoolSpec) -> Path:
    return root / device_folder(device) / f"{spec.slug}.json"


def sweep_command(spec: PoolSpec) -> str:
    """What to type to measure a table."""
    return f"invpool sweep {spec.cli_arguments()}"


# ---------------------------------------------------------------- reading


class _UnusableError(Exception):
    """Why a table is not used."""


def _parsed(path: Path) -> TunedTable:
    """The table of a file.

    Raises:
        FileNotFoundError: there is none.
        _UnusableError: it is damaged, of another schema, or lies in another one's place.
    """
    try:
        data = json.loads(path.read_bytes())
        if data["schema"] != _SCHEMA:
            raise _UnusableError(f"has schema {data['schema']}, this invpool reads {_SCHEMA}")
        spec = PoolSpec.from_slug(data["slug"])
        if path != table_path(path.parent.parent, data["device"], spec):
            raise _UnusableError(f"is of {spec.slug} on {data['device']}")
        rows = []
        for row in data["rows"]:
            algorithm = find_algorithm(row["algorithm"])
            plans = {d: algorithm.plan_from_knobs(d, row[d]["plan"]) for d in DIRECTIONS}
            recorded = {d: str(row[d]["source"]) for d in DIRECTIONS}
            evidence = {d: dict(row[d]["evidence"]) for d in DIRECTIONS}
            rows.append(TunedRow(int(row["batch"]), Choice(algorithm, **plans), recorded, evidence))
        provenance = dict(data["provenance"])
        table = TunedTable(str(data["device"]), str(data["arch"]), spec, tuple(rows), provenance)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _UnusableError(f"cannot be read ({error!r})") from error
    batches = [row.batch for row in rows]
    if not rows or batches[0] < 1 or batches != sorted(set(batches)):
        raise _UnusableError(f"has rows for batches {batches}, which must rise from 1")
    if len({row.choice.algorithm.state(spec) for row in rows}) != 1:
        raise _UnusableError("has rows that do not agree on what forward leaves for backward")
    return table


def _fitted(table: TunedTable, gpu: Gpu) -> TunedTable:
    """The table with its plans fitted to a GPU.

    Raises:
        _UnusableError: a plan is not legal there, or its kernel is not the one that was measured.
    """
    rows = []
    for row in table.rows:
        algorithm = row.choice.algorithm
        try:
            plans = {d: algorithm.fitted(table.spec, row.choice.plan(d), gpu) for d in DIRECTIONS}
            reasons = {d: algorithm.reject(table.spec, plans[d], gpu) for d in DIRECTIONS}
        except (TypeError, ValueError, ArithmeticError, KeyError) as error:
            raise _UnusableError(f"has a plan whose parameters are of no use: {error!r}") from error
        for plan in plans.values():
            reason = reasons[plan.direction] or algorithm.reject_arch(gpu.arch)
            if reason is not None:
                raise _UnusableError(f"has a {plan.direction} plan that is not legal on {gpu.name}: {reason}")
        choice = Choice(algorithm, **plans)
        try:
            today = digests(table.spec, choice)
        except (TemplateError, ValueError) as error:
            raise _UnusableError(f"has a plan that cannot be rendered: {error}") from error
        if today != dict(row.digests):
            raise _UnusableError("was measured with other kernels than today's")
        rows.append(dataclasses.replace(row, choice=choice))
    return dataclasses.replace(table, rows=tuple(rows))


def _warn(path: Path, reason: str) -> None:
    """One warning a file and process."""
    if path in _warned:
        return
    _warned.add(path)
    try:
        command = sweep_command(PoolSpec.from_slug(path.stem))
    except ValueError:
        command = "invpool sweep --H ... --K ..."
    log.warning("%s %s; it is not used; remove it, or measure it again: %s", path, reason, command)


def read_table(path: Path, gpu: Gpu | None = None) -> TunedTable | None:
    """The table of a file, fitted to a GPU if one is given; None where there is none.

    None, after one warning, also where it is damaged, of another schema or of other kernels than today's.
    """
    try:
        table = _parsed(path)
        return table if gpu is None else _fitted(table, gpu)
    except FileNotFoundError:
        return None
    except _UnusableError as error:
        _warn(path, str(error))
        return None


def _places(spec: PoolSpec, gpu: Gpu) -> list[Path]:
    """Where a table may be, the best place first: of this very device in each root, then of its architecture."""
    exact, alike = [], []
    name = device_folder(gpu.name)
    for root in roots():
        try:
            files = sorted(root.glob(f"*/{spec.slug}.json"))
        except OSError:
            continue
        for path in files:
            # A listed GPU (h200) is the device whose name holds its own (NVIDIA H200).
            listed = gpu_named(path.parent.name.replace("-", ""), KNOWN_GPUS.values())
            if path.parent.name == name or (listed is not None and listed.name == gpu.name):
                exact.append(path)
            elif _arch_of(path) == gpu.arch:
                alike.append(path)
    return exact + alike


def _arch_of(path: Path) -> str | None:
    """The architecture a table is of; None where that cannot be read: it is of no interest then."""
    try:
        return str(json.loads(path.read_bytes())["arch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_table(spec: PoolSpec, gpu: Gpu) -> TunedTable | None:
    """The table for a spec on a GPU: of this very device, else of one of its architecture; None if there is none."""
    for path in _places(spec, gpu):
        table = read_table(path, gpu)
        if table is not None:
            return table
    return None


# ---------------------------------------------------------------- writing


def _row_dict(row: TunedRow) -> dict[str, Any]:
    of_direction: dict[str, Any] = {
        d: {"plan": row.choice.plan(d).knobs, "source": row.digests[d], "evidence": dict(row.evidence.get(d, {}))}
        for d in DIRECTIONS
    }
    return {"batch": row.batch, "algorithm": row.choice.algorithm.name, **of_direction}


def table_dict(table: TunedTable) -> dict[str, Any]:
    """The table as its file holds it."""
    return {
        "schema": _SCHEMA,
        "device": table.device,
        "arch": table.arch,
        "slug": table.spec.slug,
        "rows": [_row_dict(row) for row in table.rows],
        "provenance": dict(table.provenance),
    }


def merged(old: TunedTable | None, new: TunedTable) -> TunedTable:
    """The new rows, and of the old ones those of other batches that are still of today's kernels and fit the new."""
    if old is None or old.spec != new.spec or old.device != new.device:
        return new
    state = new.rows[0].choice.algorithm.state(new.spec)
    measured = {row.batch for row in new.rows}
    kept = [
        row
        for row in old.rows
        if row.batch not in measured
        and row.choice.algorithm.state(new.spec) == state
        and dict(row.digests) == digests(new.spec, row.choice)
    ]
    return dataclasses.replace(new, rows=tuple(sorted((*kept, *new.rows), key=lambda row: row.batch)))


def write_table(table: TunedTable, root: Path | None = None) -> Path:
    """Puts the table in the store, whole or not at all, merged with what is there; safe among processes.

    Raises:
        OutputError: the store cannot be written; names the variable that sets another.
    """
    if not table.rows:
        raise ValueError("a table without rows says nothing")
    root = own_root() if root is None else root
    path = table_path(root, table.device, table.spec)
    if not is_writable(path.parent):
        raise OutputError(f"{path.parent} cannot be written; set {TUNED_VARIABLE} to a folder that can")
    with lock_for(str(path.absolute())):
        old = read_table(path)
        data = json.dumps(table_dict(merged(old, table)), indent=1, allow_nan=False) + "\n"
        try:
            handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
            os.close(handle)
            write_durably(Path(name), data.encode())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error}; set {TUNED_VARIABLE} to another folder") from error
    _warned.discard(path)
    return path


def planned_rows(spec: PoolSpec, gpu: Gpu, archs: Sequence[str] = ()) -> tuple[list[tuple[int, Choice]], str] | None:
    """(first batch, plans) of each tuned row and the device they were measured on; None where there is no table.

    Rows of an algorithm that cannot be compiled for one of ``archs`` make the table useless there.
    """
    table = find_table(spec, gpu)
    if table is None or any(row.choice.algorithm.reject_arch(*archs) for row in table.rows):
        return None
    return table.starts(), table.device
