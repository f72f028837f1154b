// ---- mma_scores.cuh: tiles of scores by tensor cores, and sums over their rows and columns ----
//
// A warp owns kRowBlocks blocks of 16 rows. Of a 16 x 8 piece of scores, a lane holds four: rows lane / 4 and
// lane / 4 + 8, columns lane % 4 * 2 and the next.

// A score is the sum of kProducts products: of the parts that are high and high (0), low and high (1), high and low (2).
constexpr int kProducts = 2 * kParts - 1;
// The small products of all steps first: what they have to say is lost in a sum that is large already. Where the steps are
// too many to be staged at once, those of 16 steps at a time. Forward and backward must agree, whatever their plans: a
// score that differs in its last bit is off by 1e-6 where one variate takes nearly all.
constexpr bool kSmallFirst = kStepsPadded <= 128;

// The rows' operand: in registers where the steps are few, else read again for each tile.
struct RowOperand {
  static constexpr int kKept = kRowsKept ? kStepsPadded / 16 : 1;
  const unsigned char* at;  // the lane's row of the first block
  Halves kept[kParts][kRowBlocks][kKept][4];

  __device__ explicit RowOperand(const unsigned char* first) : at(first) {
    if constexpr (kRowsKept) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
          for (int k = 0; k < kKept; ++k) load_by_steps(kept[part][b][k], block(part, b, 16 * k));
        }
      }
    }
  }
  __device__ const unsigned char* block(int part, int b, int k) const {
    return at + part * kPlaneBytes + plane_at(16 * b, k);
  }
};

// s[b][t] = <v_h, v_j> of blocks FIRST .. of the rows and N columns; `columns` is the lane's row of their first block.
//
// DIAGONAL: N is 16, and block r meets columns of its own, the 16 that lie r blocks after the first.
//
// SYMMETRIC: <v_h, v_j> and <v_j, v_h> are the same to the last bit, wherever a row meets a column. Weights that are
// taken relative to forward's lse need that: where one score of 100 dominates, its last bit is 1e-5 of them.
template <int FIRST, int BLOCKS, int N, bool SYMMETRIC = false, bool DIAGONAL = false>
__device__ inline void form_scores(const RowOperand& rows, const unsigned char* columns, Scalar (&s)[BLOCKS][N / 8][4]) {
  constexpr bool kApart = SYMMETRIC && kParts == 2;  // the two small products have sums of their own
  Scalar small[kApart ? 2 : 1][BLOCKS][N / 8][4];
  // Operands of 16 steps: where the rows' stay in registers, the columns' of all steps are loaded once, else as they come.
  constexpr int kLoaded = DIAGONAL ? BLOCKS : N / 16;  // blocks of columns
  constexpr int kHeld = kRowsKept ? kStepBlocks : 1;
  Halves b[kHeld][kParts][kLoaded][4], a[kParts][BLOCKS][4];
  const auto load_columns = [&](int k, int part) {
#pragma unroll
    for (int t = 0; t < kLoaded; ++t) {
      load_by_steps(b[kRowsKept ? k / 16 : 0][part][t], columns + part * kPlaneBytes + plane_at(16 * t, k));
    }
  };
  // The products `most` .. `least` of 16 steps from k on; `first` where nothing has been summed yet.
  const auto add = [&](int k, int most, int least, bool first) {
#pragma unroll
    for (int part = 0; part < (most > 0 ? kParts : 1); ++part) {
      if constexpr (!kRowsKept) load_columns(k, part);
#pragma unroll
      for (int r = 0; r < BLOCKS; ++r) {
        if constexpr (kRowsKept) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[part][r][i] = rows.kept[part][FIRST + r][k / 16][i];
        } else {
          load_by_steps(a[part][r], rows.block(part, FIRST + r, k));
        }
      }
    }
#pragma unroll
    for (int product = most; product >= least; --product) {
      const int of_row = product == 1 ? 1 : 0, of_column = product == 2 ? 1 : 0;
#pragma unroll
      for (int r = 0; r < BLOCKS; ++r) {
#pragma unroll
        for (int t = 0; t < N / 8; ++t) {
          const Halves(&column)[4] = b[kRowsKept ? k / 16 : 0][of_column][DIAGONAL ? r : t / 2];
          Scalar(&sum)[4] = *(kApart && product > 0 ? &small[kApart ? product - 1 : 0][r][t] : &s[r][t]);
          if (first && (kApart || product == most)) {
            multiply(sum, a[of_row][r], column[t % 2 * 2], column[t % 2 * 2 + 1]);
          } else {
            multiply_add(sum, a[of_row][r], column[t % 2 * 2], column[t % 2 * 2 + 1]);
          }
        }
      }
    }
  };
  if constexpr (kRowsKept) {
#pragma unroll
    for (int k = 0; k < kStepsPadded; k += 16) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) load_columns(k, part);
    }
  }
  constexpr int kUnroll = kRowsKept ? kStepBlocks : 1;
  if constexpr (kSmallFirst && kParts == 2 && !kApart) {
    add(0, kProducts - 1, 1, true);
#pragma unroll kUnroll
    for (int k = 16; k < kStepsPadded; k += 16) add(k, kProducts - 1, 1, false);
#pragma unroll kUnroll
    for (int k = 0; k < kStepsPadded; k += 16) add(k, 0, 0, false);
  } else {
    add(0, kProducts - 1, 0, true);
#pragma unroll kUnroll
    for (int k = 16; k < kStepsPadded; k += 16) add(k, kProducts - 1, 0, false);
  }
  if constexpr (kApart) {
#pragma unroll
    for (int r = 0; r < BLOCKS; ++r) {
#pragma unroll
      for (int t = 0; t < N / 8; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[r][t][i] += small[0][r][t][i] + small[kApart ? 1 : 0][r][t][i];
      }
    }
  }
}

