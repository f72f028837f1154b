// ---- fetch.cuh: an item on its way from DRAM to shared memory while another is computed ----

// Starts to copy the item as it lies; wait_copies and a barrier end it.
__device__ inline void fetch_item(const Element* item, unsigned char* room, int thread) {
  constexpr int kBytes = kH * kK * sizeof(Element);
  const auto* from = reinterpret_cast<const unsigned char*>(item);
  // A contiguous view may start at any element: the pointer is tested, not assumed.
  const auto address = reinterpret_cast<unsigned long long>(from);
  if (kBytes % 16 == 0 && address % 16 == 0) {
    for (int at = 16 * thread; at < kBytes; at += 16 * kItemThreads) copy_async<16>(room + at, from + at);
  } else if (kBytes % 4 == 0 && address % 4 == 0) {
    for (int at = 4 * thread; at < kBytes; at += 4 * kItemThreads) copy_async<4>(room + at, from + at);
  } else {
    auto* to = reinterpret_cast<Element*>(room);
    for (int at = thread; at < kH * kK; at += kItemThreads) to[at] = item[at];
  }
  commit_copies();
}
