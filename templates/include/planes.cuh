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

// Elements that staging takes at once: neighbours in DRAM, steps of a variate or variates of a step.
constexpr int kStageWidth = kVariateMajor ? pack_width<Element>(kK, kK) : pack_width<Element>(kH, kH);

// Forward and backward must agree on a mean to the last bit: where one variate takes all, m - out is to be 0. Whatever
// the plan, packs (or steps) are therefore summed in eight classes, which are added as a tree. kStageLanes lanes have
// the classes between them.
constexpr int kClasses = 8 / kStageLanes;  // of a lane
static_assert(8 % kStageLanes == 0, "lanes share the classes evenly");

// How threads stage a plane whose rows are variates: kStageLanes of a warp a variate, two of them neighbours, the others as
// far apart as they can be. Of 16 lanes, eight variates write both halves of a row of a piece each: all banks once.
constexpr int kStagedRows = 32 / kStageLanes;  // variates of a warp
__device__ inline int staged_row(int thread) {
  return kStageLanes == 1 ? thread : thread / 32 * kStagedRows + thread / 2 % kStagedRows;
}
__device__ inline int staged_part(int thread) {
  return kStageLanes == 1 ? 0 : thread % 2 + thread % 32 / (2 * kStagedRows) * 2;
}
constexpr int kPartFlips = kStageLanes == 1 ? 0 : 32 - 2 * kStagedRows + 1;  // the lane bits that tell parts apart

// Variates (or pieces of a plane) begin on the same bank: each goes through its classes in an order of its own, which
// changes no sum: classes that are added to each other stay so.
__device__ inline int order_of(int h) {
  if constexpr (kVariateMajor) {
    constexpr int kPacks = kK / kStageWidth;
    constexpr int kOrders = kPacks % 8 == 0 ? 8 : kPacks % 4 == 0 ? 4 : kPacks % 2 == 0 ? 2 : 1;
    return (kStageLanes == 1 ? h ^ (h / 8 & 1) : 2 * h) & (kOrders - 1);
  }
  return kK < 8 ? 0 : h / 8 % 4 * 2;
}

struct ClassSums {
  Scalar of_class[kClasses] = {};

  // The sum over the classes and the lanes that `flips`, a mask of lane bits, tells apart, the highest first.
  __device__ Scalar total(int flips) {
#pragma unroll
    for (int half = kClasses / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) of_class[i] += of_class[i + half];
    }
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) {
      if ((flips & flip) != 0) of_class[0] += __shfl_xor_sync(0xffffffffu, of_class[0], flip);
    }
    return of_class[0];
  }
};

// ---- which items need more than the plain way

// Row norms below this, and scores with them: e^60 times 8192 variates times a mean fits a float32.
constexpr int kPlainNorm = 86;  // 60 * log2 e
constexpr int kPlainMean = 1048576;

__device__ inline Scalar power_of_two(int exponent) { return scalar_of(static_cast<unsigned>(127 + exponent) << 23); }

// A number is at least 2^this and less than twice that; 0 where there is none that power_of_two has, either sign.
__device__ inline int exponent_of(Scalar value) {
  const int exponent = static_cast<int>(bits_of(value) >> 23 & 255) - 127;
  return exponent > -127 && exponent < 127 ? exponent : 0;
}

// The power of two that takes numbers up to `bound` to where fp16 has most room: below 2^15.
__device__ inline int lift_of(Scalar bound) {
  const int exponent = static_cast<int>(bits_of(bound) >> 23 & 255) - 127;
  return bound > 0 ? (14 - exponent < 126 ? 14 - exponent : 126) : 0;
}
