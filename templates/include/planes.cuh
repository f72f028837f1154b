// ---- planes.cuh: one item as fp16 numbers in shared memory, laid out for tensor cores ----
//
// A staged number is v = (x - c) * f with f = sqrt(|scale| * log2 e), so that <v_h, v_j> is a score as a power of two.
// It is kept in kParts fp16 numbers, each in a plane of its own: the second is what rounding to the first lost, so
// that two carry 22 bits. Three products (first * first + first * second + second * first) make a float32 one.

#include "primitives.cuh"

// A plane has one row a variate (bhk) or one a step (bkh), as x has: what lies side by side in DRAM does so here.
// 16 bytes more than a multiple of 32 between its rows keep the eight rows of a matrix off each other's banks.
constexpr int kPlaneStride = 2 * (kVariateMajor ? kStepsPadded : kRowsPadded) + 16;  // bytes
constexpr int kPlaneBytes = kPlaneStride * (kVariateMajor ? kRowsPadded : kStepsPadded);

__device__ constexpr int plane_at(int h, int k) {
  return kVariateMajor ? h * kPlaneStride + 2 * k : k * kPlaneStride + 2 * h;
}

// What a lane adds to the place of a 16 x 16 block to find the row of it that it hands to load_matrices.
// The four matrices are (first variates, first steps), (last, first), (first, last), (last, last).
__device__ inline int lane_in_block(int lane) {
  const int within = lane % 8, variate = lane / 8 % 2 * 8, step = lane / 16 * 8;
  return kVariateMajor ? plane_at(within + variate, step) : plane_at(variate, within + step);
}

// A block with variates as rows and steps summed over: a score's operand. One register a matrix, in the order above.
__device__ inline void load_by_steps(Halves (&block)[4], const unsigned char* at) {
  if constexpr (kVariateMajor) {
    load_matrices(block, at);
  } else {
    load_matrices_transposed(block, at);
  }
}

// The same block with steps as rows and variates summed over: the operand of a weighted sum of variates.
__device__ inline void load_by_variates(Halves (&block)[4], const unsigned char* at) {
  if constexpr (kVariateMajor) {
    load_matrices_transposed(block, at);
  } else {
    load_matrices(block, at);
  }
}

// Writes WIDTH neighbours of a plane's row, and what is lost of them to the next plane.
template <int WIDTH, int PLANE = kPlaneBytes>
__device__ inline void store_parts(unsigned char* at, const Scalar (&v)[WIDTH]) {
  Scalar rest[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) rest[i] = v[i];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if constexpr (WIDTH == 1) {
      const Halves pair = pack_halves(rest[0], Scalar(0));
      *reinterpret_cast<unsigned short*>(at + part * PLANE) = static_cast<unsigned short>(pair);
      rest[0] -= low_half(pair);
    } else {
      Pack<Halves, WIDTH / 2> pack;
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) {
        pack.lane[i] = pack_halves(rest[2 * i], rest[2 * i + 1]);
        if (part + 1 < kParts) {
          rest[2 * i] -= low_half(pack.lane[i]);
          rest[2 * i + 1] -= high_half(pack.lane[i]);
        }
      }
      store_pack<WIDTH / 2>(reinterpret_cast<Halves*>(at + part * PLANE), pack);
    }
  }
}

// ---- waiting for and agreeing with the threads of an item: a block, or one of its warps

__device__ inline void sync_item() {
  if constexpr (kItems == 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

__device__ inline bool any_of_item(bool predicate) {
  if constexpr (kItems == 1) {
    return __syncthreads_or(predicate) != 0;
  } else {
    const bool any = __any_sync(0xffffffffu, predicate) != 0;
    __syncwarp();
    return any;
  }
}

// The largest value of an item's threads; room: one Scalar a warp. NaN is passed over.
__device__ inline Scalar largest_of_item(Scalar value, Scalar* room) {
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) value = fmax(value, __shfl_xor_sync(0xffffffffu, value, flip));
  if constexpr (kItems == 1) {
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; ++warp) value = fmax(value, room[warp]);
    __syncthreads();
  }
  return value;
}

