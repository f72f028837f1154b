"""What every committed result carries: the machine, the versions, the commit."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPO = Path(__file__).parent.parent
RESULTS = REPO / "docs" / "results"


def _said(*words: str) -> str:
    try:
        return subprocess.run(words, check=False, capture_output=True, text=True, cwd=REPO, timeout=60).stdout.strip()
    except OSError:
        return ""


@functools.cache
def environment() -> dict[str, Any]:
    """GPU, driver, CUDA, torch, Python, commit (``$INVPOOL_COMMIT`` where the tree has no git) and date."""
    import torch

    from invpool._version import __version__
    from invpool.compile import find_nvcc, nvcc_version

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "nvcc": nvcc_version(find_nvcc()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "invpool": __version__,
        "commit": os.environ.get("INVPOOL_COMMIT") or _said("git", "rev-parse", "HEAD"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def write_result(path: Path, data: dict[str, Any], *, quiet: bool = False) -> None:
    """Writes ``{"environment": ..., **data}`` as JSON, and says so unless it is to be quiet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **data}, indent=1) + "\n", encoding="utf-8")
    if not quiet:
        print(f"wrote {path}")
