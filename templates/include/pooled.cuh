// ---- pooled.cuh: what forward sums, and what it makes of it ----

// The rows of a strip against all columns, each relative to the largest score that the lane has met so far, and all
// relative to the largest offset: of 10000 +- 1 offsets are of a size whose last bit is 1e-3.
__device__ inline void online_softmax(
    const RowOperand& rows, const unsigned char* by_column, const Scalar* offsets, Scalar top_offset, const Scalar* means,
    const Scalar* units, Scalar sign, int row0, int lane, Pooled* sums, Scalar* bases) {
  Scalar largest[kRowBlocks][2];
  Pooled sum[kRowBlocks][2] = {};
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) largest[b][0] = largest[b][1] = -Scalar(INFINITY);
#pragma unroll 1
  for (int c = 0; c < kRowsUsed; c += 16) {
    Scalar s[kRowBlocks][2][4];
    form_scores<0, kRowBlocks, 16, true>(rows, by_column + plane_at(c, 0), s);
    Scalar offset[4], mean[4], unit[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      offset[j] = offsets[c + j / 2 * 8 + lane % 4 * 2 + j % 2] - top_offset;
      mean[j] = means[c + j / 2 * 8 + lane % 4 * 2 + j % 2];
      unit[j] = units[c + j / 2 * 8 + lane % 4 * 2 + j % 2];
    }
#pragma unroll
    for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Scalar of_row = sign * units[row0 + 16 * b + 8 * half + lane / 4];
        Scalar exponent[4], next = largest[b][half];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          exponent[j] = fma(s[b][j / 2][2 * half + j % 2] * of_row, unit[j], offset[j]);
          next = fmax(next, exponent[j]);
        }
        // Nothing but masked columns so far: any finite number will do. fmax drops NaN; the weights meet it again.
        const Scalar base = next == -Scalar(INFINITY) ? Scalar(0) : next;
        const Scalar shrink = fast_exp2(largest[b][half] - base);
        Pooled& row = sum[b][half];
        row.weights *= shrink;
        row.means *= shrink;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Scalar weight = fast_exp2(exponent[j] - base);
          row.weights += weight;
          row.means = fma(weight, mean[j], row.means);
        }
        largest[b][half] = next;
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Scalar top = largest[b][half];
      top = fmax(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmax(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const Scalar base = top == -Scalar(INFINITY) ? Scalar(0) : top;
      const Scalar shrink = fast_exp2(largest[b][half] - base);
      Pooled row{sum[b][half].weights * shrink, sum[b][half].means * shrink};
#pragma unroll
      for (int flip = 1; flip <= 2; flip *= 2) {
        row.weights += __shfl_xor_sync(0xffffffffu, row.weights, flip);
        row.means += __shfl_xor_sync(0xffffffffu, row.means, flip);
      }
      if (lane % 4 == 0) {
        sums[row0 + 16 * b + 8 * half + lane / 4] = row;
        bases[row0 + 16 * b + 8 * half + lane / 4] = base;
      }
    }
  }
}

// What forward writes of one variate.
struct Result {
  Scalar out, out_acc, lse, lse_low;
};

// sum is of weights relative to 2^base and to the largest offset.
__device__ inline Result result_of(bool takes_part, Pooled sum, Scalar base, const Staging& how) {
  if (!takes_part) return {0, 0, INFINITY, 0};
  // A quotient to the last digit: what the reciprocal misses of it is added.
  const Scalar reciprocal = fast_reciprocal(sum.weights), quotient = sum.means * reciprocal;
  const Scalar pooled = fma(fma(-quotient, sum.weights, sum.means), reciprocal, quotient);
  // The sum is 2^12 and more: its whole power of two is split off, or the last bit of its logarithm would be 1e-6.
  const int whole = exponent_of(sum.weights);
  const Scalar power = static_cast<Scalar>(whole), fraction = log2(sum.weights * power_of_two(-whole));
  const Scalar high = (how.top_offset + (base + (power + fraction))) * ln2();
  // Backward takes exponents relative to lse: what the rounding of lse lost would be an error of every weight.
  // It is formed in the order in which backward takes it off: a weight of 1 is then 1 to the last bit.
  const Scalar low = fma(high, -log2e(), how.top_offset) + base + power + fraction;
  return {pooled + how.centre_mean, pooled, high, low};
}
