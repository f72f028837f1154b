"""``recompute``: ``three_pass`` with the ancestor's mistake, kept so that its cost can be measured.

Every thread forms the mean of every column anew, in every pass that uses it: H*H*K additions an item
in place of H*K. It made a training epoch take 88 s instead of 17.
"""

from __future__ import annotations

from typing import ClassVar, Final

from invpool.algorithms.three_pass import ThreePass, ThreePassPlan
from invpool.spec import PoolSpec


class Recompute(ThreePass):
    name: ClassVar[str] = "recompute"
    summary: ClassVar[str] = "three_pass with every mean formed anew by every thread: the ablation"

    _keeps_means: ClassVar[bool] = False

    def promises_no_spills(self, spec: PoolSpec, plan: ThreePassPlan) -> bool:
        return False  # the sums of the means are inlined wherever a mean is used

    def _mean_operations(self, spec: PoolSpec) -> int:
        return 4 * spec.K  # a compensated sum: four additions a step


ALGORITHM: Final = Recompute()
