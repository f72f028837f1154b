// ---- window.cuh: some variates of an item, some of their steps at a time, on their way from DRAM to planes ----

// Planes of VARIATES variates and STEPS steps, laid out as planes.cuh says.
template <int VARIATES, int STEPS>
struct Planes {
  static constexpr int kStride = 2 * (kVariateMajor ? STEPS : VARIATES) + 16;  // bytes between rows
  static constexpr int kBytes = kStride * (kVariateMajor ? VARIATES : STEPS);  // of one of kParts planes

  __device__ static constexpr int at(int h, int k) { return kVariateMajor ? h * kStride + 2 * k : k * kStride + 2 * h; }
  // What a lane adds to the place of a 16 x 16 block to find the row of it that it hands to load_matrices. The four
  // matrices are, for rows of scores, (first variates, first steps), (last, first), (first, last), (last, last);
  // for columns (first, first), (first, last), (last, first), (last, last): either way an operand lies side by side.
  __device__ static int lane_in_rows(int lane) { return within(lane % 8, lane / 8 % 2 * 8, lane / 16 * 8); }
  __device__ static int lane_in_columns(int lane) { return within(lane % 8, lane / 16 * 8, lane / 8 % 2 * 8); }

 private:
  __device__ static int within(int row, int variate, int step) {
    return kVariateMajor ? at(row + variate, step) : at(variate, row + step);
  }
};

// A number that a generic lambda can take as a template argument.
template <bool VALUE>
struct Constant {
  static constexpr bool value = VALUE;
};

constexpr int kElementBytes = sizeof(Element);
constexpr bool kOneChunk = kChunks == 1;
constexpr int kWindows = (kH + kWindow - 1) / kWindow;
constexpr int kRowSteps = kRowsHeld ? kStepsPadded : kChunk;  // steps of the rows that are staged at once
using RowPlanes = Planes<kRows, kRowSteps>;
using ColumnPlanes = Planes<kWindow, kSpread ? kStepsPadded : kChunk>;
// Elements between the rows of a window that was fetched as it lay in x.
constexpr int kFetchedStride = !kVariateMajor ? kWindow : kOneChunk ? kK : kChunk;

// Steps from k0 on that a chunk has, and how many of them are multiplied: zeros take the place of those beyond K.
__device__ constexpr int steps_from(int k0) { return kK - k0 < kChunk ? kK - k0 : kChunk; }
__device__ constexpr int steps_padded(int k0) { return (steps_from(k0) + 15) / 16 * 16; }

// ---- fetching

// `rows` rows of `bytes` bytes, PITCH apart in shared memory; what is asked for is there after wait_copies and a barrier.
template <int UNIT, int PITCH>
__device__ inline void copy_rows(unsigned char* to, const unsigned char* from, long long stride, int rows, int bytes, int thread) {
  constexpr int kUnits = (PITCH + UNIT - 1) / UNIT;
  for (int at = thread; at < rows * kUnits; at += kThreads) {
    const int row = at / kUnits, byte = at % kUnits * UNIT;
    if (byte >= bytes) continue;
    if constexpr (UNIT >= 4) {
      copy_async<UNIT>(to + row * PITCH + byte, from + row * stride + byte);
    } else {
      *reinterpret_cast<Element*>(to + row * PITCH + byte) = *reinterpret_cast<const Element*>(from + row * stride + byte);
    }
  }
}

