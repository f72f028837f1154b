// ---- own_scores.cuh: scores of a strip's rows with each other; the rows' operand serves as the columns' ----
//
// Nothing is read for the columns: of the four registers of a 16 x 16 block of rows, two are the right operand of its
// first eight variates, the other two that of the others. Products add up in the order of form_scores.

// Blocks and steps that are few enough to be gone through without a loop, those of high parts being kept.
constexpr bool kOwnOperand = kSmallFirst && kRowBlocks * kStepBlocks <= 12;

// Of up to eight variates, both parts fit the 16 rows of one operand: its product with the high parts as columns has
// <high, high> in its upper rows and <low, high> in its lower ones, which transposed are <high, low>.
constexpr bool kFew = kH <= 8 && kParts == 2;

// Adds one of the products of 16 steps to s; the first of all makes it.
template <int N, bool DIAGONAL>
__device__ inline void add_own_product(
    const Halves (&block)[kParts][kRowBlocks][kStepBlocks][4], int product, int k, Scalar (&s)[kRowBlocks][N / 8][4]) {
  const int of_row = product == 1 ? 1 : 0, of_column = product == 2 ? 1 : 0;
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int t = 0; t < N / 8; ++t) {
      const Halves(&column)[4] = block[of_column][DIAGONAL ? r : t / 2][k];
      if (product == kProducts - 1 && k == 0) {
        multiply(s[r][t], block[of_row][r][k], column[t % 2], column[t % 2 + 2]);
      } else {
        multiply_add(s[r][t], block[of_row][r][k], column[t % 2], column[t % 2 + 2]);
      }
    }
  }
}

// s[b][t] of the strip's rows with N columns of its own from its first on; DIAGONAL: each block of 16 with itself alone.
template <int N, bool DIAGONAL>
__device__ inline void form_own_scores(const RowOperand& rows, Scalar (&s)[kRowBlocks][N / 8][4]) {
  Halves block[kParts][kRowBlocks][kStepBlocks][4];
#pragma unroll
  for (int k = 0; k < kStepBlocks; ++k) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        if constexpr (kRowsKept) {
#pragma unroll
          for (int i = 0; i < 4; ++i) block[part][r][k][i] = rows.kept[part][r][k][i];
        } else {
          load_by_steps(block[part][r][k], rows.block(part, r, 16 * k));
        }
      }
    }
#pragma unroll
    for (int product = kProducts - 1; product >= (kParts - 1); --product) add_own_product<N, DIAGONAL>(block, product, k, s);
  }
  if constexpr (kParts > 1) {
#pragma unroll
    for (int k = 0; k < kStepBlocks; ++k) add_own_product<N, DIAGONAL>(block, 0, k, s);
  }
}

// s = <v_h, v_j> of up to eight variates: of row lane / 4, columns lane % 4 * 2 and the next.
__device__ inline void form_few_scores(const unsigned char* planes, int lane, Scalar* s) {
  const int within = lane % 8, step = lane / 16 * 8;
  const unsigned char* const at =
      planes + lane / 8 % 2 * kPlaneBytes + (kVariateMajor ? plane_at(within, step) : plane_at(0, within + step));
  Scalar product[4] = {};
#pragma unroll 8
  for (int k = 0; k < kStepsPadded; k += 16) {
    Halves rows[4];
    load_by_steps(rows, at + plane_at(0, k));
    multiply_add(product, rows, rows[0], rows[2]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // The lane that has the transposed score, of its two the one whose column is this lane's row.
    const int holder = (lane % 4 * 2 + i) * 4 + lane / 8;
    const Scalar even = __shfl_sync(0xffffffffu, product[2], holder), odd = __shfl_sync(0xffffffffu, product[3], holder);
    s[i] = product[i] + (product[2 + i] + (lane / 4 % 2 == 0 ? even : odd));
  }
}