// Sums each of COUNT values over the lanes that `FLIPS`, a mask of lane bits, tells apart, and shares the sums out:
// of 2^n lanes, each is left with COUNT / 2^n of them, from index_after(lane) on. One shuffle for two values, not two.
template <int COUNT, int FLIPS>
__device__ inline void add_and_share(Scalar* value, int lane) {
  constexpr int kFlip = FLIPS & -FLIPS, kLeft = COUNT == 1 ? 1 : COUNT / 2;
  static_assert(COUNT == 1 || COUNT % 2 == 0, "halves");
  if constexpr (COUNT == 1) {
    value[0] += __shfl_xor_sync(0xffffffffu, value[0], kFlip);
  } else {
    const bool upper = (lane & kFlip) != 0;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const Scalar give = upper ? value[i] : value[i + kLeft], keep = upper ? value[i + kLeft] : value[i];
      value[i] = keep + __shfl_xor_sync(0xffffffffu, give, kFlip);
    }
  }
  if constexpr ((FLIPS & ~kFlip) != 0) add_and_share<kLeft, (FLIPS & ~kFlip)>(value, lane);
}

template <int COUNT, int FLIPS>
__device__ constexpr int index_after(int lane) {
  constexpr int kFlip = FLIPS & -FLIPS, kLeft = COUNT == 1 ? 1 : COUNT / 2;
  const int own = COUNT > 1 && (lane & kFlip) != 0 ? kLeft : 0;
  if constexpr ((FLIPS & ~kFlip) != 0) return own + index_after<kLeft, (FLIPS & ~kFlip)>(lane);
  return own;
}

constexpr int kLanesOfRow = 1 | 2;  // the lane bits that tell the columns of a row apart
constexpr int kLanesOfColumn = 4 | 8 | 16;  // and the rows of a column

// Over the lanes that share a row; each is left with the sum.
__device__ inline Scalar sum_of_row(Scalar value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// The sum of weights of one variate's scores, and of weights * mean.
struct Pooled {
  Scalar weights, means;
};
