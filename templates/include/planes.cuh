// ---- planes.cuh: one item as fp16 numbers in shared memory, laid out for tensor cores ----
//
// A staged number is v = (x - c) * f with f = sqrt(|scale| * log2 e), so that <v_h, v_j> is a score as a power of two.
// It is kept in kParts fp16 numbers, each in a plane of its own: the second is what rounding to the first lost, so
// that two carry 22 bits. Three products (first * first + first * second + second * first) make a float32 one.

#include "primitives.cuh"
#include "sums.cuh"

// A plane is made of pieces of 8 x 8 numbers, 128 bytes without a gap, so that eight rows of a piece never share a bank.
// The rows of a piece are variates (bhk) or steps (bkh), as those of x are: what lies side by side in DRAM does so here.
constexpr int kPlaneBytes = 2 * kRowsPadded * kStepsPadded;
constexpr int kStepBlocks = kStepsPadded / 16;
constexpr int kPiecesAcross = (kVariateMajor ? kStepsPadded : kRowsPadded) / 8;

// The byte of a number; between multiples of eight, differences add up.
__device__ constexpr int plane_at(int h, int k) {
  const int row = kVariateMajor ? h : k, column = kVariateMajor ? k : h;
  return (row / 8 * kPiecesAcross + column / 8) * 128 + row % 8 * 16 + column % 8 * 2;
}

