"""The wheel: what is in it, and that it generates from an empty venv outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from helpers import REPO


def _run(*words: str | Path, cwd: Path, **env: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=cwd, env=clean | env, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=REPO)
    (built,) = out.glob("invpool-*.whl")
    return built


def _venv(folder: Path) -> Path:
    pytest.importorskip("ensurepip", reason="ensurepip, which puts pip in a venv, is not installed (python3-venv)")
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tree = {f"invpool/templates/{path.relative_to(REPO / 'templates')}" for path in (REPO / "templates").rglob("*.*")}
    assert tree <= names
    assert {"invpool/py.typed", "invpool/runtime.py", "invpool/cli/app.py"} <= names
    assert not [name for name in names if name.split("/")[0] not in ("invpool",) and ".dist-info" not in name]
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "Requires-Python: >=3.11" in text
    assert "Requires-Dist: torch>=2.9" in text
    assert "pycuda" not in "".join(
        line for line in text.splitlines() if "Requires-Dist" in line and "extra" not in line
    )


def test_the_installed_wheel_generates_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Only the dependencies come from this environment; invpool itself is the installed wheel."""
    python = _venv(tmp_path / "venv")
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Behind the venv's own folder on sys.path, and read as a plain folder, so no editable hook of invpool runs.
    (site / "dependencies.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    where = _run(python, "-c", "import invpool; print(invpool.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(tmp_path / "venv")
    printed = _run(
        tmp_path / "venv" / "bin" / "invpool", "generate", "--H", "7", "--K", "5", "--arch", "sm_90", cwd=tmp_path
    )
    assert "build/h7_k5_f32_bhk" in printed
    assert list((tmp_path / "build" / "h7_k5_f32_bhk").glob("*_forward.sm_90*.cubin"))


@pytest.mark.slow
def test_truly_empty_venvs(wheel: Path, tmp_path: Path) -> None:
    """The wheel with what pip finds for it; and the generated package in a venv that has torch alone."""
    torch_version = f"torch=={torch.__version__.split('+')[0]}"
    generator = _venv(tmp_path / "generator")
    _run(generator, "-m", "pip", "install", "--quiet", torch_version, cwd=tmp_path)
    _run(generator, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    _run(generator.parent / "invpool", "generate", "--H", "7", "--K", "5", "--arch", "sm_90", cwd=tmp_path)
    alone = _venv(tmp_path / "alone")
    _run(alone, "-m", "pip", "install", "--quiet", torch_version, cwd=tmp_path)
    code = (
        "import importlib.util, torch\n"
        "assert not [m for m in ('invpool', 'typer', 'rich', 'pycuda') if importlib.util.find_spec(m)]\n"
        "from h7_k5_f32_bhk import InvertedAttentionPool, inverted_attention_pool\n"
        "x = torch.full((2, 7, 5), 0.25, requires_grad=True)\n"
        "out = inverted_attention_pool(x); out.sum().backward()\n"
        "torch.testing.assert_close(out, torch.full((2, 7), 0.25))\n"
        "torch.testing.assert_close(x.grad, torch.full((2, 7, 5), 0.2))\n"
        "print('ok')\n"
    )
    assert _run(alone, "-W", "ignore", "-c", code, cwd=tmp_path / "build").strip() == "ok"
