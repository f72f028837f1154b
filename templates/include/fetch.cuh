// ---- fetch.cuh: an item on its way from DRAM to shared memory while another is computed ----

// Starts to copy the item as it lies; wait_copies and a barrier end it.
__device__ inline void fetch_item(const Element* item, unsigned char* room, int thread) {
  constexpr int kBytes = kH * kK * sizeof(Element);
  const auto* from = reinterpret_cast<const unsigned char*>(item);
  // A contiguous view may start at any element: the pointer is tested, not assumed.
  const auto address = reinterpret_cast<unsigned long long>(from);
  if (kBytes % 16 == 0 && address % 16 == 0) {
    constexpr int kStride = 16 * kItemThreads, kWhole = kBytes / kStride;
    room += 16 * thread;
    from += 16 * thread;
#pragma unroll 8
    for (int i = 0; i < kWhole; ++i) copy_async<16>(room + i * kStride, from + i * kStride);
    if (kBytes % kStride != 0 && 16 * thread < kBytes % kStride) copy_async<16>(room + kWhole * kStride, from + kWhole * kStride);
  } else if (kBytes % 4 == 0 && address % 4 == 0) {
    for (int at = 4 * thread; at < kBytes; at += 4 * kItemThreads) copy_async<4>(room + at, from + at);
  } else {
    auto* to = reinterpret_cast<Element*>(room);
    for (int at = thread; at < kH * kK; at += kItemThreads) to[at] = item[at];
  }
  commit_copies();
}
