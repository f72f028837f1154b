"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
DOCUMENTS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_documents_name_exist(document: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", document.read_text()):
        assert f"def {name}(" in (REPO / path).read_text(), (path, name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_exist(document: Path) -> None:
    for name in re.findall(r"`((?:docs|tools|tests|templates|gen|examples)/[\w/.-]+)`", document.read_text()):
        assert (REPO / name).exists(), name