// ---- staging

// Where an item is read from while it is staged, and what of it counts.
struct ItemView {
  const Element* x;  // in DRAM, or copied to shared memory as it was
  const unsigned char* mask;  // null: every variate takes part

  __device__ bool takes_part(int h) const { return h < kH && (!kMasked || mask[h] != 0); }
  __device__ Scalar at(int h, int k) const { return to_scalar(x[h * kInputH + k * kInputK]); }
  __device__ int first_taking_part() const {
    int first = 0;
    while (kMasked && first < kH && !takes_part(first)) ++first;
    return first;
  }
};

// What staging learns of one variate; sums over the steps.
struct Staged {
  Scalar sum = 0;  // of x - c
  Scalar norm = 0;  // of v * v
  Scalar with_centre = 0;  // of (x - c) * c
};

// Elements that staging takes at once: neighbours in DRAM, steps of a variate or variates of a step.
constexpr int kStageWidth = kVariateMajor ? pack_width<Element>(kK, kK) : pack_width<Element>(kH, kH);

// Forward and backward must agree on a mean to the last bit: where one variate takes all, m - out is to be 0. Whatever
// the plan, packs (or steps) are therefore summed in eight classes, which are added as a tree. kStageLanes lanes have
// the classes between them.
constexpr int kClasses = 8 / kStageLanes;  // of a lane
static_assert(8 % kStageLanes == 0, "lanes share the classes evenly");

struct ClassSums {
  Scalar of_class[kClasses] = {};

  // The sum over the lanes that flipping the bits from `farthest` down to `nearest` tells apart.
  __device__ Scalar total(int nearest, int farthest) {
#pragma unroll
    for (int half = kClasses / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) of_class[i] += of_class[i + half];
    }
    for (int flip = farthest; flip >= nearest; flip /= 2) {
      of_class[0] += __shfl_xor_sync(0xffffffffu, of_class[0], flip);
    }
    return of_class[0];
  }
};

template <bool CENTRED>
struct Stager {
  const ItemView& item;
  int centre;
  Scalar factor;
  bool aligned;  // a contiguous view may start at any element

  __device__ Pack<Element, kStageWidth> load(const Element* from) const {
    if (kPrefetch || aligned) return load_pack<kStageWidth>(from);
    Pack<Element, kStageWidth> pack;
#pragma unroll
    for (int i = 0; i < kStageWidth; ++i) pack.lane[i] = from[i];
    return pack;
  }
  __device__ Scalar stage(Element element, int h, int k, Scalar& sum, Scalar& norm, Scalar& with_centre) const {
    Scalar value = to_scalar(element);
    if constexpr (CENTRED) value -= item.at(centre, k);
    if (kMasked && !item.takes_part(h)) value = 0;
    sum += value;
    if constexpr (CENTRED) with_centre = fma(value, item.at(centre, k), with_centre);
    const Scalar v = value * factor;
    norm = fma(v, v, norm);
    return v;
  }
};