// Starts to copy variates h0 .. of a window and steps k0 .. of a chunk as they lie.
__device__ inline void fetch_window(const Element* item, int h0, int k0, unsigned char* room, int thread) {
  const auto* from = reinterpret_cast<const unsigned char*>(item + h0 * kInputH + k0 * kInputK);
  const int variates = kH - h0 < kWindow ? kH - h0 : kWindow, steps = steps_from(k0);
  constexpr int kPitch = kFetchedStride * kElementBytes;
  constexpr long long kStride = (kVariateMajor ? kInputH : kInputK) * static_cast<long long>(kElementBytes);
  const int rows = kVariateMajor ? variates : steps;
  const int bytes = (kVariateMajor ? steps : variates) * kElementBytes;
  // A contiguous view may start at any element: the pointer is tested, not assumed.
  const auto address = reinterpret_cast<unsigned long long>(from);
  if (kPitch % 16 == 0 && kStride % 16 == 0 && (address | bytes) % 16 == 0) {
    copy_rows<16, kPitch>(room, from, kStride, rows, bytes, thread);
  } else if (kPitch % 4 == 0 && kStride % 4 == 0 && (address | bytes) % 4 == 0) {
    copy_rows<4, kPitch>(room, from, kStride, rows, bytes, thread);
  } else {
    copy_rows<kElementBytes, kPitch>(room, from, kStride, rows, bytes, thread);
  }
  commit_copies();
}

// ---- staging

// Where the variates that are staged lie: in DRAM, or fetched.
struct Source {
  const Element* x;  // step k0 of variate h0
  int stride;  // between variates (bhk), or steps (bkh)
  bool aligned;

  __device__ Pack<Element, kStageWidth> load(int at) const {
    if (aligned) return load_pack<kStageWidth>(x + at);
    Pack<Element, kStageWidth> pack;
#pragma unroll
    for (int i = 0; i < kStageWidth; ++i) pack.lane[i] = x[at + i];
    return pack;
  }
};

__device__ inline Source in_memory(const ItemView& item, int h0, int k0) {
  const Element* const x = item.x + h0 * kInputH + k0 * kInputK;
  return {x, kVariateMajor ? kInputH : kInputK, reinterpret_cast<unsigned long long>(x) % (kStageWidth * kElementBytes) == 0};
}

// What staging learns of one variate.
struct Learnt {
  Scalar sum;  // of x - c
  Scalar norm;  // of v * v
  Scalar with_centre;  // of (x - c) * c
  bool near;  // the centre, if there is one
};

// What is known of VARIATES variates while their steps are staged a chunk at a time: two sums
// [class][variate], three numbers [variate].
template <int VARIATES>
struct Unfinished {
  Scalar* of_class;

  __device__ Scalar& at(int what, int index, int variate) const { return of_class[(what * 8 + index) * VARIATES + variate]; }
};

// Sums of one variate over the chunks so far, of one lane.
struct Sums {
  ClassSums sum, with_centre;
  Scalar norm = 0;
  Nearness nearness;

  template <int VARIATES>
  __device__ void take_up(const Unfinished<VARIATES>& from, int part, int variate) {
#pragma unroll
    for (int i = 0; i < kClasses; ++i) {
      sum.of_class[i] = from.at(0, i * kStageLanes + part, variate);
      with_centre.of_class[i] = from.at(1, i * kStageLanes + part, variate);
    }
    if (part > 0) return;
    norm = from.at(2, 0, variate);
    nearness = {from.at(2, 1, variate), from.at(2, 2, variate)};
  }
  template <int VARIATES>
  __device__ void put_away(const Unfinished<VARIATES>& to, int part, int variate) const {
#pragma unroll
    for (int i = 0; i < kClasses; ++i) {
      to.at(0, i * kStageLanes + part, variate) = sum.of_class[i];
      to.at(1, i * kStageLanes + part, variate) = with_centre.of_class[i];
    }
    if (part > 0) return;
    to.at(2, 0, variate) = norm;
    to.at(2, 1, variate) = nearness.distance;
    to.at(2, 2, variate) = nearness.size;
  }
};

