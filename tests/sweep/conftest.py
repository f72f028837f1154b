from __future__ import annotations

from planted import plant

__all__ = ["plant"]
