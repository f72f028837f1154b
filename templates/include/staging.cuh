// ---- staging.cuh: one item of x from DRAM into shared memory, one thread a row ----

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

// Copies row h of the item to shared memory and returns its mean over the trajectory.
// A variate that takes no part is staged as zeros: nothing of it, NaN included, can reach the others.
__device__ inline Scalar stage_row(const Element* item, int h, bool takes_part, Scalar* staged) {
  CompensatedSum total;
  constexpr int kWidth = pack_width<Element>(kK, kInputK == 1 ? kK : 1);
  constexpr int kInFlight = sizeof(Element) == 2 ? 2 : 4;  // packs: enough to hide DRAM, few enough not to spill
  const Element* row = item + h * kInputH;
  Scalar* to = staged + h * kStagedH;
  if (!takes_part) {
    for (int k = 0; k < kK; ++k) to[k * kStagedK] = 0;
    return 0;
  }
  // A contiguous view may start at any element: the pointer is tested, not assumed.
  if (kWidth > 1 && reinterpret_cast<unsigned long long>(item) % (kWidth * sizeof(Element)) == 0) {
#pragma unroll kInFlight
    for (int k = 0; k < kK; k += kWidth) {
      const Pack<Element, kWidth> pack = load_pack<kWidth>(row + k);
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) {
        const Scalar value = to_scalar(pack.lane[lane]);
        to[(k + lane) * kStagedK] = value;
        total.add(value);
      }
    }
  } else {
#pragma unroll 4
    for (int k = 0; k < kK; ++k) {
      const Scalar value = to_scalar(row[k * kInputK]);
      to[k * kStagedK] = value;
      total.add(value);
    }
  }
  return total.sum / Scalar(kK);
}

// Calls body(first variate, count) over all variates: kColumns at a time, the rest one by one.
template <int N>
struct Count {
  static constexpr int value = N;
};

template <class Body>
__device__ void sweep_variates(Body&& body) {
  int j = 0;
  for (; j + kColumns <= kH; j += kColumns) body(j, Count<kColumns>{});
  for (; j < kH; ++j) body(j, Count<1>{});
}
