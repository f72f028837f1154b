"""Tuned tables: what is found for which GPU, what is not taken, and how they are written."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path

import pytest
import torch

import invpool
from helpers import fake_compiler, run_processes
from invpool import tuned
from invpool.abi import DIRECTIONS
from invpool.algorithms import Choice, choose, find_algorithm
from invpool.cache import KernelCache
from invpool.emulator.op import EmulatedOp
from invpool.errors import OutputError
from invpool.generate import Planned, Request, generate
from invpool.generate import plan as plan_request
from invpool.gpu import KNOWN_GPUS, known_gpu
from invpool.render import TEMPLATES_VARIABLE, source_digest, template_root
from invpool.spec import PoolSpec
from invpool.tuned import (
    TUNED_VARIABLE,
    TunedRow,
    TunedTable,
    device_folder,
    find_table,
    planned_rows,
    read_table,
    table_path,
    write_table,
)

SPEC = PoolSpec(9, 20)
H200 = KNOWN_GPUS["h200"]
DEVICE = "NVIDIA H200"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "tuned"
    monkeypatch.setenv(TUNED_VARIABLE, str(root))
    return root


def choice_of(spec: PoolSpec, number: int, algorithm: str = "one_pass") -> Choice:
    found = find_algorithm(algorithm)
    plans = [found.legal(spec, H200, direction)[number] for direction in ("forward", "backward")]
    return Choice(found, *plans)


def table_of(spec: PoolSpec = SPEC, device: str = DEVICE, arch: str = "sm_90", batches=(16, 4096)) -> TunedTable:
    rows = tuple(
        TunedRow.of(spec, batch, choice_of(spec, number), {d: {"median_us": 1.0} for d in ("forward", "backward")})
        for number, batch in enumerate(batches)
    )
    return TunedTable(device, arch, spec, rows, {"driver": "1"})


def test_a_table_comes_back_as_it_was_written(store: Path) -> None:
    table = table_of()
    path = write_table(table)
    assert path == store / "nvidia-h200" / "h9_k20_f32_bhk.json"
    assert read_table(path) == table
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert find_table(SPEC, H200) == table
    assert find_table(SPEC, dataclasses.replace(H200, name=DEVICE)) == table


def test_rows_meet_at_the_geometric_mean_and_like_neighbours_are_one() -> None:
    table = table_of(batches=(16, 256, 4096))
    assert [start for start, _ in table.starts()] == [0, 64, 1024]
    alike = dataclasses.replace(
        table, rows=(table.rows[0], dataclasses.replace(table.rows[0], batch=256), table.rows[2])
    )
    assert [start for start, _ in alike.starts()] == [0, 1024]


def test_exact_device_before_the_same_architecture_before_nothing(store: Path) -> None:
    h100 = KNOWN_GPUS["h100"]
    write_table(table_of(batches=(7,)))
    found = find_table(SPEC, h100)
    assert found is not None
    assert found.device == DEVICE
    write_table(table_of(device="NVIDIA H100 80GB HBM3", batches=(8,)))
    found = find_table(SPEC, h100)
    assert found is not None
    assert found.rows[0].batch == 8
    assert find_table(SPEC, KNOWN_GPUS["a100"]) is None
    assert find_table(PoolSpec(9, 21), h100) is None


@pytest.mark.parametrize(
    "other",
    [
        PoolSpec(9, 20, "float64"),
        PoolSpec(9, 20, layout="bkh"),
        PoolSpec(9, 20, masked=True),
        PoolSpec(9, 20, precision="tf32"),
        PoolSpec(10, 20),
    ],
)
def test_d22_a_table_serves_its_own_spec_alone(other: PoolSpec) -> None:
    write_table(table_of())
    assert find_table(other, H200) is None


def damage(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda path: path.write_text("{"), "cannot be read"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda path: path.write_text("[]"), "cannot be read"),
        (lambda path: damage(path, schema=99), "has schema 99"),
        (lambda path: damage(path, slug="h1_k1_f32_bhk"), "is of h1_k1_f32_bhk"),
        (lambda path: damage(path, rows=[]), "has rows for batches"),
        (lambda path: damage(path, rows=[{"batch": 1, "algorithm": "no_such"}]), "cannot be read"),
        (lambda path: path.write_text(path.read_text().replace('"source": "', '"source": "0')), "other kernels"),
    ],
)
def test_what_cannot_be_used_is_one_warning_and_default_plans(
    fault, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_table(table_of())
    fault(path)
    request = Request(SPEC, Path("p"), H200)
    with caplog.at_level(logging.WARNING, "invpool"):
        for _ in range(2):
            assert plan_request(request, H200, ("sm_90",)) == Planned(((0, choose(SPEC, H200)),))
    (warning,) = caplog.messages
    assert said in warning
    assert str(path) in warning
    assert "invpool sweep --H 9 --K 20" in warning


def test_a_table_of_illegal_plans_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    path = write_table(table_of())
    data = json.loads(path.read_text())
    data["rows"][0]["forward"]["plan"]["k_step"] = 17
    path.write_text(json.dumps(data))
    assert find_table(SPEC, H200) is None
    assert "not legal on h200: k_step is 17" in caplog.text


@pytest.mark.parametrize("value", [0, "x", None, 10**9])
def test_parameters_that_are_of_no_use_are_one_warning(value: object, caplog: pytest.LogCaptureFixture) -> None:
    spec = PoolSpec(128, 32)
    row = TunedRow.of(spec, 16, choice_of(spec, 0, "one_pass_mma"), {"forward": {}, "backward": {}})
    path = write_table(TunedTable(DEVICE, "sm_90", spec, (row,)))
    data = json.loads(path.read_text())
    for name in ("row_blocks", "most_blocks", "registers"):
        data["rows"][0]["forward"]["plan"][name] = value
    path.write_text(json.dumps(data))
    assert find_table(spec, H200) is None
    (warning,) = caplog.messages
    assert str(path) in warning


def test_a_table_of_another_architecture_s_algorithm_is_not_taken_for_it() -> None:
    spec = PoolSpec(128, 32)
    row = TunedRow.of(spec, 16, choice_of(spec, 0, "one_pass_wgmma"), {"forward": {}, "backward": {}})
    write_table(TunedTable(DEVICE, "sm_90", spec, (row,)))
    assert planned_rows(spec, H200, ("sm_90",)) is not None
    assert planned_rows(spec, H200, ("sm_80", "sm_90")) is None


def test_an_edit_of_a_template_makes_a_table_stale_and_one_of_a_comment_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(table_of())
    tree = tmp_path / "templates"
    for file in sorted(Path(str(template_root())).rglob("*")):
        if file.is_file():
            target = tree / file.relative_to(Path(str(template_root())))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    monkeypatch.setenv(TEMPLATES_VARIABLE, str(tree))
    header = tree / "include" / "sums.cuh"
    text = header.read_text()
    plan = choice_of(SPEC, 0).forward
    before = source_digest(find_algorithm("one_pass"), SPEC, plan)
    header.write_text("// Another comment.\n" + text)
    assert source_digest(find_algorithm("one_pass"), SPEC, plan) == before
    assert find_table(SPEC, H200) is not None
    header.write_text("constexpr int kAnother = 1;\n" + text)
    assert source_digest(find_algorithm("one_pass"), SPEC, plan) != before
    assert find_table(SPEC, H200) is None


def test_other_batches_are_kept_unless_they_are_stale(store: Path) -> None:
    write_table(table_of(batches=(16, 4096)))
    path = write_table(table_of(batches=(256,)))
    table = read_table(path)
    assert table is not None
    assert [row.batch for row in table.rows] == [16, 256, 4096]
    data = json.loads(path.read_text())
    data["rows"][0]["forward"]["source"] = "0"
    path.write_text(json.dumps(data))
    table = read_table(write_table(table_of(batches=(256,))))
    assert table is not None
    assert [row.batch for row in table.rows] == [256, 4096]


def _write_one(number: int, root: str) -> None:
    os.environ[TUNED_VARIABLE] = root
    write_table(table_of(PoolSpec(9, 20 + number % 4), batches=(1 + number,)))


def test_processes_that_write_into_one_store_lose_nothing(store: Path) -> None:
    assert run_processes(_write_one, [(number, str(store)) for number in range(8)]) == [0] * 8
    for K in range(4):
        table = read_table(table_path(store, DEVICE, PoolSpec(9, 20 + K)))
        assert table is not None
        assert [row.batch for row in table.rows] == [1 + K, 5 + K]
    assert sorted(path.name for path in (store / "nvidia-h200").iterdir()) == [
        f"h9_k{20 + K}_f32_bhk.json" for K in range(4)
    ]


def test_a_store_that_cannot_be_written_names_the_variable(store: Path) -> None:
    store.parent.mkdir(exist_ok=True)
    store.write_text("a file")
    with pytest.raises(OutputError, match=TUNED_VARIABLE):
        write_table(table_of())


def test_a_listed_gpu_is_the_device_whose_name_holds_its_own() -> None:
    spec, gpu = PoolSpec(9, 21), KNOWN_GPUS["rtx5090"]
    plans = [find_algorithm("one_pass").legal(spec, gpu, d)[0] for d in ("forward", "backward")]
    choice = Choice(find_algorithm("one_pass"), *plans)
    row = TunedRow.of(spec, 16, choice, {"forward": {}, "backward": {}})
    other = dataclasses.replace(row, batch=32)
    write_table(TunedTable("NVIDIA GeForce RTX 5080", "sm_120", spec, (other,)))
    write_table(TunedTable("NVIDIA GeForce RTX 5090", "sm_120", spec, (row,)))
    found = find_table(spec, gpu)
    assert found is not None
    assert found.device == "NVIDIA GeForce RTX 5090"


SHIPPED = sorted(Path(tuned.__file__).parent.glob("*/*.json"))


def test_tables_ship() -> None:
    assert len(SHIPPED) >= 12


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_table_is_of_today_s_kernels(path: Path) -> None:
    """One that is not warns everybody who generates: measure it again (tools/ship_tables.py), or take it out."""
    table = read_table(path, dataclasses.replace(known_gpu("h200"), name="NVIDIA H200"))
    assert table is not None
    assert table.spec.slug == path.stem
    assert all(row.evidence[d]["median_us"] > 0 for row in table.rows for d in DIRECTIONS)


def test_device_folders() -> None:
    assert device_folder("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert device_folder("../../etc") == "etc"


def test_generate_takes_the_table_and_every_row_is_proved(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache", fake_compiler)
    write_table(table_of())
    result = generate(Request(SPEC, tmp_path / "p", H200), cache)
    assert result.planned.tuned_on == DEVICE
    assert [kernel.plan for kernel in result.kernels] == [
        plan for number in (0, 1) for plan in (choice_of(SPEC, number).forward, choice_of(SPEC, number).backward)
    ]
    op = invpool.load(tmp_path / "p")
    assert op.manifest["tuned_on"] == DEVICE
    assert op.manifest["regenerate"] == "invpool generate --H 9 --K 20"
    assert op.row_starts == (0, 256)
    assert [(op._row(batch)["forward"], op._row(batch)["backward"]) for batch in (255, 256)] == [(0, 1), (2, 3)]
    assert len({kernel["source"]["file"] for kernel in op.manifest["kernels"]}) == 4
    proof = result.emulated_proof
    assert proof is not None
    assert proof.ok
    assert {"out normal", "out normal, plans from B=256", "dx large, plans from B=256"} <= {
        f.name for f in proof.findings
    }
    emulated = EmulatedOp(tmp_path / "p")
    x = torch.randn(3, SPEC.H, SPEC.K)
    with emulated.only_row(1):
        other = emulated(x)
    torch.testing.assert_close(emulated(x), other)
    named = generate(Request(SPEC, tmp_path / "q", H200, algorithm="one_pass", on="emulator"), cache)
    assert named.planned.tuned_on is None
    untuned = generate(Request(SPEC, tmp_path / "r", H200, tuned=False, on="emulator"), cache)
    assert untuned.planned == Planned(((0, choose(SPEC, H200)),))
