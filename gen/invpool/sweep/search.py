"""Which candidate to measure next: a pure function of what was measured, so that it can be replayed without a GPU.

Each algorithm's best predictions come first. They tell how far an algorithm's predictions are off, and where the good
plans lie; then, in turns, a neighbour of one of the best so far and the next by corrected prediction. Candidates that
correction puts far behind the best are left alone.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from invpool.algorithms import Choice
from invpool.sweep.space import Candidate, Space

# Spaces up to this size are measured whole.
EXHAUSTIVE: Final = 24
# Of each algorithm, the best predictions that start a search, for each batch.
_START: Final = 2
# The best so far whose neighbours are tried, for each batch.
_BEST: Final = 3
# A candidate is hopeless where correction puts it so many times behind the best at every batch.
_HOPELESS: Final = 1.6


class Search:
    """The order in which the candidates of one space are measured.

    Args:
        space: what there is.
        batches: batch sizes that are timed; a search looks for the best plan of each.
        first: plans that are measured before all others: those that are used today.
        gives_up: whether candidates that lie far behind are left alone.
    """

    def __init__(
        self, space: Space, batches: Sequence[int], first: Iterable[Choice] = (), gives_up: bool = True
    ) -> None:
        self.space, self._gives_up = space, gives_up
        self.batches = tuple(batches)
        self._predicted = {
            candidate: tuple(candidate.seconds(space.spec, space.gpu, batch) for batch in self.batches)
            for candidate in space.candidates
            if candidate.rejected is None
        }
        wanted = {(choice.algorithm.name, choice.plan(space.direction)) for choice in first}
        used = [c for c in space.candidates if (c.algorithm.name, c.plan) in wanted]
        asked_for = [candidate for candidate in space.candidates if candidate.asked_for]
        self._queue = used + asked_for + list(self._start())
        self._handed_out: set[Candidate] = set()
        self._measured: dict[Candidate, tuple[float, ...]] = {}
        self._turn = 0

    def _start(self) -> Iterable[Candidate]:
        if len(self._predicted) <= EXHAUSTIVE:
            return self._ranked(self._predicted, 0)
        of_algorithm: dict[str, list[Candidate]] = {}
        for candidate in self._predicted:
            of_algorithm.setdefault(candidate.algorithm.name, []).append(candidate)
        rounds = [
            [self._ranked(own, batch)[number] for own in of_algorithm.values() if number < len(own)]
            for number in range(_START)
            for batch in range(len(self.batches))
        ]
        found = dict.fromkeys(itertools.chain.from_iterable(rounds))
        # The most promising algorithm first: a search that is cut short has seen something of use.
        return sorted(found, key=lambda candidate: min(self._predicted[candidate]))

    def _ranked(self, candidates: Iterable[Candidate], batch: int) -> list[Candidate]:
        return sorted(candidates, key=lambda candidate: self._predicted[candidate][batch])

    def next(self) -> Candidate | None:
        """A candidate that was not handed out yet; None where nothing promising is left."""
        while self._queue:
            candidate = self._queue.pop(0)
            if candidate not in self._handed_out:
                self._handed_out.add(candidate)
                return candidate
        chosen = self._choose()
        if chosen is not None:
            self._handed_out.add(chosen)
        return chosen

    def tell(self, candidate: Candidate, seconds: Mapping[int, float] | None) -> None:
        """What came of a candidate: its time at each batch, or None for a failure."""
        self._handed_out.add(candidate)
        if seconds is not None and all(batch in seconds for batch in self.batches):
            self._measured[candidate] = tuple(seconds[batch] for batch in self.batches)

    @property
    def tried(self) -> int:
        return len(self._handed_out)

    def _corrections(self) -> dict[str, tuple[float, ...]]:
        """Measured over predicted, by algorithm and batch: the median of what was measured."""
        ratios: dict[str, list[tuple[float, ...]]] = {}
        for candidate, times in self._measured.items():
            if candidate in self._predicted:
                pairs = zip(times, self._predicted[candidate], strict=True)
                ratios.setdefault(candidate.algorithm.name, []).append(tuple(time / guess for time, guess in pairs))
        return {
            name: tuple(statistics.median(ratio[i] for ratio in own) for i in range(len(self.batches)))
            for name, own in ratios.items()
        }

    def _choose(self) -> Candidate | None:
        rest = [candidate for candidate in self._predicted if candidate not in self._handed_out]
        if not rest or not self._measured:
            # Nothing that was measured so far was right: predictions are all there is.
            return min(rest, key=lambda candidate: min(self._predicted[candidate]), default=None)
        corrections = self._corrections()
        best = [min(times[i] for times in self._measured.values()) for i in range(len(self.batches))]

        def behind(candidate: Candidate) -> float:
            """How many times behind the best the candidate is where it is nearest, by corrected prediction."""
            correction = corrections.get(candidate.algorithm.name, (1.0,) * len(self.batches))
            guesses = zip(self._predicted[candidate], correction, best, strict=True)
            return min(guess * factor / least for guess, factor, least in guesses)

        self._turn += 1
        batch = self._turn // 2 % len(self.batches)
        if self._turn % 2:
            leaders = sorted(self._measured, key=lambda candidate: self._measured[candidate][batch])[:_BEST]
            for leader in leaders:
                around = [other for other in self.space.neighbours(leader) if other in self._predicted]
                fresh = [other for other in around if other not in self._handed_out]
                if fresh:
                    return min(fresh, key=behind)
        chosen = min(rest, key=behind)
        return chosen if not self._gives_up or behind(chosen) <= _HOPELESS else None