// What a lane adds to the place of a 16 x 16 block to find the row of it that it hands to load_matrices.
// The four matrices are, for rows of scores, (first variates, first steps), (last, first), (first, last), (last, last);
// for columns (first, first), (first, last), (last, first), (last, last): each operand then lies in registers side by side.
__device__ inline int lane_in_rows(int lane) {
  const int within = lane % 8, variate = lane / 8 % 2 * 8, step = lane / 16 * 8;
  return kVariateMajor ? plane_at(within + variate, step) : plane_at(variate, within + step);
}
__device__ inline int lane_in_columns(int lane) {
  const int within = lane % 8, variate = lane / 16 * 8, step = lane / 8 % 2 * 8;
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

// A block, found by lane_in_rows, with steps as columns and variates summed over: the operand of a weighted sum of variates.
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

__device__ inline unsigned bits_of(Scalar value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
__device__ inline Scalar scalar_of(unsigned bits) {
  Scalar value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Whether an item wants a second look: it trips a guard, or none of its variates is far from the first. `trips` and `far`
// are left to say so of the item. On the way, the
// largest values of its threads: none of them negative, so that their bits are ordered as they are, NaN on top.
// room: one pack a warp, which nothing else uses.
template <int COUNT>
__device__ inline bool wants_more(bool& trips, bool& far, Scalar* largest, Pack<unsigned, 4>* room) {
  Pack<unsigned, 4> seen{};
  seen.lane[0] = (__any_sync(0xffffffffu, trips) ? 1 : 0) | (__any_sync(0xffffffffu, far) ? 2 : 0);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) seen.lane[1 + i] = __reduce_max_sync(0xffffffffu, bits_of(largest[i]));
  if constexpr (kItems == 1) {
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = seen;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kItemThreads / 32; ++warp) {
      const Pack<unsigned, 4> theirs = room[warp];
      seen.lane[0] |= theirs.lane[0];
#pragma unroll
      for (int i = 1; i <= COUNT; ++i) seen.lane[i] = seen.lane[i] > theirs.lane[i] ? seen.lane[i] : theirs.lane[i];
    }
  } else {
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) largest[i] = scalar_of(seen.lane[1 + i]);
  trips = (seen.lane[0] & 1) != 0;
  far = (seen.lane[0] & 2) != 0;
  return seen.lane[0] != 2;
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

// Softmax over j does not see a vector that all x_j have in common, but float32 does: scores of a series 100 +- 0.05
// are off by 1e-2. An item is staged without its first variate c where every one is near it: max |x_h - c| < max |x_h| / 2
// over the steps. Maxima do not depend on an order: forward and backward, whatever their plans, decide alike.
// Normalised input is told apart while it is staged, by one element of every fourth pack.
struct Nearness {
  Scalar distance = 0, size = 0;

  __device__ void add(Scalar value, Scalar centre) {
    distance = fmax(distance, fabs(value - centre));
    size = fmax(size, fabs(value));
  }
  __device__ void share(int flip) {
    distance = fmax(distance, __shfl_xor_sync(0xffffffffu, distance, flip));
    size = fmax(size, __shfl_xor_sync(0xffffffffu, size, flip));
  }
  __device__ bool near() const { return 2 * distance < size; }
};

// What staging learns of one variate; sums over the steps.
struct Staged {
  Scalar sum;  // of x - c
  Scalar norm;  // of v * v
  Scalar with_centre;  // of (x - c) * c
  bool near;  // as far as the sampled elements say; the first variate is
};

// Elements that staging takes at once: neighbours in DRAM, steps of a variate or variates of a step.
constexpr int kStageWidth = kVariateMajor ? pack_width<Element>(kK, kK) : pack_width<Element>(kH, kH);

// Forward and backward must agree on a mean to the last bit: where one variate takes all, m - out is to be 0. Whatever
// the plan, packs (or steps) are therefore summed in eight classes, which are added as a tree. kStageLanes lanes have
// the classes between them.
constexpr int kClasses = 8 / kStageLanes;  // of a lane
static_assert(8 % kStageLanes == 0, "lanes share the classes evenly");

// Variates (or pieces of a plane) begin on the same bank: each goes through its classes in an order of its own, which
// changes no sum: classes that are added to each other stay so.
__device__ inline int order_of(int h) {
  if constexpr (kVariateMajor) {
    constexpr int kPacks = kK / kStageWidth;
    constexpr int kOrders = kPacks % 8 == 0 ? 8 : kPacks % 4 == 0 ? 4 : kPacks % 2 == 0 ? 2 : 1;
    return (h ^ (h / 8 & 1)) & (kOrders - 1);
  }
  return kK < 8 ? 0 : h / 8 % 4 * 2;
}

// The elements that tell normalised input apart: the first of every fourth pack of a variate, or every eighth step.
__device__ inline bool is_sample(int h, int k) {
  if constexpr (kVariateMajor) return k % kStageWidth == 0 && ((k / kStageWidth) ^ order_of(h)) % 4 == 0;
  return (k ^ order_of(h)) % 8 == 0;
}

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
  bool aligned;  // a contiguous view may start at any element

  __device__ Pack<Element, kStageWidth> load(const Element* from) const {
    if (kPrefetch || aligned) return load_pack<kStageWidth>(from);
    Pack<Element, kStageWidth> pack;
#pragma unroll
    for (int i = 0; i < kStageWidth; ++i) pack.lane[i] = from[i];
    return pack;
  }
  // Whether an element of class i is a sample: see is_sample.
  __device__ static bool samples(int i, int part) {
    if constexpr (kVariateMajor) return (i * kStageLanes + part) % 4 == 0;
    return i == 0 && part == 0;
  }
  __device__ Scalar stage(
      Element element, Scalar factor, int h, int k, Scalar& sum, Scalar& norm, Scalar& with_centre) const {
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
// c is row `centre`, or nothing, to which variates are only compared. A variate that takes no part is staged as zeros:
// nothing of it, NaN included, is seen.
// units: null, or what each variate is multiplied by beside the factor.
template <bool CENTRED, class Keep>
__device__ inline void stage(
    const ItemView& item, int centre, Scalar factor, const Scalar* units, unsigned char* planes, int thread,
    Keep&& keep) {
  constexpr int kWidth = kStageWidth;
  const bool aligned = reinterpret_cast<unsigned long long>(item.x) % (kWidth * sizeof(Element)) == 0;
  const Stager<CENTRED> stager{item, centre, aligned};
  const auto factor_of = [&](int h) { return units == nullptr || h >= kH ? factor : factor * units[h]; };
  if constexpr (kVariateMajor) {
    // kStageLanes neighbours share a variate and take turns along its packs.
    constexpr int kPacks = kK / kWidth;
    const int part = thread % kStageLanes;
#pragma unroll 1
    for (int first = 0; first < kH; first += kItemThreads / kStageLanes) {
      const int h = first + thread / kStageLanes, order = order_of(h);
      const Scalar own_factor = factor_of(h);
      ClassSums sum, with_centre;
      Nearness nearness;
      Scalar norm = 0;
      if (h < kH) {
#pragma unroll 1
        for (int turn = 0; turn < kPacks; turn += 8) {
          // All are on their way before the first is used: no load passes the stores of the one before it.
          Pack<Element, kWidth> pack[kClasses];
#pragma unroll
          for (int i = 0; i < kClasses; ++i) {
            const int index = turn + i * kStageLanes + part;
            if (kPacks % 8 == 0 || index < kPacks) pack[i] = stager.load(item.x + h * kInputH + (index ^ order) * kWidth);
          }
#pragma unroll
          for (int i = 0; i < kClasses; ++i) {
            const int index = turn + i * kStageLanes + part, k = (index ^ order) * kWidth;
            if (kPacks % 8 != 0 && index >= kPacks) continue;
            if (!CENTRED && stager.samples(i, part)) nearness.add(to_scalar(pack[i].lane[0]), item.at(centre, k));
            Scalar v[kWidth];
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
              v[e] = stager.stage(pack[i].lane[e], own_factor, h, k + e, sum.of_class[i], norm, with_centre.of_class[i]);
            }
            store_parts(planes + plane_at(h, k), v);
          }
        }
      }
      for (int flip = kStageLanes / 2; flip > 0; flip /= 2) {
        norm += __shfl_xor_sync(0xffffffffu, norm, flip);
        if constexpr (!CENTRED) nearness.share(flip);
      }
      const Staged staged{
          sum.total(1, kStageLanes / 2), norm, CENTRED ? with_centre.total(1, kStageLanes / 2) : Scalar(0), nearness.near()};
      if (part == 0 && h < kH) keep(h, staged);
    }
  } else {
    // Neighbouring lanes take neighbouring packs of variates; kStageLanes of a warp share a pack and take turns along its
    // steps.
    constexpr int kAcross = 32 / kStageLanes;
    const int part = thread % 32 / kAcross;
#pragma unroll 1
    for (int first = 0; first < kH; first += kItemThreads / kStageLanes * kWidth) {
      const int h = first + (thread / 32 * kAcross + thread % kAcross) * kWidth, order = order_of(h);
      ClassSums sum[kWidth], with_centre[kWidth];
      Nearness nearness[kWidth];
      Scalar norm[kWidth] = {}, own_factor[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) own_factor[e] = factor_of(h + e);
      if (h < kH) {
#pragma unroll 1
        for (int turn = 0; turn < kK; turn += 8) {
          Pack<Element, kWidth> pack[kClasses];
#pragma unroll
          for (int i = 0; i < kClasses; ++i) {
            const int k = turn + ((i * kStageLanes + part) ^ order);
            if (kK % 8 == 0 || k < kK) pack[i] = stager.load(item.x + k * kInputK + h);
          }
#pragma unroll
          for (int i = 0; i < kClasses; ++i) {
            const int k = turn + ((i * kStageLanes + part) ^ order);
            if (kK % 8 != 0 && k >= kK) continue;
            Scalar v[kWidth];
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
              if (!CENTRED && stager.samples(i, part)) nearness[e].add(to_scalar(pack[i].lane[e]), item.at(centre, k));
              v[e] = stager.stage(pack[i].lane[e], own_factor[e], h + e, k, sum[e].of_class[i], norm[e], with_centre[e].of_class[i]);
            }
            store_parts(planes + plane_at(h, k), v);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        for (int flip = 16; flip >= kAcross; flip /= 2) {
          norm[e] += __shfl_xor_sync(0xffffffffu, norm[e], flip);
          if constexpr (!CENTRED) nearness[e].share(flip);
        }
        const Staged staged{
            sum[e].total(kAcross, 16), norm[e], CENTRED ? with_centre[e].total(kAcross, 16) : Scalar(0), nearness[e].near()};
        if (part == 0 && h < kH) keep(h + e, staged);
      }
    }
  }
}

// ---- which items need more than the plain way

// Row norms below this, and scores with them: e^60 times 8192 variates times a mean fits a float32.
constexpr int kPlainNorm = 86;  // 60 * log2 e
// A centred item has Z >= e^-norm only.
constexpr int kCentredNorm = 50;  // 35 * log2 e
constexpr int kPlainMean = 1048576;
// A weight is divided by a weight, which is off by its last bit even where one variate takes all; the centre, beside which
// differences are so small that its offset is larger than this, would make 1e-5 of dx of that.
constexpr int kPlainOffset = 512;

// How an item was staged.
struct Staging {
  int centre = -1;  // the row taken off, -1: none
  Scalar centre_mean = 0;
  Scalar factor = 0;  // x - c is v * (unit / 2^reach) / factor
  Scalar sign = 1;  // scores are sign * unit of h * unit of j * <v_h, v_j> + offset of j
  int reach = 0;  // the largest unit is 2^reach
  Scalar top_offset = 0;  // the largest offset, which weights are relative to
  bool plain = true;  // unshifted exponentials neither overflow nor vanish, and all units are 1
};

__device__ inline Scalar power_of_two(int exponent) { return scalar_of(static_cast<unsigned>(127 + exponent) << 23); }

// A number is at least 2^this and less than twice that; 0 where there is none that power_of_two has, either sign.
__device__ inline int exponent_of(Scalar value) {
  const int exponent = static_cast<int>(bits_of(value) >> 23 & 255) - 127;
  return exponent > -127 && exponent < 127 ? exponent : 0;
}

// Stages an item again that is near its first variate, unless a sample was far; or that trips a guard, or whose scale is
// negative. keep(h, mean, offset) is called once a variate, where it is staged; the threads of the item agree on the
// rest, and on units[kRowsPadded], of which they keep one a variate: it must be behind a barrier before it is read.
//
// fp16 ends at 65504, and a pair of its numbers has 22 bits only down to 2^-3. Where scores are large, a variate is staged
// as so many times smaller or larger that it just fits, whatever the sizes of the others; a centred item as a whole.
template <class Keep>
__device__ inline Staging stage_special(
    const ItemView& item, bool trips, bool far, Scalar scale, Scalar factor, unsigned char* planes, Scalar* units,
    Scalar* room, int thread, Keep&& keep) {
  constexpr int kFits = 13;  // numbers below 2^14, so that their sums and differences do, too
  constexpr int kMostReach = 44;  // the square of such numbers still fits a float32, as a score
  Staging how;
  const int first = item.first_taking_part();
  bool near = first < kH && !far;
  Scalar largest = 0;
#pragma unroll 1
  for (int h = thread; h < kH && first < kH; h += kItemThreads) {
    Nearness row;
    if (item.takes_part(h)) {
      int k = h % kK;  // variates begin on the same bank
#pragma unroll 4
      for (int i = 0; i < kK; ++i) {
        row.add(item.at(h, k), item.at(first, k));
        k = k + 1 < kK ? k + 1 : 0;
      }
      near = near && row.near();
    }
    units[h] = row.size;
    largest = fmax(largest, row.size);
  }
  if (!any_of_item(!near)) how.centre = first;
  largest = largest_of_item(largest, room);
  const bool apart = how.centre < 0 && (trips || scale < 0);
  const auto fitting = [&](Scalar size) {
    const int exponent = exponent_of(size * Scalar(0.25)) + 2 + exponent_of(factor) + 1 - kFits;
    return size > 0 ? (exponent < -100 ? -100 : exponent > 126 ? 126 : exponent) : 0;
  };
  const int whole = apart ? 0 : fitting(2 * largest) > 0 ? fitting(2 * largest) : 0;
  const int most = apart ? fitting(largest) : whole;
  // Of scores beyond 2^100 a softmax is 0 or 1: there is nothing to lose when all are made smaller.
  const int excess = most > kMostReach ? most - kMostReach : 0;
  how.reach = most - excess;
  how.factor = factor * power_of_two(-most);
  how.sign = scale < 0 ? Scalar(-1) : Scalar(1);
  for (int h = thread; h < kH; h += kItemThreads) units[h] = power_of_two(apart ? -fitting(units[h]) : -whole);
  sync_item();

  bool large = apart || whole > 0 || scale < 0;
  Scalar top = -Scalar(INFINITY);
  const auto note = [&](int h, const Staged& staged) {
    const bool seen = item.takes_part(h);
    const Scalar mean = staged.sum / Scalar(kK);
    const Scalar offset = seen ? scale * log2e() * staged.with_centre : -Scalar(INFINITY);
    const int limit = how.centre >= 0 ? kCentredNorm : kPlainNorm;
    large = large || !(staged.norm < limit && fabs(mean) < kPlainMean && (!seen || fabs(offset) < kPlainOffset));
    top = fmax(top, offset);
    keep(h, mean, offset);
  };
  if (how.centre >= 0) {
    stage<true>(item, how.centre, factor, units, planes, thread, note);
    CompensatedSum total;
    for (int k = 0; k < kK; ++k) total.add(item.at(how.centre, k));
    how.centre_mean = total.sum / Scalar(kK);
  } else {
    stage<false>(item, first < kH ? first : 0, factor, units, planes, thread, note);
  }
  how.top_offset = largest_of_item(top, room);
  if (how.top_offset == -Scalar(INFINITY)) how.top_offset = 0;  // nothing takes part
  how.plain = !any_of_item(large);
  for (int h = thread; h < kH; h += kItemThreads) {
    const int exponent = -exponent_of(units[h]) - excess;
    units[h] = power_of_two(exponent > -126 ? exponent : -126);
  }
  return how;
}
