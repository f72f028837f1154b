"""Makes data/japanese_vowels.npz from the equal-length files that the aeon package ships (run once, by hand).

pip download --no-deps aeon==1.6.0 && unzip aeon-*.whl 'aeon/datasets/data/JapaneseVowels/*'
python convert.py aeon/datasets/data/JapaneseVowels
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def read_ts(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """x[items, 12 channels, 25 steps] float32 and the speaker 0 to 8 of each item."""
    rows = path.read_text().split("@data\n")[1].split()
    series, speakers = [], []
    for row in rows:
        *channels, speaker = row.split(":")
        series.append([[float(value) for value in channel.split(",")] for channel in channels])
        speakers.append(int(speaker) - 1)
    return np.array(series, dtype=np.float32), np.array(speakers, dtype=np.int64)


def main() -> None:
    folder = Path(sys.argv[1])
    x_train, y_train = read_ts(folder / "JapaneseVowels_eq_TRAIN.ts")
    x_test, y_test = read_ts(folder / "JapaneseVowels_eq_TEST.ts")
    assert x_train.shape == (270, 12, 25)
    assert x_test.shape == (370, 12, 25)
    out = Path(__file__).parent / "data" / "japanese_vowels.npz"
    np.savez_compressed(out, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    print(out, out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
