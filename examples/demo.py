"""The main job from end to end, on the GPU if there is one: generate, compile, prove, import, train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent


def main() -> None:
    commands = [
        ["-m", "invpool.cli.app", "generate", "--H", "128", "--K", "32"],
        ["-m", "invpool.cli.app", "check", "build/h128_k32_f32_bhk"],
        [str(EXAMPLES / "overfit" / "overfit.py")],
        [str(EXAMPLES / "japanese_vowels" / "train.py")],
    ]
    for command in commands:
        shown = ["invpool" if word == "invpool.cli.app" else word for word in command if word != "-m"]
        print(f"\n$ {' '.join(shown)}", flush=True)
        subprocess.run([sys.executable, *command], check=True)


if __name__ == "__main__":
    main()
