"""What invpool raises where a built-in exception would not say enough.

A bad spec is a ``ValueError``, a wrong dtype a ``TypeError``; everything that can fail although the
request was sound derives from :class:`InvpoolError`, a ``RuntimeError``. The generated op must work
without this package, so its own two errors live in :mod:`invpool.runtime`.
"""

from __future__ import annotations


class InvpoolError(RuntimeError):
    """Base of every failure of a sound request."""


class PlanError(InvpoolError):
    """No legal plan exists for a spec on a GPU, or the plan that was asked for is not legal there."""


class TemplateError(InvpoolError):
    """A template is missing, or names something that its context lacks."""


class CompilerNotFoundError(InvpoolError):
    """No nvcc, or for the emulator no g++, could be found."""


class CompileError(InvpoolError):
    """nvcc or g++ refused a source. The message starts with the first real error line."""


class EmulationError(InvpoolError):
    """A kernel on the emulator did what CUDA forbids, or left an output unwritten; the message says where."""


class SanitizerError(EmulationError):
    """A sanitizer stopped a kernel on the emulator. The message starts with its finding, its report follows."""


class OutputError(InvpoolError):
    """The output path cannot be written, or holds something that invpool did not make."""


class CheckError(InvpoolError):
    """A generated kernel gave numbers outside the tolerance; nothing was installed."""