// Stages the item and calls keep(h, what was learnt) once a variate, by the lane that has it.
// c is row `centre`; -1 is none. A variate that takes no part is staged as zeros: nothing of it, NaN included, is seen.
template <bool CENTRED, class Keep>
__device__ inline void stage(const ItemView& item, int centre, Scalar factor, unsigned char* planes, int thread, Keep&& keep) {
  constexpr int kWidth = kStageWidth;
  const bool aligned = reinterpret_cast<unsigned long long>(item.x) % (kWidth * sizeof(Element)) == 0;
  const Stager<CENTRED> stager{item, centre, factor, aligned};
  if constexpr (kVariateMajor) {
    // kStageLanes neighbours share a variate and take turns along its packs. Variates begin on the same bank: each
    // goes through its packs in an order of its own.
    constexpr int kPacks = kK / kWidth;
    constexpr int kOrders = kPacks % 8 == 0 ? 8 : kPacks % 4 == 0 ? 4 : kPacks % 2 == 0 ? 2 : 1;
    const int part = thread % kStageLanes;
#pragma unroll 1
    for (int first = 0; first < kH; first += kItemThreads / kStageLanes) {
      const int h = first + thread / kStageLanes;
      ClassSums sum, with_centre;
      Scalar norm = 0;
      if (h < kH) {
#pragma unroll 1
        for (int turn = 0; turn < kPacks; turn += 8) {
#pragma unroll
          for (int i = 0; i < kClasses; ++i) {
            const int index = turn + i * kStageLanes + part;
            if (kPacks % 8 != 0 && index >= kPacks) continue;
            const int k = (index ^ (h & (kOrders - 1))) * kWidth;
            const Pack<Element, kWidth> pack = stager.load(item.x + h * kInputH + k);
            Scalar v[kWidth];
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
              v[e] = stager.stage(pack.lane[e], h, k + e, sum.of_class[i], norm, with_centre.of_class[i]);
            }
            store_parts(planes + plane_at(h, k), v);
          }
        }
      }
      for (int flip = kStageLanes / 2; flip > 0; flip /= 2) norm += __shfl_xor_sync(0xffffffffu, norm, flip);
      const Staged staged{sum.total(1, kStageLanes / 2), norm, CENTRED ? with_centre.total(1, kStageLanes / 2) : Scalar(0)};
      if (part == 0 && h < kH) keep(h, staged);
    }
  } else {
    // Neighbouring lanes take neighbouring packs of variates; kStageLanes of a warp share a pack and take turns
    // along its steps.
    constexpr int kAcross = 32 / kStageLanes;
    const int part = thread % 32 / kAcross;
#pragma unroll 1
    for (int first = 0; first < kH; first += kItemThreads / kStageLanes * kWidth) {
      const int h = first + (thread / 32 * kAcross + thread % kAcross) * kWidth;
      ClassSums sum[kWidth], with_centre[kWidth];
      Scalar norm[kWidth] = {};
      if (h < kH) {
#pragma unroll 1
        for (int turn = 0; turn < kK; turn += 8) {
#pragma unroll
          for (int i = 0; i < kClasses; ++i) {
            const int k = turn + i * kStageLanes + part;
            if (kK % 8 != 0 && k >= kK) continue;
            const Pack<Element, kWidth> pack = stager.load(item.x + k * kInputK + h);
            Scalar v[kWidth];
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
              v[e] = stager.stage(pack.lane[e], h + e, k, sum[e].of_class[i], norm[e], with_centre[e].of_class[i]);
            }
            store_parts(planes + plane_at(h, k), v);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        for (int flip = 16; flip >= kAcross; flip /= 2) norm[e] += __shfl_xor_sync(0xffffffffu, norm[e], flip);
        const Staged staged{sum[e].total(kAcross, 16), norm[e], CENTRED ? with_centre[e].total(kAcross, 16) : Scalar(0)};
        if (part == 0 && h < kH) keep(h + e, staged);
      }
    }
  }
}

// ---- which items need more than the plain way

// Row norms below this, and scores with them: e^60 times 8192 variates times a mean fits a float32.
constexpr float kPlainNorm = 60 * 1.44269504f;
// A centred item has Z >= e^-norm only.
constexpr float kCentredNorm = 35 * 1.44269504f;
constexpr float kPlainMean = 1048576;

// Softmax over j does not see a vector that all x_j have in common, but float32 does: scores of a series 100 +- 0.05
// are off by 1e-2. An item is staged without its first variate c where every one is near it: |x_h - c| < |x_h| / 2.
//
// Normalised input is told apart by eight steps of the first 32 variates. Both tests sum in an order that depends on
// h alone, so that forward and backward, whatever their plans, decide alike.
__device__ inline bool is_near(const ItemView& item, int centre, int h, int steps, int stride) {
  if (!item.takes_part(h)) return true;
  Scalar norm = 0, distance = 0;
#pragma unroll 4
  for (int i = 0; i < steps; ++i) {
    const int k = (i + h) % steps * stride;  // variates begin on the same bank
    const Scalar value = item.at(h, k), off = value - item.at(centre, k);
    norm = fma(value, value, norm);
    distance = fma(off, off, distance);
  }
  return 4 * distance < norm;
}

