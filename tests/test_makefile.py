"""What make does on a machine that lacks something: programs of the same name stand in for the system's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers import REPO

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


def _make(goal: str, folder: Path, uid: int) -> subprocess.CompletedProcess[str]:
    """Runs make with an interpreter without ensurepip, which apt-get brings."""
    programs = {
        "python3": f'case "$*" in *ensurepip*) test -e {folder}/installed;; *) echo "python3 $*";; esac',
        "apt-get": f'echo "apt-get $*" >> {folder}/apt; case "$*" in *install*) touch {folder}/installed;; esac',
        "id": f"echo {uid}",
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    venv = folder / "venv"
    (venv / "bin").mkdir(parents=True)
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    words = ["make", goal.format(venv=venv), f"VENV={venv}", "PYTHON=python3"]
    return subprocess.run(words, check=False, capture_output=True, text=True, cwd=REPO, env=env, timeout=60)


def test_root_gets_what_makes_a_venv(tmp_path: Path) -> None:
    done = _make("{venv}/bin/python", tmp_path, uid=0)
    assert "install -y --no-install-recommends python3-venv" in (tmp_path / "apt").read_text()
    assert "python3 -m venv" in done.stdout


def test_others_are_told_what_to_type(tmp_path: Path) -> None:
    done = _make("{venv}/bin/python", tmp_path, uid=1000)
    assert done.returncode != 0
    assert "type: sudo apt-get install python3-venv" in done.stdout
    assert not (tmp_path / "apt").exists()
    assert "python3 -m venv" not in done.stdout
