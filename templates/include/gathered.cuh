// ---- gathered.cuh: what backward prepares for its rows, gathers for them, and writes ----

constexpr int kThreadRows = (kH + kItemThreads - 1) / kItemThreads;  // variates whose constants a thread prepares

// What forward left of a variate, and its upstream gradient.
struct Row {
  Scalar g = 0, pooled = 0, lse = INFINITY, low = 0;
};

// Arrays in shared memory, one number a variate. What they hold in a plain item, and in one that is not:
struct Vectors {
  Scalar* mean;
  Scalar* gain;  // c; g
  Scalar* pooled;  // c * out; out
  Scalar* offset;
  Scalar* lse;
  Scalar* low;

  // Row h, its gradient 2^lift times as large.
  __device__ void put(int h, const Row& row, int lift, bool plain) const {
    gain[h] = row.g * power_of_two(lift);
    pooled[h] = row.pooled;
    if (plain) {
      // exp(-lse) to the last digit: the exponent's rounding is taken along.
      const Scalar exponent = row.lse * log2e();
      const Scalar inverse = fast_exp2(-exponent) * fast_exp2(-(fma(row.lse, log2e(), -exponent) + row.low));
      gain[h] = row.lse == Scalar(INFINITY) ? Scalar(0) : gain[h] * inverse;
      pooled[h] *= gain[h];
    }
    lse[h] = row.lse;
    low[h] = row.low;
  }
};

struct Gather {
  Scalar sum[kRowBlocks][2 * kStepBlocks][4];  // sum_j G[i,j] v[j] of the warp's rows
  const unsigned char *by_row, *by_column;  // the lane's places in the first block of the planes
  int lane;

