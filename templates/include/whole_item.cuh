// ---- whole_item.cuh: an item on its way to planes in shared memory, as a whole ----

// What staging learns of one variate; sums over the steps.
struct Staged {
  Scalar sum;  // of x - c
  Scalar norm;  // of v * v
  Scalar with_centre;  // of (x - c) * c
  bool near;  // as far as the sampled elements say; the first variate is
};

// Packs that a lane has on their way before it uses the first: of one turn through the classes where they are in shared
// memory; of as many turns as 128 bytes hold where they come from DRAM, which answers late.
constexpr int kTurnBytes = kClasses * kStageWidth * static_cast<int>(sizeof(Element));
constexpr int kAllTurns = ((kVariateMajor ? kK / kStageWidth : kK) + 7) / 8;
constexpr int kTurns = kPrefetch || kTurnBytes >= 128 ? 1 : 128 / kTurnBytes < kAllTurns ? 128 / kTurnBytes : kAllTurns;

template <bool CENTRED>
struct Stager {
  const ItemView& item;
  int centre;
  bool aligned;  // a contiguous view may start at any element

  // COUNT packs, the i-th from `place(i)` on if it exists. All are on their way before the first is used: no load passes
  // the stores of the one before it.
  template <int COUNT, class Exists, class Place>
  __device__ void load(Pack<Element, kStageWidth> (&pack)[COUNT], Exists&& exists, Place&& place) const {
    if (kPrefetch || aligned) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (exists(i)) pack[i] = load_pack<kStageWidth>(item.x + place(i));
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
#pragma unroll
        for (int e = 0; e < kStageWidth; ++e) {
          if (exists(i)) pack[i].lane[e] = item.x[place(i) + e];
        }
      }
    }
  }
  // Whether an element of class i is one of those that tell normalised input apart: the first of every fourth pack of a
  // variate, or every eighth step.
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
  constexpr int kHeld = kTurns * kClasses;
  if constexpr (kVariateMajor) {
    // kStageLanes lanes share a variate and take turns along its packs.
    constexpr int kPacks = kK / kWidth;
    const int part = staged_part(thread);
#pragma unroll 1
    for (int first = 0; first < kH; first += kItemThreads / kStageLanes) {
      const int h = first + staged_row(thread), order = order_of(h);
      const Scalar own_factor = factor_of(h);
      ClassSums sum, with_centre;
      Nearness nearness;
      Scalar norm = 0;
      if (h < kH) {
#pragma unroll 1
        for (int turn = 0; turn < kPacks; turn += 8 * kTurns) {
          const auto index_of = [&](int i) { return turn + i * kStageLanes + part; };
          const auto exists = [&](int i) { return kPacks % (8 * kTurns) == 0 || index_of(i) < kPacks; };
          Pack<Element, kWidth> pack[kHeld];
          stager.load(pack, exists, [&](int i) { return h * kInputH + (index_of(i) ^ order) * kWidth; });
#pragma unroll
          for (int i = 0; i < kHeld; ++i) {
            const int k = (index_of(i) ^ order) * kWidth;
            if (!exists(i)) continue;
            if (!CENTRED && stager.samples(i, part)) nearness.add(to_scalar(pack[i].lane[0]), item.at(centre, k));
            Scalar v[kWidth];
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
              v[e] = stager.stage(
                  pack[i].lane[e], own_factor, h, k + e, sum.of_class[i % kClasses], norm, with_centre.of_class[i % kClasses]);
            }
            store_parts(planes + plane_at(h, k), v);
          }
        }
      }
#pragma unroll
      for (int flip = 16; flip > 0; flip /= 2) {
        if ((kPartFlips & flip) == 0) continue;
        norm += __shfl_xor_sync(0xffffffffu, norm, flip);
        if constexpr (!CENTRED) nearness.share(flip);
      }
      const Staged staged{
          sum.total(kPartFlips), norm, CENTRED ? with_centre.total(kPartFlips) : Scalar(0), nearness.near()};
      if (part == 0 && h < kH) keep(h, staged);
    }
  } else {
    // Neighbouring lanes take neighbouring packs of variates; kStageLanes of a warp share a pack and take turns along its
    // steps.
    constexpr int kAcross = 32 / kStageLanes, kFlips = 32 - kAcross;
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
        for (int turn = 0; turn < kK; turn += 8 * kTurns) {
          const auto step_of = [&](int i) {
            return turn + i / kClasses * 8 + ((i % kClasses * kStageLanes + part) ^ order);
          };
          const auto exists = [&](int i) { return kK % (8 * kTurns) == 0 || step_of(i) < kK; };
          Pack<Element, kWidth> pack[kHeld];
          stager.load(pack, exists, [&](int i) { return step_of(i) * kInputK + h; });
#pragma unroll
          for (int i = 0; i < kHeld; ++i) {
            const int k = step_of(i);
            if (!exists(i)) continue;
            Scalar v[kWidth];
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
              if (!CENTRED && stager.samples(i % kClasses, part)) {
                nearness[e].add(to_scalar(pack[i].lane[e]), item.at(centre, k));
              }
              v[e] = stager.stage(
                  pack[i].lane[e], own_factor[e], h + e, k, sum[e].of_class[i % kClasses], norm[e],
                  with_centre[e].of_class[i % kClasses]);
            }
            store_parts(planes + plane_at(h, k), v);
          }
        }
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
#pragma unroll
        for (int flip = 16; flip >= kAcross; flip /= 2) {
          norm[e] += __shfl_xor_sync(0xffffffffu, norm[e], flip);
          if constexpr (!CENTRED) nearness[e].share(flip);
        }
        const Staged staged{
            sum[e].total(kFlips), norm[e], CENTRED ? with_centre[e].total(kFlips) : Scalar(0), nearness[e].near()};
        if (part == 0 && h < kH) keep(h + e, staged);
      }
    }
  }
}

// ---- items that need more than the plain way

// A centred item has Z >= e^-norm only.
constexpr int kCentredNorm = 50;  // 35 * log2 e
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
