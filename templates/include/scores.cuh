// ---- scores.cuh: <x_h, x_j> for a group of variates j ----

constexpr bool kRowInRegisters = kK <= kKTile;

// Row h of the item, with its centre: in registers where it is short enough, else put together at each use.
struct OwnRow {
  const Scalar* staged;
  Centre centre;
  Scalar kept[kRowInRegisters ? kK : 1];

  __device__ OwnRow(const Scalar* item, int h, Centre c) : staged(item + h * kStagedH), centre(c) {
    if constexpr (kRowInRegisters) {
#pragma unroll
      for (int k = 0; k < kK; ++k) kept[k] = staged[k * kStagedK] + centre.at(k);
    }
  }
  __device__ Scalar at(int k) const {
    if constexpr (kRowInRegisters) {
      return kept[k];
    } else {
      return staged[k * kStagedK] + centre.at(k);
    }
  }
  // <x_h, c>, what the scores of a centred item lack.
  __device__ Scalar dot_centre() const {
    Scalar dot = 0;
    if (centre.used) {
#pragma unroll(kRowInRegisters ? kK : 1)
      for (int k = 0; k < kK; ++k) dot += at(k) * centre.at(k);
    }
    return dot;
  }
};

template <int N>
__device__ void dot_columns(const OwnRow& row, const Scalar* item, int j, Scalar (&dot)[N]) {
  constexpr int kUnroll = kRowInRegisters ? kK : 8;
#pragma unroll
  for (int t = 0; t < N; ++t) dot[t] = 0;
  if constexpr (kStagedH == 1) {
    // Neighbouring variates lie side by side: one wide broadcast read serves several of them.
    constexpr int kWidth = pack_width<Scalar>(N, kStagedK);
#pragma unroll kUnroll
    for (int k = 0; k < kK; ++k) {
      const Scalar own = row.at(k);
#pragma unroll
      for (int t = 0; t < N; t += kWidth) {
        const Pack<Scalar, kWidth> pack = load_pack<kWidth>(item + j + t + k * kStagedK);
#pragma unroll
        for (int lane = 0; lane < kWidth; ++lane) dot[t + lane] += own * pack.lane[lane];
      }
    }
  } else {
    // Neighbouring steps lie side by side: one wide broadcast read serves several steps of a variate.
    constexpr int kWidth = pack_width<Scalar>(kK, kStagedH);
#pragma unroll(kUnroll / kWidth > 0 ? kUnroll / kWidth : 1)
    for (int k = 0; k < kK; k += kWidth) {
      Scalar own[kWidth];
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) own[lane] = row.at(k + lane);
#pragma unroll
      for (int t = 0; t < N; ++t) {
        const Pack<Scalar, kWidth> pack = load_pack<kWidth>(item + (j + t) * kStagedH + k);
#pragma unroll
        for (int lane = 0; lane < kWidth; ++lane) dot[t] += own[lane] * pack.lane[lane];
      }
    }
  }
}