  // G of BLOCKS blocks, in s, as fp16 numbers: an operand of sums over its columns.
  template <int BLOCKS>
  __device__ static void split(const Scalar (&s)[BLOCKS][2][4], Halves (&pieces)[BLOCKS][kParts][4]) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Scalar low = s[b][i / 2][i % 2 * 2], high = s[b][i / 2][i % 2 * 2 + 1];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          pieces[b][part][i] = pack_halves(low, high);
          low -= low_half(pieces[b][part][i]);
          high -= high_half(pieces[b][part][i]);
        }
      }
    }
  }

  // The same as an operand of sums over its rows.
  template <int BLOCKS>
  __device__ static void transpose(Halves (&pieces)[BLOCKS][kParts][4]) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        Halves(&piece)[4] = pieces[b][part];
        const Halves upper_right = transpose_matrix(piece[1]);
        piece[0] = transpose_matrix(piece[0]);
        piece[1] = transpose_matrix(piece[2]);
        piece[2] = upper_right;
        piece[3] = transpose_matrix(piece[3]);
      }
    }
  }

  // v of 16 variates at 16 steps, to be weighted
  __device__ void load(Halves (&y)[kParts][4], int variate, int k) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) load_by_variates(y[part], by_row + part * kPlaneBytes + plane_at(variate, k));
  }

  // Adds to rows FIRST .. what the 16 variates from `column` on give; DIAGONAL: block b meets those 16 b further on.
  template <int FIRST, int BLOCKS, bool DIAGONAL>
  __device__ void add(int column, const Halves (&pieces)[BLOCKS][kParts][4]) {
#pragma unroll
    for (int k = 0; k < kStepBlocks; ++k) {
      Halves y[kParts][4];
      load(y, column, 16 * k);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        if (DIAGONAL && b > 0) load(y, column + 16 * b, 16 * k);
        multiply_parts(pieces[b], y, sum[FIRST + b][2 * k], sum[FIRST + b][2 * k + 1]);
      }
    }
  }

  // Adds to row block TO of the strip what the blocks before it, from row0 on, give.
  template <int TO>
  __device__ void add_own(int row0, const Halves (&pieces)[TO][kParts][4]) {
#pragma unroll
    for (int k = 0; k < kStepBlocks; ++k) {
#pragma unroll
      for (int b = 0; b < TO; ++b) {
        Halves y[kParts][4];
        load(y, row0 + 16 * b, 16 * k);
        multiply_parts(pieces[b], y, sum[TO][2 * k], sum[TO][2 * k + 1]);
      }
    }
  }

  // Rows of dS sum to zero, columns do not: the centre comes back with the column sum alone.
  __device__ void add_centre(int block, int half, const ItemView& item, const Staging& how, Scalar column_sum) {
    const Scalar share = how.factor * column_sum;
#pragma unroll
    for (int t = 0; t < 4 * kStepBlocks; ++t) {
      const int k = t / 2 * 8 + lane % 4 * 2 + t % 2;
      Scalar& to = sum[block][t / 2][2 * half + t % 2];
      if (k < kK) to = fma(share, item.at(how.centre, k), to);
    }
  }

  // dx of a row = along * its sums + pull; `to` is the lane's first place in it.
  __device__ void write(int block, int half, Element* to, Scalar along, Scalar pull, bool takes_part) const {
#pragma unroll
    for (int t = 0; t < 2 * kStepBlocks; ++t) {
      Pack<Element, 2> result;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Scalar total = fma(sum[block][t][2 * half + i], along, pull);
        result.lane[i] = from_scalar<Element>(kMasked && !takes_part ? Scalar(0) : total);
      }
      Element* const place = to + 8 * t * kInputK;
      const int k = 8 * t + lane % 4 * 2;
      if constexpr (kVariateMajor && kK % 2 == 0) {
        if (kStepsPadded == kK || k < kK) store_pack<2>(place, result);
      } else {
        if (kStepsPadded == kK || k < kK) place[0] = result.lane[0];
        if (kStepsPadded == kK || k + 1 < kK) place[kInputK] = result.lane[1];
      }
    }
  }

  // d0, d1 += a * the two halves of y, the small products first. Tensor cores cut off what does not fit, always towards
  // zero: of a long sum of theirs that would be 1e-6. Theirs are short, and added up as usual.
  __device__ static void multiply_parts(
      const Halves (&a)[kParts][4], const Halves (&y)[kParts][4], Scalar (&d0)[4], Scalar (&d1)[4]) {
    Scalar fresh[2][4];
#pragma unroll
    for (int product = kParts * 2 - 2; product >= 0; --product) {
      const int of_a = product == 1 ? 1 : 0, of_y = product == 2 ? 1 : 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (product == kParts * 2 - 2) {
          multiply(fresh[half], a[of_a], y[of_y][2 * half], y[of_y][2 * half + 1]);
        } else {
          multiply_add(fresh[half], a[of_a], y[of_y][2 * half], y[of_y][2 * half + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      d0[i] += fresh[0][i];
      d1[i] += fresh[1][i];
    }
  }
};

// Any other item: weights relative to forward's log-sum-exps, over all scores of the rows.
struct Shifted {
  Gather& gather;
  const RowOperand& rows;
  const Vectors& of;
  int lane, row0;
  const Scalar* units;
  Scalar sign, top_offset, share;  // share: 2^-reach
  Scalar pulled[kRowBlocks][2] = {};  // sum_j g[j] a[j,i]
  Scalar column_sum[kRowBlocks][2] = {};  // sum_j dS[j,i]

  __device__ void add_tile(int column) {
    Scalar s[kRowBlocks][2][4];
    form_scores<0, kRowBlocks, 16, true>(rows, gather.by_column + plane_at(column, 0), s);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = column + 8 * t + lane % 4 * 2 + i;
        const Scalar j_mean = of.mean[j], j_g = of.gain[j], j_out = of.pooled[j], j_lse = of.lse[j], j_low = of.low[j];
        const Scalar j_unit = units[j], j_offset = of.offset[j] - top_offset, j_base = fma(-j_lse, log2e(), top_offset);
#pragma unroll
        for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int h = row0 + 16 * b + 8 * half + lane / 4;
            Scalar& score = s[b][t][2 * half + i];
            const Scalar part = score * (sign * units[h]);
            // The exponents are formed as forward formed them, and lse is taken off as lse_low was.
            const Scalar h_offset = of.offset[h] - top_offset, h_base = fma(-of.lse[h], log2e(), top_offset);
            const Scalar of_row = h_base + fma(part, j_unit, j_offset) - of.low[h];
            const Scalar of_column = j_base + fma(part, j_unit, h_offset) - j_low;
            const Scalar pull = j_g * fast_exp2(of_column);
            const Scalar from_column = pull * (of.mean[h] - j_out);
            pulled[b][half] += pull;
            column_sum[b][half] += from_column;
            score = j_unit * share * fma(of.gain[h] * fast_exp2(of_row), j_mean - of.pooled[h], from_column);
          }
        }
      }
    }
    Halves pieces[kRowBlocks][kParts][4];
    gather.split(s, pieces);
    gather.template add<0, kRowBlocks, false>(column, pieces);
  }
};