// Stages steps k0 .. of a chunk of variates h0 .., which lie at `from`, to `planes`: the place of variate h0 and step k0.
// keep(place, variate, what was learnt) is called with the last chunk, once a variate, padding included, by the lane that
// has it. The sums are formed in the order of whole_item.cuh's `stage`: chunks are whole turns of its classes. What takes no
// part is staged as zeros: nothing of it, NaN included, is seen.
// Without SUMS nothing is learnt, and keep is not called.
template <class PLANES, int VARIATES, bool CENTRED, bool SUMS, class Keep>
__device__ inline void stage_chunk(
    const ItemView& item, const Source& from, int centre, Scalar factor, int h0, int k0, unsigned char* planes,
    const Unfinished<VARIATES>& unfinished, int thread, Keep&& keep) {
  constexpr int kWidth = kStageWidth;
  const int steps = steps_from(k0), padded = steps_padded(k0);
  const bool first_chunk = kOneChunk || k0 == 0, last_chunk = kOneChunk || k0 + kChunk >= kK;
  const auto value_of = [&](Element element, int k, Sums& sums, int i) {
    Scalar value = to_scalar(element);
    if constexpr (CENTRED) {
      const Scalar c = item.at(centre, k0 + k);
      if constexpr (SUMS) sums.nearness.add(value, c);
      value -= c;
      if constexpr (SUMS) sums.with_centre.of_class[i] = fma(value, c, sums.with_centre.of_class[i]);
    }
    const Scalar v = value * factor;
    if constexpr (SUMS) {
      sums.sum.of_class[i] += value;
      sums.norm = fma(v, v, sums.norm);
    }
    return v;
  };
  if constexpr (kVariateMajor) {
    const int part = staged_part(thread);
#pragma unroll 1
    for (int first = 0; first < VARIATES; first += kThreads / kStageLanes) {
      const int place = first + staged_row(thread), h = h0 + place;
      const bool inside = place < VARIATES, seen = inside && item.takes_part(h);
      Sums sums;
      if (inside) {
        if (SUMS && !first_chunk) sums.take_up(unfinished, part, place);
#pragma unroll 1
        for (int turn = 0; turn < padded / kWidth; turn += 8) {
#pragma unroll
          for (int i = 0; i < kClasses; ++i) {
            const int index = turn + i * kStageLanes + part;
            if (index >= padded / kWidth) continue;
            const int k = (index ^ order_of(h)) * kWidth;
            Scalar v[kWidth] = {};
            if (seen && k < steps) {
              const Pack<Element, kWidth> pack = from.load(place * from.stride + k);
#pragma unroll
              for (int e = 0; e < kWidth; ++e) {
                v[e] = value_of(pack.lane[e], k + e, sums, i);
              }
            }
            store_parts<kWidth, PLANES::kBytes>(planes + PLANES::at(place, k), v);
          }
        }
      }
      if constexpr (!SUMS) continue;
#pragma unroll
      for (int flip = 16; flip > 0; flip /= 2) {
        if ((kPartFlips & flip) == 0) continue;
        sums.norm += __shfl_xor_sync(0xffffffffu, sums.norm, flip);
        if constexpr (CENTRED) sums.nearness.share(flip);
      }
      if (!last_chunk) {
        if (inside) sums.put_away(unfinished, part, place);
        continue;
      }
      const Learnt staged{
          sums.sum.total(kPartFlips), sums.norm, CENTRED ? sums.with_centre.total(kPartFlips) : Scalar(0),
          !CENTRED || !seen || sums.nearness.near()};
      if (part == 0 && inside) keep(place, h, staged);
    }
  } else {
    constexpr int kLanesAcross = 32 / kStageLanes, kFlips = 32 - kLanesAcross;
    const int part = thread % 32 / kLanesAcross;
#pragma unroll 1
    for (int first = 0; first < VARIATES; first += kThreads / kStageLanes * kWidth) {
      const int place = first + (thread / 32 * kLanesAcross + thread % kLanesAcross) * kWidth, h = h0 + place;
      const bool inside = place < VARIATES;
      Sums sums[kWidth];
      if (inside) {
        if (SUMS && !first_chunk) {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) sums[e].take_up(unfinished, part, place + e);
        }
#pragma unroll 1
        for (int turn = 0; turn < padded; turn += 8) {
#pragma unroll
          for (int i = 0; i < kClasses; ++i) {
            const int k = turn + i * kStageLanes + part;
            Scalar v[kWidth] = {};
            if (h < kH && k < steps) {
              const Pack<Element, kWidth> pack = from.load(k * from.stride + place);
#pragma unroll
              for (int e = 0; e < kWidth; ++e) {
                if (kMasked && !item.takes_part(h + e)) continue;
                v[e] = value_of(pack.lane[e], k, sums[e], i);
              }
            }
            store_parts<kWidth, PLANES::kBytes>(planes + PLANES::at(place, k), v);
          }
        }
      }
      if constexpr (!SUMS) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        Scalar& norm = sums[e].norm;
        for (int flip = 16; flip >= kLanesAcross; flip /= 2) {
          norm += __shfl_xor_sync(0xffffffffu, norm, flip);
          if constexpr (CENTRED) sums[e].nearness.share(flip);
        }
        if (!last_chunk) {
          if (inside) sums[e].put_away(unfinished, part, place + e);
          continue;
        }
        const Learnt staged{
            sums[e].sum.total(kFlips), norm, CENTRED ? sums[e].with_centre.total(kFlips) : Scalar(0),
            !CENTRED || !item.takes_part(h + e) || sums[e].nearness.near()};
        if (part == 0 && inside) keep(place + e, h + e, staged);
      }
    }
  }
}

