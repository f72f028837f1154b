// ---- staging.cuh: one item of x from DRAM into shared memory, one thread a row ----

#include "sums.cuh"

// What a thread learns of its row while staging it.
struct StagedRow {
  Scalar mean = 0;  // of the row as it is staged
  bool near_first = true;  // |x_h - c| < |x_h| / 2, with c the first variate that takes part
};

// Copies row h of the item to shared memory.
// A variate that takes no part is staged as zeros: nothing of it, NaN included, can reach the others.
__device__ inline StagedRow stage_row(const Element* item, int h, int first, bool takes_part, Scalar* staged) {
  constexpr int kWidth = pack_width<Element>(kK, kInputK == 1 ? kK : 1);
  constexpr int kInFlight = sizeof(Element) == 2 ? 2 : 4;  // packs: enough to hide DRAM, few enough not to spill
  const Element* row = item + h * kInputH;
  Scalar* to = staged + h * kStagedH;
  if (!takes_part) {
    for (int k = 0; k < kK; ++k) to[k * kStagedK] = 0;
    return {};
  }
  CompensatedSum total;
  Scalar norm = 0, distance = 0;
  const auto keep = [&](int k, Element element) {
    const Scalar value = to_scalar(element);
    const Scalar off = value - to_scalar(item[first * kInputH + k * kInputK]);
    to[k * kStagedK] = value;
    total.add(value);
    norm += value * value;
    distance += off * off;
  };
  // A contiguous view may start at any element: the pointer is tested, not assumed.
  if (kWidth > 1 && reinterpret_cast<unsigned long long>(item) % (kWidth * sizeof(Element)) == 0) {
#pragma unroll kInFlight
    for (int k = 0; k < kK; k += kWidth) {
      const Pack<Element, kWidth> pack = load_pack<kWidth>(row + k);
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) keep(k + lane, pack.lane[lane]);
    }
  } else {
#pragma unroll 4
    for (int k = 0; k < kK; ++k) keep(k, row[k * kInputK]);
  }
  return {total.sum / Scalar(kK), 4 * distance < norm};
}

// The vector c that a centred item is staged without: its first variate that takes part.
struct Centre {
  const Element* row;
  bool used;
  __device__ Scalar at(int k) const { return used ? to_scalar(row[k * kInputK]) : Scalar(0); }
  __device__ Scalar mean() const {
    CompensatedSum total;
    if (used) {
#pragma unroll 4
      for (int k = 0; k < kK; ++k) total.add(at(k));
    }
    return total.sum / Scalar(kK);
  }
};

// Stages one item; mean becomes that of row h as staged. Nobody may read another's row before the block is
// synchronised, which is left to the caller: it has more to publish.
//
// Softmax over j does not see a vector that all x_j have in common, but float32 does: scores of a series
// 100 +- 0.05 are off by 1e-2. Where every variate is near the first one, the item is therefore staged
// as y = x - c, and s[h,j] = <x_h, y_j> + (something that depends on h alone).
__device__ inline Centre stage_item(
    const Element* item, int h, int first, bool takes_part, Scalar* staged, Scalar& mean) {
  StagedRow row;
  if (h < kH) row = stage_row(item, h, first, takes_part, staged);
  const Centre centre{item + first * kInputH, first < kH && __syncthreads_and(row.near_first) != 0};
  if (centre.used && h < kH && takes_part) {
    CompensatedSum total;
    for (int k = 0; k < kK; ++k) {
      const Scalar value = staged[h * kStagedH + k * kStagedK] - centre.at(k);
      staged[h * kStagedH + k * kStagedK] = value;
      total.add(value);
    }
    row.mean = total.sum / Scalar(kK);
  }
  mean = row.mean;
  return centre;
}

// Calls body(first variate, count) over all variates: kColumns at a time, the rest one by one; and flush() after every
// kFlush of them and at the end, where sums over many variates are put away before they lose digits.
constexpr int kFlush = 64;
static_assert(kFlush % kColumns == 0, "a flush falls between two groups");

template <int N>
struct Count {
  static constexpr int value = N;
};

template <class Body, class Flush>
__device__ void sweep_variates(Body&& body, Flush&& flush) {
  int j = 0;
  // The bodies are unrolled over steps already; unrolling over variates too takes nvcc half a minute.
#pragma unroll 1
  for (; j + kColumns <= kH; j += kColumns) {
    body(j, Count<kColumns>{});
    if ((j + kColumns) % kFlush == 0) flush();
  }
#pragma unroll 1
  for (; j < kH; ++j) body(j, Count<1>{});
  flush();
}

template <class Body>
__device__ void sweep_variates(Body&& body) {
  sweep_variates(body, [] {});
}
