// ---- tiles.cuh: tiles of one item in shared memory, for a group of kItemThreads threads ----

#include "sums.cuh"

// log2(e) and ln(2), with which exponents are of 2 inside a kernel and natural outside.
__device__ inline Scalar log2e() { return Scalar(1.4426950408889634); }
__device__ inline Scalar ln2() { return Scalar(0.6931471805599453); }

// Where a group of threads finds its item, and what of the item counts.
struct ItemView {
  const Element* x;  // null for a group beyond the batch
  const unsigned char* mask;  // null: every variate takes part
  const Element* centre;  // the row that the item is staged without; null: staged as it is

  __device__ bool takes_part(int h) const { return x != nullptr && h < kH && (mask == nullptr || mask[h] != 0); }
  __device__ Scalar centre_at(int k) const {
    return centre != nullptr && k < kK ? to_scalar(centre[k * kInputK]) : Scalar(0);
  }
  __device__ Scalar centre_mean() const {
    CompensatedSum total;
    if (centre != nullptr) {
#pragma unroll 4
      for (int k = 0; k < kK; ++k) total.add(centre_at(k));
    }
    return total.sum / Scalar(kK);
  }
};

// Rows `first` .. of the item at steps k0 .. as tile[k * (ROWS + kPad) + row]; zeros where there is nothing to see.
// Neighbouring threads take neighbouring rows: no bank conflicts, and coalesced where the layout is bkh.
template <int ROWS>
__device__ void load_tile(const ItemView& item, int first, int k0, Scalar* tile, int thread) {
  constexpr int kStride = ROWS + kPad;
  constexpr int kWidth = kInputK == 1 ? pack_width<Element>(kK, kKStep) : 1;
  // A contiguous view may start at any element: the pointer is tested, not assumed.
  const bool wide = kWidth > 1 && reinterpret_cast<unsigned long long>(item.x) % (kWidth * sizeof(Element)) == 0;
  if (wide) {
#pragma unroll 2
    for (int e = thread; e < ROWS * (kKStep / kWidth); e += kItemThreads) {
      const int row = e % ROWS, k = e / ROWS * kWidth;
      const bool seen = item.takes_part(first + row) && k0 + k < kK;
      Pack<Element, kWidth> pack{};
      if (seen) pack = load_pack<kWidth>(item.x + (first + row) * kInputH + k0 + k);
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) {
        const Scalar value = to_scalar(pack.lane[lane]);
        tile[(k + lane) * kStride + row] = seen ? value - item.centre_at(k0 + k + lane) : Scalar(0);
      }
    }
  } else {
#pragma unroll 4
    for (int e = thread; e < ROWS * kKStep; e += kItemThreads) {
      const int row = e % ROWS, k = e / ROWS;
      const bool seen = item.takes_part(first + row) && k0 + k < kK;
      const Scalar value = seen ? to_scalar(item.x[(first + row) * kInputH + (k0 + k) * kInputK]) : Scalar(0);
      tile[k * kStride + row] = seen ? value - item.centre_at(k0 + k) : Scalar(0);
    }
  }
}

// Sums over the trajectory of one staged row: the row itself, and its product with the centre.
struct RowSums {
  CompensatedSum total;
  Scalar with_centre = 0;

  template <int ROWS>
  __device__ void add_chunk(const ItemView& item, const Scalar* tile, int row, int k0) {
    const int steps = kK - k0 < kKStep ? kK - k0 : kKStep;
#pragma unroll 4
    for (int k = 0; k < steps; ++k) total.add(tile[k * (ROWS + kPad) + row]);
    if (item.centre != nullptr) {
      for (int k = 0; k < steps; ++k) with_centre += tile[k * (ROWS + kPad) + row] * item.centre_at(k0 + k);
    }
  }
  __device__ Scalar mean() const { return total.sum / Scalar(kK); }
};

