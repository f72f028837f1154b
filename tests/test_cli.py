"""The commands as a person or a script meets them: real processes, real nvcc."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import TENSOR_CORES
from invpool.cli import app as app_room


def invpool(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "invpool.cli.app", *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(sys.path), **env},
        timeout=300,
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    done = invpool("generate", "--H", "7", "--K", "5", "--arch", "sm_90", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "build" / "h7_k5_f32_bhk"


def algorithm_of(package: Path) -> str:
    (source,) = package.glob("*_forward.cu")
    return source.stem.removesuffix("_forward")


def test_alone_it_tells_what_to_do_first(tmp_path: Path) -> None:
    done = invpool(cwd=tmp_path)
    assert "invpool generate --H 128 --K 32" in done.stdout + done.stderr
    for command in ("generate", "check", "show", "explain", "clean"):
        assert "Example: invpool" in invpool(command, "--help", cwd=tmp_path).stdout


def test_generate_ends_with_what_a_person_needs(package: Path) -> None:
    done = invpool("generate", "--H", "7", "--K", "5", "--arch", "sm_90", cwd=package.parent.parent)
    assert done.returncode == 0
    for text in (
        "h7_k5_f32_bhk, planned for",
        "registers",
        "spills",
        "shared",
        "occupancy",
        f"forward:  {algorithm_of(package)} ",
        "closed form for CPU tensors: ok",
        "targets:  sm_90, compute_75",  # of three_pass
        'op = invpool.load("build/h7_k5_f32_bhk")',
        "from h7_k5_f32_bhk import inverted_attention_pool",
    ):
        assert text in done.stdout
    assert "\x1b[" not in done.stdout + done.stderr


def test_json_is_json(package: Path) -> None:
    home = package.parent.parent
    generated = json.loads(invpool("generate", "--H", "7", "--K", "5", "--arch", "sm_90", "--json", cwd=home).stdout)
    assert [kernel["direction"] for kernel in generated["kernels"]] == ["forward", "backward"]
    assert generated["kernels"][0]["resources"]["sm_90"]["registers"] > 0
    checked = json.loads(invpool("check", str(package), "--json", cwd=home).stdout)
    assert checked["closed_form"]["ok"]
    shown = json.loads(invpool("show", str(package), "--json", cwd=home).stdout)
    assert shown["manifest"]["slug"] == "h7_k5_f32_bhk"
    explained = json.loads(invpool("explain", "--H", "7", "--K", "5", "--json", cwd=home).stdout)
    assert {row["algorithm"] for row in explained["rows"]} >= {"one_pass", *TENSOR_CORES, "three_pass", "recompute"}


def test_show_prints_the_source(package: Path) -> None:
    done = invpool("show", str(package), "--source", "backward", cwd=package.parent)
    assert done.stdout.rstrip("\n") == (package / f"{algorithm_of(package)}_backward.cu").read_text().rstrip("\n")
    assert "regenerate with: invpool generate --H 7 --K 5" in invpool("show", str(package), cwd=package.parent).stdout


def test_a_package_with_parts_missing_gets_one_line(package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "p"
    shutil.copytree(package, copy)
    source = f"{algorithm_of(package)}_forward.cu"
    (copy / source).unlink()
    (copy / "runtime.py").unlink()
    (copy / "proof.json").write_text('{"kernels": {}}')
    for words, message in (
        (("show", "p", "--source", "forward"), f"{source} cannot be read"),
        (("check", "p"), "p lacks runtime.py; regenerate with: invpool generate --H 7 --K 5"),
    ):
        done = invpool(*words, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
    assert invpool("show", "p", cwd=tmp_path).returncode == 0


def test_any_other_failure_of_the_system_gets_one_line(monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    def failing() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(app_room, "app", failing)
    with pytest.raises(SystemExit) as caught:
        app_room.main()
    assert caught.value.code == 1
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err  # type: ignore[attr-defined]


def test_explain_shows_what_made_recompute_slow(tmp_path: Path) -> None:
    done = invpool("explain", "--H", "128", "--K", "32", "--gpu", "h200", cwd=tmp_path)
    assert done.returncode == 0
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if " forward  " in line}
    assert float(rows["recompute"][2]) > 2.5 * float(rows["three_pass"][2])
    assert rows["three_pass"][5] == "1074"
    assert "least traffic: forward 277 MB, backward 554 MB" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("generate", "--H", "0", "--K", "3"), 2, "H is 0; it must be at least 1"),
        (("generate", "--H", "-4", "--K", "3"), 2, "H is -4"),
        (("generate", "--H", "3", "--K", "0"), 2, "K is 0"),
        (("generate", "--H", "99999999", "--K", "3"), 2, "fewer than 2**31"),
        (("generate", "--H", "x", "--K", "3"), 2, "an integer"),
        (("generate", "--H", "3"), 2, "Missing option '--K'"),
        (("generate", "--H", "3", "--K", "3", "--dtype", "int8"), 2, "legal: float32, float16, bfloat16, float64"),
        (("generate", "--H", "3", "--K", "3", "--layout", "khb"), 2, "legal: bhk, bkh"),
        (("generate", "--H", "3", "--K", "3", "--arch", "sm_70"), 2, "legal: sm_75"),
        (("generate", "--H", "3", "--K", "3", "--gpu", "v100"), 2, "is not listed; legal: t4"),
        (
            ("generate", "--H", "3", "--K", "3", "--algorithm", "magic"),
            2,
            "legal: one_pass, one_pass_mma, one_pass_streamed, one_pass_wgmma, recompute, three_pass",
        ),
        (
            ("generate", "--H", "3", "--K", "3", "--algorithm", "one_pass_mma", "--arch", "sm_90", "--arch", "sm_75"),
            1,
            "no legal plan for h3_k3_f32_bhk on h200: one_pass_mma: needs sm_80 or newer, not sm_75",
        ),
        (
            ("generate", "--H", "3", "--K", "3", "--algorithm", "one_pass_mma", "--gpu", "t4"),
            1,
            "no legal plan for h3_k3_f32_bhk on t4: one_pass_mma: needs sm_80 or newer, not sm_75",
        ),
        (
            ("generate", "--H", "900", "--K", "96", "--gpu", "h200", "--algorithm", "three_pass"),
            1,
            "K <= 62 at H=900 or H <= 592 at K=96 would fit",
        ),
        (("generate", "--H", "3", "--K", "3", "--out", "/proc/p"), 1, "cannot be written"),
        (("generate", "--H", "3", "--K", "3", "--out", "taken"), 1, "holds something that invpool did not make"),
        (("generate", "--H", "3", "--K", "3", "--out", "n" * 300), 1, "File name too long; choose another with --out"),
        (("generate", "--H", "3", "--K", "3", "--out", ".."), 1, "'..' does not name a folder of its own"),
        (("show", "n" * 300), 1, "cannot be read: File name too long"),
        (("check", "nowhere"), 1, "holds no generated package; make one with: invpool generate --out nowhere"),
        (("show", "nowhere"), 1, "holds no generated package"),
        (("explain", "--H", "3", "--K", "3", "--batch", "0"), 2, "greater than or equal to 1"),
    ],
)
def test_bad_requests_get_one_clear_line(tmp_path: Path, words: tuple[str, ...], code: int, message: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").touch()
    done = invpool(*words, cwd=tmp_path)
    assert done.returncode == code
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["thesis.txt"]


def test_a_missing_compiler_says_what_to_install(tmp_path: Path) -> None:
    done = invpool(
        "generate",
        "--H",
        "6",
        "--K",
        "5",
        cwd=tmp_path,
        INVPOOL_NVCC=str(tmp_path / "no"),
        INVPOOL_CACHE_DIR=str(tmp_path / "c"),
    )
    assert done.returncode == 1
    assert "pip install 'invpool[nvcc]'" in done.stderr
    assert not (tmp_path / "build" / "h6_k5_f32_bhk").exists()


def test_a_compiler_error_shows_the_first_real_line(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;; esac\n'
        "echo 'kernel.cu(3): error: expected a semicolon' >&2; exit 2\n"
    )
    nvcc.chmod(0o755)
    done = invpool(
        "generate", "--H", "6", "--K", "5", cwd=tmp_path, INVPOOL_NVCC=str(nvcc), INVPOOL_CACHE_DIR=str(tmp_path / "c")
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: kernel.cu(3): error: expected a semicolon")
    assert "source:" in done.stderr
    assert not list((tmp_path / "build").iterdir())


def test_clean_takes_packages_and_nothing_else(package: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    build.mkdir()
    (build / "README.md").touch()
    (build / "notes").mkdir()
    done = invpool("generate", "--H", "7", "--K", "5", "--arch", "sm_90", cwd=tmp_path)
    assert done.returncode == 0
    assert "would remove build/h7_k5_f32_bhk" in invpool("clean", "--dry-run", cwd=tmp_path).stdout
    assert (build / "h7_k5_f32_bhk").is_dir()
    assert "removed build/h7_k5_f32_bhk" in invpool("clean", cwd=tmp_path).stdout
    assert sorted(path.name for path in build.iterdir()) == ["README.md", "notes"]
    assert "nothing to remove" in invpool("clean", cwd=tmp_path).stdout


def test_clean_keeps_what_was_edited_or_is_not_ours(package: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    for name in ("edited", "foreign", "old", "plain"):
        shutil.copytree(package, build / name)
    (build / "edited" / "__init__.py").write_text("# mine")
    (build / "foreign" / "notes.txt").touch()
    manifest = json.loads((package / "manifest.json").read_text())
    (build / "old" / "manifest.json").write_text(json.dumps(manifest | {"schema": 0}))
    (build / "other").mkdir()
    (build / "other" / "manifest.json").write_text('{"slug": "s", "kernels": []}')
    printed = invpool("clean", cwd=tmp_path).stdout
    assert "kept build/edited: edited by hand (__init__.py)" in printed
    assert "kept build/foreign: edited by hand (notes.txt)" in printed
    assert "kept build/old: build/old/manifest.json has schema 0" in printed
    assert "removed build/plain" in printed
    assert sorted(path.name for path in build.iterdir()) == ["edited", "foreign", "old", "other"]
