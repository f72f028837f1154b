// ---- group_scores.cuh: 64 rows of scores by the four warps of a warpgroup ----

#include "hopper.cuh"

// The planes as the right operand of a product, from variate h and step k on: pieces of 8 x 8 numbers follow each other
// along the steps and along the variates at these distances.
constexpr int kAlongSteps = plane_at(0, 8), kAlongVariates = plane_at(8, 0);

// As columns of scores, with steps summed over.
__device__ inline Descriptor columns_of_scores(const unsigned char* planes) {
  return describe(planes, kAlongSteps, kAlongVariates);
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
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int k = 0; k < kStepBlocks; ++k) keep_registers(rows[part][k]);
  }
}

// Begins s = <v_h, v_j> of the warpgroup's 64 rows and N columns; group_wait ends it.
template <int N>
__device__ inline void begin_scores(const Halves (&rows)[kParts][kStepBlocks][4], Descriptor columns, Scalar (&s)[N / 8][4]) {
  keep_registers(s);
  group_fence();
  // The small products first: what they have to say is lost in a sum that is large already.
#pragma unroll
  for (int product = kParts * 2 - 2; product >= 0; --product) {
    const int of_row = product == 1 ? 1 : 0, of_column = product == 2 ? 1 : 0;
#pragma unroll
    for (int k = 0; k < kStepBlocks; ++k) {
      group_multiply<N, !kVariateMajor>(
          s, rows[of_row][k], advance(columns, of_column * kPlaneBytes + plane_at(0, 16 * k)),
          product != kParts * 2 - 2 || k > 0);
    }
  }
  group_commit();
}
