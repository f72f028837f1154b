// ---- rounded_weights.cuh: sums of weights that are rounded to bf16, by tensor cores ----
//
// Where x and out are bf16, weights may be: numerator and denominator of out round alike. With what each column counts
// for as right operand, a product pools 16 columns for 16 rows, and with the transposed weights the other way about: no
// sums in registers, nothing to reduce over lanes.

// What a variate counts for: its weight and weight * mean, each as two bf16 numbers that make up 16 bits.
// [4][kFactorStride]; of 16 variates, those lie side by side that a lane's operand has together.
constexpr int kFactorStride = kRowsPadded + 16;  // a gap that keeps the four on different banks

__device__ inline void put_factors(unsigned short* factors, int h, Pooled counts) {
  unsigned short* const to = factors + h / 16 * 16 + h % 8 / 2 * 4 + h % 16 / 8 * 2 + h % 2;
  const Bfloats high = pack_bfloats(counts.weights, counts.means);
  const Bfloats low = pack_bfloats(counts.weights - low_bfloat(high), counts.means - high_bfloat(high));
  to[0] = static_cast<unsigned short>(high);
  to[kFactorStride] = static_cast<unsigned short>(low);
  to[2 * kFactorStride] = static_cast<unsigned short>(high >> 16);
  to[3 * kFactorStride] = static_cast<unsigned short>(low >> 16);
}

// Two strips. In each, blocks of 16 rows form a circle: a block takes the scores with itself, with the next, and of the
// pairs of opposite ones the first two take theirs: three or two. And the strips' one pair of each other.
struct RoundedForward {
  const unsigned short* factors;
  Pooled* of_strip;  // [4 warps][kRowsPadded]: what rows add to columns of their strip
  Pooled* of_pair;  // [4 warps][64]: and those of the first strip to the second
  Pooled* sums;
  int lane, warp;

  static constexpr int kLast = kLastColumns < 16 ? 16 : kLastColumns;
  // The second strip's blocks lie on warps the other way round, so that all have five.
  __device__ static int block_of(int warp, bool second) { return second ? 3 - warp : warp; }
  __device__ static bool takes(int row, int column) {
    const int ahead = (column - row) & 3;
    return ahead == 1 || (ahead == 2 && row < 2);
  }

  // D's first columns are sums of weights, the next two of weights * mean, and the last four are the first again: of the
  // two lanes that have the same, one keeps the upper rows, the other the lower ones.
  __device__ void put(const Scalar (&d)[4], Pooled* to) const {
    const bool upper = lane % 4 < 2;
    const Scalar high = upper ? d[0] : d[2], low = upper ? d[1] : d[3];
    (&to[lane / 4 + (upper ? 0 : 8)].weights)[lane % 2] = high + low;
  }
  // What the variates of a block count for, as a right operand.
  __device__ Pack<Bfloats, 2> factors_of(int block) const {
    return load_pack<2>(
        reinterpret_cast<const Bfloats*>(factors + lane / 4 % 4 * kFactorStride + 16 * block + lane % 4 * 4));
  }

  // Adds scores of a warp's block of rows, `row` in strip `own`, with columns of strip `other` to the sums of the rows, and
  // to those of the columns, unless they are the rows themselves.
  template <int N>
  __device__ void add_tile(const Scalar (&s)[N / 8][4], int row, int own, int other, Scalar (&sum)[4], Pooled* mirrored) const {
    const Pack<Bfloats, 2> of_rows = factors_of(4 * own + row);
#pragma unroll
    for (int c = 0; c < N / 16; ++c) {
      const bool diagonal = own == other && c == row;
      if (own == other && !diagonal && !takes(row, c)) continue;
      Bfloats weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Scalar(&part)[4] = s[2 * c + i / 2];
        weights[i] = pack_bfloats(fast_exp2(part[i % 2 * 2]), fast_exp2(part[i % 2 * 2 + 1]));
      }
      const Pack<Bfloats, 2> of_columns = factors_of(4 * other + c);
      multiply_add_bfloats(sum, weights, of_columns.lane[0], of_columns.lane[1]);
      if (diagonal) continue;
      const Bfloats transposed[4] = {
          transpose_matrix(weights[0]), transpose_matrix(weights[2]), transpose_matrix(weights[1]),
          transpose_matrix(weights[3])};
      Scalar given[4];
      multiply_bfloats(given, transposed, of_rows.lane[0], of_rows.lane[1]);
      put(given, mirrored + 16 * c);
    }
  }

  __device__ void add_all(const unsigned char* planes) const {
    const Descriptor columns = columns_of_scores(planes), second = advance(columns, plane_at(64, 0));
    Pooled* const own = of_strip + warp * kRowsPadded;
    Halves rows[kParts][kStepBlocks][4];
    const int upper = block_of(warp, false), lower = block_of(warp, true);
    {
      Scalar s[8][4], sum[4] = {};
      load_rows(rows, planes, 16 * upper, lane);
      begin_scores<64>(rows, columns, s);
      group_wait<0>();
      keep_registers(s);
      add_tile<64>(s, upper, 0, 0, sum, own);
      Scalar pair[kLast / 8][4];
      begin_scores<kLast>(rows, second, pair);
      group_wait<0>();
      hold_rows(rows);
      keep_registers(pair);
      add_tile<kLast>(pair, upper, 0, 1, sum, of_pair + warp * 64);
      put(sum, sums + 16 * upper);
    }
    Scalar s[kLast / 8][4], sum[4] = {};
    load_rows(rows, planes, 64 + 16 * lower, lane);
    begin_scores<kLast>(rows, second, s);
    group_wait<0>();
    hold_rows(rows);
    keep_registers(s);
    add_tile<kLast>(s, lower, 1, 1, sum, own + 64);
    put(sum, sums + 64 + 16 * lower);
  }

  // All that was added for a variate.
  __device__ Pooled total(int h) const {
    Pooled sum = sums[h];
    const bool second = h >= 64;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const Pooled own = takes(block_of(w, second), h / 16 % 4) ? of_strip[w * kRowsPadded + h] : Pooled{0, 0};
      const Pooled other = second ? of_pair[w * 64 + h - 64] : Pooled{0, 0};
      sum.weights += own.weights + other.weights;
      sum.means += own.means + other.means;
    }
    return sum;
  }
};
