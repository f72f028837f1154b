// ---- row_mean.cuh: the mean of a staged row, summed from its first step ----

__device__ inline Scalar row_mean(const Scalar* staged, int j) {
  CompensatedSum total;
#pragma unroll 8
  for (int k = 0; k < kK; ++k) total.add(staged[j * kStagedH + k * kStagedK]);
  return total.sum / Scalar(kK);
}