// ---- which items are centred or made smaller

// How an item was staged.
struct WindowStaging {
  int centre = -1;  // the row taken off, -1: none
  Scalar centre_mean = 0;
  Scalar factor = 0;  // x - c is v / factor
  Scalar unit = 1;  // scores are unit * <v_h, v_j> + offset of j
  bool plain = true;  // unit is 1, and nothing was taken off
};

// Row norms from here on may belong to numbers too large for fp16.
constexpr float kLargeNorm = 67108864;

// By the lanes of a warp together.
__device__ inline Nearness look_at(const ItemView& item, int centre, int h, int lane) {
  Nearness row;
  for (int k = lane; k < kK; k += 32) row.add(item.at(h, k), item.at(centre, k));
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) row.share(flip);
  return row;
}

// The largest number of the item that the warp of this thread has to look at.
__device__ inline Scalar largest_of_warp(const ItemView& item, int thread) {
  Scalar largest = 0;
#pragma unroll 1
  for (int h = thread / 32; h < kH; h += kThreads / 32) {
    if (item.takes_part(h)) largest = fmax(largest, look_at(item, h, h, thread % 32).size);
  }
  return largest;
}

// fp16 ends at 65504: larger numbers are staged as so many times smaller, and scores are multiplied back. Beyond
// 2^80 there is nothing to multiply back for: a softmax of such scores is 0 or 1.
__device__ inline void make_smaller(WindowStaging& how, Scalar scale, Scalar factor, Scalar largest) {
  const Scalar bound = 2 * factor * largest;
  int shift = 0;
  for (Scalar reach = 16384; reach < bound && shift < 113; reach *= 2) ++shift;
  how.factor = factor * power_of_two(-shift);
  how.unit = power_of_two(2 * shift < 80 ? 2 * shift : 80) * (scale < 0 ? Scalar(-1) : Scalar(1));
  how.plain = how.centre < 0 && shift == 0 && !(scale < 0);
}

// An item is centred if every variate is nearer to the first than half of its own size. Here a few are looked at: if one
// is not near, as in normalised input, that is settled. Else the item is staged as if it were, and the block begins anew
// where staging meets one that is not. Each block meets all variates: all blocks of an item find the same, in forward and
// backward.
__device__ inline WindowStaging choose_staging(const ItemView& item, Scalar scale, Scalar factor, int thread) {
  WindowStaging how;
  const int first = item.first_taking_part(), h = first + 1 + thread / 32;
  bool far = first >= kH;
  if (!far && item.takes_part(h)) far = !look_at(item, first, h, thread % 32).near();
  if (!any_of_item(far)) {
    how.centre = first;
    for (int k = thread % 32; k < kK; k += 32) how.centre_mean += item.at(first, k);
#pragma unroll
    for (int flip = 16; flip > 0; flip /= 2) how.centre_mean += __shfl_xor_sync(0xffffffffu, how.centre_mean, flip);
    how.centre_mean /= Scalar(kK);
  }
  make_smaller(how, scale, factor, 0);
  return how;
}

