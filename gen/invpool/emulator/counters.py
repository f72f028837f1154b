"""What a launch did, counted from the code as it ran."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts of one launch, over all of its blocks."""

    @classmethod
    def from_report(cls, report: dict[str, Any]) -> Counters:
        return cls()