// For the first warp of an item: whether it may have to be centred.
__device__ inline bool may_be_near(const ItemView& item, int centre, int lane) {
  constexpr int kSamples = kK < 8 ? kK : 8;
  const bool far = centre < kH && !is_near(item, centre, lane, kSamples, kK / kSamples);
  return !__any_sync(0xffffffffu, far);
}

// How an item was staged.
struct Staging {
  int centre = -1;  // the row taken off, -1: none
  Scalar centre_mean = 0;
  Scalar factor = 0;  // what x - c was multiplied by
  Scalar unit = 1;  // scores are unit * <v_h, v_j> + offset of j
  Scalar top_offset = 0;  // the largest offset, which weights are relative to
  bool plain = true;  // unshifted exponentials neither overflow nor vanish
};

__device__ inline Scalar power_of_two(int exponent) {
  const unsigned bits = static_cast<unsigned>(127 + exponent) << 23;
  Scalar value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Stages an item again that is near its first variate, or whose scores are large, or whose scale is negative.
// keep(h, mean, offset) is called once a variate, where it is staged; the threads of the item agree on the rest.
template <class Keep>
__device__ inline Staging stage_special(
    const ItemView& item, Scalar scale, Scalar factor, unsigned char* planes, Scalar* room, int thread, Keep&& keep) {
  Staging how;
  const int first = item.first_taking_part();
  bool near = first < kH;
  Scalar largest = 0;
  for (int h = thread; h < kH && first < kH; h += kItemThreads) {
    near = near && is_near(item, first, h, kK, 1);
    if (!item.takes_part(h)) continue;
    for (int k = 0; k < kK; ++k) largest = fmax(largest, fabs(item.at(h, (k + h) % kK)));
  }
  if (!any_of_item(!near)) how.centre = first;
  // fp16 ends at 65504: larger numbers are staged as so many times smaller, and scores are multiplied back. Beyond
  // 2^80 there is nothing to multiply back for: a softmax of such scores is 0 or 1.
  const Scalar bound = 2 * factor * largest_of_item(largest, room);
  int shift = 0;
  for (Scalar reach = 16384; reach < bound && shift < 113; reach *= 2) ++shift;
  factor *= power_of_two(-shift);
  how.factor = factor;
  how.unit = power_of_two(2 * shift < 80 ? 2 * shift : 80) * (scale < 0 ? Scalar(-1) : Scalar(1));
  bool large = shift > 0 || scale < 0;
  Scalar top = -Scalar(INFINITY);
  const auto note = [&](int h, const Staged& staged) {
    const bool seen = item.takes_part(h);
    const Scalar mean = staged.sum / Scalar(kK);
    const Scalar offset = seen ? scale * log2e() * staged.with_centre : -Scalar(INFINITY);
    const Scalar limit = how.centre >= 0 ? kCentredNorm : kPlainNorm;
    large = large || !(staged.norm < limit && fabs(mean) < kPlainMean && offset < Scalar(INFINITY));
    top = fmax(top, offset);
    keep(h, mean, offset);
  };
  if (how.centre >= 0) {
    stage<true>(item, how.centre, factor, planes, thread, note);
    for (int k = 0; k < kK; ++k) how.centre_mean += item.at(how.centre, k);
    how.centre_mean /= Scalar(kK);
  } else {
    stage<false>(item, -1, factor, planes, thread, note);
  }
  how.top_offset = largest_of_item(top, room);
  if (how.top_offset == -Scalar(INFINITY)) how.top_offset = 0;  // nothing takes part
  how.plain = !any_of_item(large);
  return how;
}
