// ---- sums.cuh: sums that keep what float32 would drop ----

// Kahan's sum: a plain float32 sum of a long trajectory (100 +- 0.05) loses the variation.
struct CompensatedSum {
  Scalar sum = 0;
  Scalar lost = 0;
  __device__ void add(Scalar value) {
    const Scalar corrected = value - lost;
    const Scalar next = sum + corrected;
    lost = (next - sum) - corrected;
    sum = next;
  }
};
