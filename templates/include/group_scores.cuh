// ---- group_scores.cuh: 64 rows of scores by the four warps of a warpgroup ----

#include "hopper.cuh"

// The planes as the right operand of a product, from variate h and step k on: pieces of 8 x 8 numbers follow each other
// along the steps and along the variates at these distances.
constexpr int kAlongSteps = plane_at(0, 8), kAlongVariates = plane_at(8, 0);

// As columns of scores, with steps summed over; and as steps of a weighted sum of variates.
__device__ inline Descriptor columns_of_scores(const unsigned char* planes) {
  return describe(planes, kAlongSteps, kAlongVariates);
}
__device__ inline Descriptor steps_of_sums(const unsigned char* planes) {
  return describe(planes, kAlongVariates, kAlongSteps);
}

__device__ inline Descriptor advance(Descriptor from, int bytes) { return from + static_cast<unsigned>(bytes >> 4); }

// The rows of a warp's block, as a left operand.
__device__ inline void load_rows(Halves (&rows)[kParts][kStepBlocks][4], const unsigned char* planes, int row, int lane) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int k = 0; k < kStepBlocks; ++k) {
      load_by_steps(rows[part][k], planes + lane_in_rows(lane) + part * kPlaneBytes + plane_at(row, 16 * k));
    }
  }
}

// Keeps an operand in its registers until here, behind the wait for the product that reads them meanwhile.
__device__ inline void hold_rows(Halves (&rows)[kParts][kStepBlocks][4]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) keep_registers(rows[part]);
}

// Begins s = <v_h, v_j> of the warpgroup's 64 rows and N columns; group_wait ends it.
template <int N>
__device__ inline void begin_scores(const Halves (&rows)[kParts][kStepBlocks][4], Descriptor columns, Scalar (&s)[N / 8][4]) {
  keep_registers(s);
  group_fence();
  // In the order of form_scores: a package may form scores by either.
#pragma unroll
  for (int turn = 0; turn < kProducts * kStepBlocks; ++turn) {
    const int product = kSmallFirst ? kProducts - 1 - turn / kStepBlocks : kProducts - 1 - turn % kProducts;
    const int k = kSmallFirst ? turn % kStepBlocks : turn / kProducts;
    const int of_row = product == 1 ? 1 : 0, of_column = product == 2 ? 1 : 0;
    group_multiply<N, !kVariateMajor>(
        s, rows[of_row][k], advance(columns, of_column * kPlaneBytes + plane_at(0, 16 * k)), turn > 0);
  }
  group_commit();
}

// Adds to sum what the 16 variates at `from` give with the weights in pieces; N of the steps, from FIRST on.
template <int N, int FIRST>
__device__ inline void multiply_steps(const Halves (&pieces)[kParts][4], Descriptor from, Scalar (&sum)[2 * kStepBlocks][4]) {
  Scalar(&part)[N / 8][4] = *reinterpret_cast<Scalar(*)[N / 8][4]>(&sum[FIRST / 8]);
#pragma unroll
  for (int product = kParts * 2 - 2; product >= 0; --product) {
    const int of_weight = product == 1 ? 1 : 0, of_variate = product == 2 ? 1 : 0;
    group_multiply<N, kVariateMajor>(
        part, pieces[of_weight], advance(from, of_variate * kPlaneBytes + plane_at(0, FIRST)), true);
  }
  // What the widths of products leave over, widest first.
  constexpr int kLeft = kStepsPadded - FIRST - N, kNext = kLeft >= 64 ? 64 : kLeft >= 32 ? 32 : 16;
  if constexpr (kLeft > 0) multiply_steps<kNext, FIRST + N>(pieces, from, sum);
}

// Begins to add to the warpgroup's 64 rows of sums what COUNT * 16 variates at `from` give; group_wait ends it.
template <int COUNT>
__device__ inline void begin_sums(const Halves (&pieces)[COUNT][kParts][4], Descriptor from, Scalar (&sum)[2 * kStepBlocks][4]) {
  constexpr int kFirst = kStepsPadded >= 64 ? 64 : kStepsPadded >= 32 ? 32 : 16;
  keep_registers(sum);
  group_fence();
#pragma unroll
  for (int c = 0; c < COUNT; ++c) multiply_steps<kFirst, 0>(pieces[c], advance(from, plane_at(16 * c, 0)), sum);
  group_commit();
}

template <int COUNT>
__device__ inline void hold_pieces(Halves (&pieces)[COUNT][kParts][4]) {
#pragma unroll
  for (int c = 0; c < COUNT; ++c) keep_registers(pieces[c]);
}

// Adds them. Tensor cores cut off what does not fit, always towards zero: of a long sum of theirs that would be 1e-6.
// Where there are registers for it, theirs are short, and added up as usual.
template <int COUNT>
__device__ inline void add_sums(Halves (&pieces)[COUNT][kParts][4], Descriptor from, Scalar (&sum)[2 * kStepBlocks][4]) {
  constexpr bool kShort = kStepsPadded <= 32;
  Scalar fresh[2 * kStepBlocks][4] = {};
  Scalar(&to)[2 * kStepBlocks][4] = kShort ? fresh : sum;
  begin_sums(pieces, from, to);
  group_wait<0>();
  hold_pieces(pieces);
  keep_registers(to);
  if constexpr (kShort) {
#pragma unroll
    for (int t = 0; t < 2 * kStepBlocks; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[t][i] += fresh[t][i];
    }
  }
}
