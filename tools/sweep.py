"""Finds the fastest right plans for a spec: the same as ``invpool sweep``, from a checkout.

python tools/sweep.py --H 128 --K 32 [--help]
"""

from __future__ import annotations

import sys

from invpool.cli.app import main

if __name__ == "__main__":
    sys.argv[1:1] = ["sweep"]
    main()
