// ---- fetch.cuh: an item on its way from DRAM to shared memory while another is computed ----

#include "hopper.cuh"

// Copies items as they lie, one after the other, into the same room. The threads of an item begin a copy behind a
// barrier after which nobody reads the item before; wait, and a barrier behind it, make it everybody's.
class Fetch {
 public:
  // A barrier of all threads must follow.
  __device__ Fetch(unsigned char* room, Barrier* arrived, int thread) : room_(room), arrived_(arrived) {
    if constexpr (kBulkCopies) {
      if (thread == 0) barrier_init(arrived, 1);
    }
  }

  __device__ void begin(const Element* item, int thread) {
    const auto* from = reinterpret_cast<const unsigned char*>(item);
    // A contiguous view may start at any element: the pointer is tested, not assumed.
    const auto address = reinterpret_cast<unsigned long long>(from);
    by_bulk_ = false;
    if (kBytes % 16 == 0 && address % 16 == 0) {
      if constexpr (kBulkCopies) {
        by_bulk_ = true;
        if (thread == 0) {
          fence_async();
          barrier_expect(arrived_, kBytes);
          copy_bulk(room_, from, kBytes, arrived_);
        }
      } else {
        for (int at = 16 * thread; at < kBytes; at += 16 * kItemThreads) copy_async<16>(room_ + at, from + at);
      }
    } else if (kBytes % 4 == 0 && address % 4 == 0) {
      for (int at = 4 * thread; at < kBytes; at += 4 * kItemThreads) copy_async<4>(room_ + at, from + at);
    } else {
      auto* to = reinterpret_cast<Element*>(room_);
      for (int at = thread; at < kH * kK; at += kItemThreads) to[at] = item[at];
    }
    commit_copies();
  }

  __device__ void wait() {
    if constexpr (kBulkCopies) {
      if (by_bulk_) {
        barrier_wait(arrived_, parity_);
        parity_ ^= 1;
        return;
      }
    }
    wait_copies<0>();
  }

 private:
  static constexpr int kBytes = kH * kK * sizeof(Element);
  unsigned char* room_;
  Barrier* arrived_;
  bool by_bulk_ = false;
  int parity_ = 0;
};

// For an item that nobody has room for: has it brought to L2, from where it comes sooner and faster than from DRAM.
__device__ inline void bring_near(const Element* item, int thread) {
  constexpr int kLine = 128 / sizeof(Element);
#pragma unroll 1
  for (int at = kLine * thread; at < kH * kK; at += kLine * kItemThreads) prefetch_line(item + at);
}
