"""What a sweep is asked for, where it stands, and what it found."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Final

from invpool.abi import DIRECTIONS, Direction
from invpool.algorithms import Choice
from invpool.errors import InvpoolError
from invpool.gpu import Gpu
from invpool.spec import PoolSpec
from invpool.sweep.records import Outcome, Record
from invpool.sweep.space import Candidate
from invpool.tuned import TunedTable

DEFAULT_BATCHES: Final = (16, 256, 4096, 65536)


class SweepError(InvpoolError):
    """Nothing that is right could be measured; the message gives the reasons."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long to search: so many candidates, or so many seconds, or until all were tried.

    What is compared at the end is on top of it. With a limit, candidates that lie far behind are left alone.
    """

    candidates: int | None = 200
    seconds: float | None = None

    @property
    def is_whole_space(self) -> bool:
        return self.candidates is None and self.seconds is None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """``200``, ``90s``, ``5m``, ``1h`` or ``all``.

        Raises:
            ValueError: the text is none of them.
        """
        if text.strip() == "all":
            return cls(None)
        match = re.fullmatch(r"([1-9]\d*)([smh]?)", text.strip())
        if not match:
            raise ValueError(f"budget is {text!r}; one looks like 200 (candidates), 90s, 5m, 1h or all")
        number = int(match[1])
        if not match[2]:
            return cls(number)
        return cls(None, number * {"s": 1.0, "m": 60.0, "h": 3600.0}[match[2]])


@dataclasses.dataclass(frozen=True)
class SweepRequest:
    """What is to be tuned.

    Attributes:
        gpu: what plans are made for: the crew's GPU.
        directions: those that are searched; of one that is not, the plan stays as it is.
        algorithms: those whose plans are tried; empty: all.
        extra: candidates beyond their spaces.
        only_extra: of their spaces, the default plans alone: to time again what another sweep found.
    """

    spec: PoolSpec
    gpu: Gpu
    directions: tuple[Direction, ...] = DIRECTIONS
    batches: tuple[int, ...] = DEFAULT_BATCHES
    algorithms: tuple[str, ...] = ()
    budget: Budget = Budget()
    extra: tuple[Candidate, ...] = ()
    only_extra: bool = False


@dataclasses.dataclass
class Progress:
    """Where a sweep stands.

    Attributes:
        step: ``search`` or ``compare``.
        total: candidates at most; None where seconds are the limit.
        best_us: by direction and batch, the least median so far.
        failures: candidates by what failed.
        seconds_left: of the budget, or foretold from the pace so far; None at the beginning.
    """

    step: str = "search"
    done: int = 0
    total: int | None = None
    best_us: dict[tuple[Direction, int], float] = dataclasses.field(default_factory=dict)
    failures: collections.Counter[Outcome] = dataclasses.field(default_factory=collections.Counter)
    seconds_left: float | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is best for one direction at one batch.

    Attributes:
        kept: the incumbent stays: nothing beat it by more than the spread.
        gain: 1 - best / incumbent, from the comparison at the end; of both directions together where the algorithm
            changes, since the two go together.
        spread: the widest quartile range over its median, of the best and the incumbent.
        time: median_us, lower_quartile_us, upper_quartile_us; ``reference_us`` of the predicted plan; ``composite_us``.
        incumbent: the same of the incumbent, from the comparison at the end; None where it could not be timed.
    """

    direction: Direction
    batch: int
    choice: Choice
    kept: bool
    gain: float
    spread: float
    time: Mapping[str, float]
    incumbent: Mapping[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """What a sweep found. ``table`` is None where it was interrupted: nothing was compared then."""

    request: SweepRequest
    device: str
    verdicts: tuple[Verdict, ...]
    table: TunedTable | None
    records: tuple[Record, ...]
    predicted_us: Mapping[tuple[str, ...], Mapping[int, float]]
    interrupted: bool = False

    @property
    def failures(self) -> collections.Counter[Outcome]:
        return collections.Counter(record.outcome for record in self.records if record.outcome != "ok")