// dot[r][c] += sum over one staged chunk of rows[row0 + r] * columns[column0 + c].
//
// Summed by sixteens, whatever kKStep is: a long float32 sum loses less, and forward and backward, which may stage
// by different steps, form the very same scores.
__device__ inline void add_products(
    const Scalar* rows, const Scalar* columns, int row0, int column0, Scalar (&dot)[kThreadRows][kThreadColumns]) {
  constexpr int kRowWidth = pack_width<Scalar>(kThreadRows, kRows + kPad);
  constexpr int kColumnWidth = pack_width<Scalar>(kThreadColumns, kColumns + kPad);
#pragma unroll 1
  for (int k0 = 0; k0 < kKStep; k0 += 16) {
    Scalar part[kThreadRows][kThreadColumns] = {};
#pragma unroll 4
    for (int k = k0; k < k0 + 16; ++k) {
      Scalar a[kThreadRows], b[kThreadColumns];
#pragma unroll
      for (int r = 0; r < kThreadRows; r += kRowWidth) {
        const Pack<Scalar, kRowWidth> pack = load_pack<kRowWidth>(rows + k * (kRows + kPad) + row0 + r);
#pragma unroll
        for (int lane = 0; lane < kRowWidth; ++lane) a[r + lane] = pack.lane[lane];
      }
#pragma unroll
      for (int c = 0; c < kThreadColumns; c += kColumnWidth) {
        const Pack<Scalar, kColumnWidth> pack = load_pack<kColumnWidth>(columns + k * (kColumns + kPad) + column0 + c);
#pragma unroll
        for (int lane = 0; lane < kColumnWidth; ++lane) b[c + lane] = pack.lane[lane];
      }
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int c = 0; c < kThreadColumns; ++c) part[r][c] = fma(a[r], b[c], part[r][c]);
      }
    }
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) dot[r][c] += part[r][c];
    }
  }
}

// Whether row h is near the centre: |x_h - c| < |x_h| / 2. Then, and only then, taking c off costs no row its digits.
__device__ inline bool is_near(const ItemView& item, const Element* centre, int h) {
  if (!item.takes_part(h)) return true;
  Scalar norm = 0, distance = 0;
#pragma unroll 4
  for (int k = 0; k < kK; ++k) {
    const Scalar value = to_scalar(item.x[h * kInputH + k * kInputK]);
    const Scalar off = value - to_scalar(centre[k * kInputK]);
    norm += value * value;
    distance += off * off;
  }
  return 4 * distance < norm;
}

// The row to stage the item without: the first that takes part if every other is near it, else null.
//
// Softmax over j does not see a vector that all x_j have in common, but float32 does: scores of a series
// 100 +- 0.05 are off by 1e-2. Normalised input is told apart by its first rows.
__device__ inline const Element* find_centre(const ItemView& item, int thread, int* near_rows) {
  int first = 0;
  while (first < kH && !item.takes_part(first)) ++first;
  const Element* const centre = first < kH ? item.x + first * kInputH : nullptr;
  if constexpr (kItems == 1) {
    for (int h = 0; h < kH; h += kItemThreads) {
      if (!__syncthreads_and(centre != nullptr && is_near(item, centre, h + thread))) return nullptr;
    }
    return centre;
  } else {
    bool near = centre != nullptr;
    for (int h = thread; near && h < kH; h += kItemThreads) near = is_near(item, centre, h);
    near_rows[thread] = near;
    __syncthreads();
    for (int t = 0; t < kItemThreads; ++t) near = near && near_rows[t] != 0;
    return near ? centre : nullptr;
  }
}

// The sum of a value over the threads that share a group of rows; they are neighbours in a warp.
__device__ inline Scalar sum_across(Scalar value) {
#pragma unroll
  for (int flip = kThreadsAcross / 2; flip > 0; flip /= 2) value += __shfl_xor_sync(0xffffffffu, value, flip);
  return value;
}
