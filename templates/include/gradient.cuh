// ---- gradient.cuh: accumulator[k] += sum over a group of variates of weight[t] * x[j + t, k] ----

template <int STEPS, int N>
__device__ void add_columns(const Scalar (&weight)[N], const Scalar* item, int j, int k0, Scalar (&accumulator)[STEPS]) {
  if constexpr (kStagedH == 1) {
    constexpr int kWidth = pack_width<Scalar>(N, kStagedK);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
#pragma unroll
      for (int t = 0; t < N; t += kWidth) {
        const Pack<Scalar, kWidth> pack = load_pack<kWidth>(item + j + t + (k0 + k) * kStagedK);
#pragma unroll
        for (int lane = 0; lane < kWidth; ++lane) accumulator[k] += weight[t + lane] * pack.lane[lane];
      }
    }
  } else {
    constexpr int kWidth = pack_width<Scalar>(pack_width<Scalar>(STEPS, kKTile), kStagedH);
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
      for (int k = 0; k < STEPS; k += kWidth) {
        const Pack<Scalar, kWidth> pack = load_pack<kWidth>(item + (j + t) * kStagedH + k0 + k);
#pragma unroll
        for (int lane = 0; lane < kWidth; ++lane) accumulator[k + lane] += weight[t] * pack.lane[lane];
      }
    }
  }
}
