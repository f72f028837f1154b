"""The emulator: the generated .cu file, compiled by g++, run on this CPU, sanitized and counted.

``EmulatedKernel(source).launch(grid, block, shared_bytes, arguments)`` is all there is to it;
docs/emulator.md says what of CUDA is modelled and what is not.
"""

from __future__ import annotations

from invpool.emulator.counters import Counters
from invpool.emulator.kernel import EmulatedKernel, Launched, Output, SynchronisationPoint, poison

__all__ = ["Counters", "EmulatedKernel", "Launched", "Output", "SynchronisationPoint", "poison"]
