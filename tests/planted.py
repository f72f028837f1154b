"""Kernels with planted faults: a template tree of the test's own, in which some plans of one_pass are wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from invpool.render import TEMPLATES_VARIABLE, template_root

_BODY = "  DYNAMIC_SHARED(shared);\n"
_TILES = "first < kH; first += kColumns"
_RESULTS = {"forward": "out_acc[index] = result;", "backward": "scale[0] * along"}
# By name: what is replaced, and by what.
FAULTS: dict[str, Callable[[str], tuple[str, str]]] = {
    "does not compile": lambda _: (_BODY, _BODY + "  this is no code;\n"),
    "skips a tile": lambda _: (_TILES, _TILES.replace("first < kH", "first + kColumns < kH")),
    "writes NaN": lambda d: (_RESULTS[d], _RESULTS[d].replace("result", "Scalar(NAN)").replace("along", "Scalar(NAN)")),
    "reads what is not there": lambda _: (_BODY, _BODY + "  *reinterpret_cast<volatile int*>(8) = 1;\n"),
    "ends its process": lambda _: (_BODY, _BODY + "  __builtin_abort();\n"),
    "never ends": lambda _: (_BODY, _BODY + "  while (*reinterpret_cast<const volatile long long*>(&B) >= 0) {}\n"),
}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[tuple[str, int], str]], None]:
    """Plants faults by (direction, registers of a plan of one_pass); other plans stay as they are."""

    def planted(faults: dict[tuple[str, int], str]) -> None:
        tree = tmp_path / "templates"
        shutil.copytree(Path(str(template_root())), tree)
        for (direction, registers), name in faults.items():
            path = tree / "one_pass" / f"{direction}.cu.j2"
            text = path.read_text()
            old, new = FAULTS[name](direction)
            assert old in text
            condition = f'"registers={registers}" in plan_text'
            path.write_text(text.replace(old, f"{{% if {condition} %}}{new}{{% else %}}{old}{{% endif %}}"))
        monkeypatch.setenv(TEMPLATES_VARIABLE, str(tree))

    return planted