// A block begins anew: `far` if a variate turned out not to be near the centre, `large` if numbers may be too large for
// fp16, of which then all blocks of the item find the same power of two.
__device__ inline void choose_again(
    WindowStaging& how, const ItemView& item, Scalar scale, Scalar factor, bool far, bool large, Scalar* room, int thread) {
  if (far) {
    how.centre = -1;
    how.centre_mean = 0;
  }
  if (far || large) make_smaller(how, scale, factor, large ? largest_of_item(largest_of_warp(item, thread), room) : Scalar(0));
}

// ---- scores

// The rows' operand of a warp: in registers where there is room for it, else read again for each tile.
struct StripRows {
  static constexpr int kKept = kRowsKept ? kStepsPadded / 16 : 1;
  const unsigned char* at;  // the lane's row of the first block
  Halves kept[kParts][kRowBlocks][kKept][4];

  __device__ explicit StripRows(const unsigned char* first) : at(first) {}
  __device__ const unsigned char* block(int part, int b, int k) const {
    return at + part * RowPlanes::kBytes + RowPlanes::at(16 * b, k);
  }
  __device__ void keep() {
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
};

// Scores of a warp's rows with N columns. APART: the two small products have sums of their own, so that <v_h, v_j> and
// <v_j, v_h> are the same to the last bit wherever a row meets a column, as for mma_scores.cuh's SYMMETRIC form.
template <int N, bool APART>
struct ScoreTile {
  static constexpr bool kApart = APART && kParts == 2;
  Scalar s[kRowBlocks][N / 8][4] = {};
  Scalar small[kApart ? 2 : 1][kApart ? kRowBlocks : 1][kApart ? N / 8 : 1][4] = {};

  // Adds `steps` steps, of which the rows' begin at row_step; `columns` is the lane's row of the first column block.
  template <bool TO_ONE = !kApart>
  __device__ void add(const StripRows& rows, int row_step, const unsigned char* columns, int steps) {
#pragma unroll(kRowsKept ? kStepsPadded / 16 : 1)
    for (int k = 0; k < (kOneChunk ? kStepsPadded : steps); k += 16) {
      Halves b[kParts][N / 16][4], a[kParts][kRowBlocks][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int t = 0; t < N / 16; ++t) {
          load_by_steps(b[part][t], columns + part * ColumnPlanes::kBytes + ColumnPlanes::at(16 * t, k));
        }
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
          if constexpr (kRowsKept) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[part][r][i] = rows.kept[part][r][k / 16][i];
          } else {
            load_by_steps(a[part][r], rows.block(part, r, row_step + k));
          }
        }
      }
      // The small products first: what they have to say is lost in a sum that is large already.
#pragma unroll
      for (int product = kProducts - 1; product >= 0; --product) {
        const int of_row = product == 1 ? 1 : 0, of_column = product == 2 ? 1 : 0;
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
          for (int t = 0; t < N / 8; ++t) {
            const Halves first = b[of_column][t / 2][t % 2 * 2], last = b[of_column][t / 2][t % 2 * 2 + 1];
            if constexpr (!TO_ONE) {
              multiply_add(product > 0 ? small[product > 0 ? product - 1 : 0][r][t] : s[r][t], a[of_row][r], first, last);
            } else {
              multiply_add(s[r][t], a[of_row][r], first, last);
            }
          }
        }
      }
    }
  }
  __device__ void finish() {
    if constexpr (kApart) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int t = 0; t < N / 8; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[r][t][i] += small[0][r][t][i] + small[1][r][t][i];
        }
      }
    }
  }
};
