#include "primitives.cuh"

// ---- hopper.cuh: the PTX of sm_90 (copies of any length, by one thread), with a body for the emulator ----

// Kernels of older GPUs may include this, and must not call it: `if constexpr (kBulkCopies)`.
#if !defined(__CUDACC__)
constexpr bool kBulkCopies = true;
#elif defined(__CUDA_ARCH__)
constexpr bool kBulkCopies = __CUDA_ARCH__ >= 900;
#else
constexpr bool kBulkCopies = false;
#endif

// An mbarrier in shared memory. Its phases are numbered from 0. A phase ends when as many threads as it was made for
// have come to barrier_expect, and when as many bytes as they said have been copied; the next one begins at once.
using Barrier = unsigned long long;

#ifdef __CUDACC__

// By one thread; the others may use the barrier after a __syncthreads.
__device__ inline void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(barrier)), "r"(arrivals) : "memory");
  // The unit that copies must see it too.
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// One thread's arrival, which lets the phase wait for `bytes` more.
__device__ inline void barrier_expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Begins a copy by the calling thread alone; both addresses and the length are multiples of 16. It is there for
// whoever has waited for the barrier's phase.
__device__ inline void copy_bulk(void* shared, const void* global, int bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes),
                 "r"(shared_address(barrier))
               : "memory");
}

// Waits for the end of the phase with this parity, the current one or the one before: n % 2 for phase n.
__device__ inline void barrier_wait(Barrier* barrier, int parity) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// What the thread has written to shared memory before is there for asynchronous accesses (copy_bulk) after it; for
// those of other threads after a barrier behind it.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

#else  // the emulator: the same, by its engine

__device__ inline void barrier_init(Barrier* barrier, int arrivals, EMULATOR_CALLER) {
  emulator::barrier_init({"barrier_init", file, line}, barrier, arrivals);
}
__device__ inline void barrier_expect(Barrier* barrier, int bytes, EMULATOR_CALLER) {
  emulator::barrier_expect({"barrier_expect", file, line}, barrier, bytes);
}
__device__ inline void copy_bulk(void* shared, const void* global, int bytes, Barrier* barrier, EMULATOR_CALLER) {
  emulator::copy_bulk({"copy_bulk", file, line}, shared, global, bytes, barrier);
}
__device__ inline void barrier_wait(Barrier* barrier, int parity, EMULATOR_CALLER) {
  emulator::barrier_wait({"barrier_wait", file, line}, barrier, parity);
}
__device__ inline void fence_async() {}

#endif
