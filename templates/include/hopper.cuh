#include "primitives.cuh"

// ---- hopper.cuh: the PTX of sm_90 (copies of any length, by one thread) and of sm_90a (products by four warps, of a
// matrix in shared memory), with a body for the emulator ----

// Kernels of older GPUs may include this, and must not call it: ptxas refuses what its target lacks.
#if !defined(__CUDACC__)
[[maybe_unused]] constexpr bool kBulkCopies = true;
#elif defined(__CUDA_ARCH__)
[[maybe_unused]] constexpr bool kBulkCopies = __CUDA_ARCH__ >= 900;
#else
[[maybe_unused]] constexpr bool kBulkCopies = false;
#endif

// An mbarrier in shared memory. Its phases are numbered from 0. A phase ends when as many threads as it was made for
// have come to barrier_expect, and when as many bytes as they said have been copied; the next one begins at once.
using Barrier = unsigned long long;

// B of 16xN in shared memory, k by column, is made of core matrices: 8 rows of 16 bytes, which follow each other. A row
// holds 8 k's of a column and the core matrix 8 columns (K-major); or, TRANSPOSED, a row holds 8 columns of a k and the
// core matrix 8 k's (MN-major). In both orders `leading` is the offset in bytes from the core matrices of the first 8
// k's to those of the next 8, and `stride` from those of 8 columns to those of the next 8:
//   K-major     B[k][n] at leading * (k / 8) + stride * (n / 8) + 16 * (n % 8) + 2 * (k % 8)
//   TRANSPOSED  B[k][n] at leading * (k / 8) + stride * (n / 8) + 16 * (k % 8) + 2 * (n % 8)
// Both are multiples of 16 below 2^18; so is the address. To move a descriptor by `bytes`, add bytes / 16.
using Descriptor = unsigned long long;

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

// What the thread has written to shared memory before is there for asynchronous accesses (copy_bulk, group_multiply)
// after it; for those of other threads after a barrier behind it.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

__device__ inline Descriptor describe(const void* shared, int leading, int stride) {
  return Descriptor((shared_address(shared) & 0x3ffffu) >> 4) | Descriptor((unsigned(leading) & 0x3ffffu) >> 4) << 16 |
         Descriptor((unsigned(stride) & 0x3ffffu) >> 4) << 32;
}

// All 128 threads of a warpgroup, four warps from a multiple of four on, do these together. Registers of a product are
// written any time until group_wait: nobody may touch d or a before. group_fence comes before the first product, and
// before one whose d or a has been touched since.
__device__ inline void group_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

// Makes a group of the products since the last one.
__device__ inline void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Waits for all groups but the newest PENDING.
template <int PENDING>
__device__ void group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
}

// Uses and changes all of d, as far as the compiler knows: it moves no access of them past this. For what is computed
// before group_fence, ahead of it; for what a product gives, behind group_wait.
template <int COUNT>
__device__ void keep_registers(Scalar (&d)[COUNT][4]) {
#pragma unroll
  for (int t = 0; t < COUNT; ++t) {
    asm volatile("" : "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3]) : : "memory");
  }
}

// The same for left operands, which products read meanwhile.
template <int COUNT>
__device__ void keep_registers(Halves (&a)[COUNT][4]) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3]) : : "memory");
  }
}

// The operands of a product of N columns: the numbers of d's, and d itself.
#define GROUP_D8 "%0, %1, %2, %3"
#define GROUP_D16 GROUP_D8 ", %4, %5, %6, %7"
#define GROUP_D32 GROUP_D16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GROUP_D64                                                                                 \
  GROUP_D32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GROUP_D96                                                                                 \
  GROUP_D64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define GROUP_D128                                                                                \
  GROUP_D96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GROUP_TILE(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define GROUP_TILES8 GROUP_TILE(0)
#define GROUP_TILES16 GROUP_TILES8, GROUP_TILE(1)
#define GROUP_TILES32 GROUP_TILES16, GROUP_TILE(2), GROUP_TILE(3)
#define GROUP_TILES64 GROUP_TILES32, GROUP_TILE(4), GROUP_TILE(5), GROUP_TILE(6), GROUP_TILE(7)
#define GROUP_TILES96 GROUP_TILES64, GROUP_TILE(8), GROUP_TILE(9), GROUP_TILE(10), GROUP_TILE(11)
#define GROUP_TILES128 GROUP_TILES96, GROUP_TILE(12), GROUP_TILE(13), GROUP_TILE(14), GROUP_TILE(15)
// `a0` and so on are the numbers of the operands behind d.
#define GROUP_MULTIPLY(n, a0, a1, a2, a3, at, accumulating, transposing)                                        \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #accumulating ", 0; wgmma.mma_async.sync.aligned.m64n" #n \
               "k16.f32.f16.f16 {" GROUP_D##n "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at             \
               ", add, 1, 1, %" #transposing "; }"                                                              \
               : GROUP_TILES##n                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(TRANSPOSED)))

// d += a * b, or d = a * b: 64 rows, of which each warp has 16, by N columns. a and the tiles of d are those of
// multiply_add.
template <int N, bool TRANSPOSED>
__device__ void group_multiply(Scalar (&d)[N / 8][4], const Halves (&a)[4], Descriptor b, bool accumulate) {
  static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 96 || N == 128, "add the operands of this N");
  if constexpr (N == 8) GROUP_MULTIPLY(8, 4, 5, 6, 7, 8, 9, 10);
  if constexpr (N == 16) GROUP_MULTIPLY(16, 8, 9, 10, 11, 12, 13, 14);
  if constexpr (N == 32) GROUP_MULTIPLY(32, 16, 17, 18, 19, 20, 21, 22);
  if constexpr (N == 64) GROUP_MULTIPLY(64, 32, 33, 34, 35, 36, 37, 38);
  if constexpr (N == 96) GROUP_MULTIPLY(96, 48, 49, 50, 51, 52, 53, 54);
  if constexpr (N == 128) GROUP_MULTIPLY(128, 64, 65, 66, 67, 68, 69, 70);
}

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
__device__ inline void fence_async() { emulator::fence_async(); }
__device__ inline Descriptor describe(const void* shared, int leading, int stride, EMULATOR_CALLER) {
  return emulator::describe_matrix({"describe", file, line}, shared, leading, stride);
}
__device__ inline void group_fence() { emulator::group_fence(); }
__device__ inline void group_commit() { emulator::group_commit(); }
template <int PENDING>
__device__ void group_wait(EMULATOR_CALLER) {
  emulator::group_wait({"group_wait", file, line}, PENDING);
}
template <int COUNT>
__device__ void keep_registers(Scalar (&)[COUNT][4]) {}
template <int COUNT>
__device__ void keep_registers(Halves (&)[COUNT][4]) {}
template <int N, bool TRANSPOSED>
__device__ void group_multiply(Scalar (&d)[N / 8][4], const Halves (&a)[4], Descriptor b, bool accumulate,
                               EMULATOR_CALLER) {
  static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 96 || N == 128, "add the operands of this N");
  emulator::group_multiply({"group_multiply", file, line}, {d, N, TRANSPOSED, accumulate, b}, a);
}

#endif
