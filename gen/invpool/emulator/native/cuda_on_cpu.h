// SPDX-License-Identifier: Apache-2.0
//
// cuda_on_cpu.h: the part of CUDA C++ that lets g++ compile a kernel as it is and run it on a CPU.
//
// Compile the .cu file with `g++ -x c++ -std=c++17 -include cuda_on_cpu.h` and link it with engine.cpp. Every CUDA
// thread is a fiber; a fiber runs until it meets a barrier or a warp operation, and the engine goes on with the
// next. Line numbers in messages are those of the .cu file.
//
//   modelled      threadIdx blockIdx blockDim gridDim warpSize, __shared__, block and warp barriers, shuffles, and
//                 the PTX of templates/include/primitives.cuh and hopper.cuh
//   needs a word  dynamic shared memory: DYNAMIC_SHARED(name); in place of `extern __shared__ ... name[];`,
//                 behind `#ifndef DYNAMIC_SHARED`, so that nvcc still gets the declaration
//   not modelled  anything else: it does not compile, which is better than running wrong
//
// A kernel that needs PTX (mma, ldmatrix, cp.async, ...) calls a wrapper with two bodies, PTX under
// __CUDA_ARCH__ and emulation here: see "PTX primitives" below.
#ifndef INVPOOL_CUDA_ON_CPU_H
#define INVPOOL_CUDA_ON_CPU_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <math.h>

// ---- specifiers. The toolkit's own headers leave alone what is defined already.

#define __global__ __attribute__((used))
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// A section of its own, so that the engine can poison all of it between blocks. g++ lets templates and other
// functions have no section in common, so each variable names another one; the part that differs is a comment to the
// assembler, which sees one and the same.
#ifdef __aarch64__
#define EMULATOR_COMMENT "//"
#else
#define EMULATOR_COMMENT "#"
#endif
#define EMULATOR_TEXT(number) #number
#define EMULATOR_SECTION(number) "emulated_shared,\"aw\",@progbits" EMULATOR_COMMENT EMULATOR_TEXT(number)
#define __shared__ static __attribute__((section(EMULATOR_SECTION(__COUNTER__))))
#define DYNAMIC_SHARED(name) unsigned char* const name = emulator::dynamic_shared()

namespace emulator {

// A thread's or a block's position, and the extent of a block or the grid.
struct Index {
  unsigned x, y, z;
};

// Where in the source a thread waits.
struct Place {
  const char* operation;
  const char* file;
  int line;
};

enum class Reduction { none, conjunction, disjunction, count };

// Returns when every thread of the block has come, with the reduction of their predicates.
int block_barrier(const Place& place, Reduction reduction, int predicate);
// Returns when every lane of the mask has come; orders their memory accesses.
void warp_barrier(const Place& place, unsigned mask);
// Returns `bits` as passed by lane `source` of the caller's warp, when every lane of the mask has come.
std::uint64_t warp_exchange(const Place& place, unsigned mask, std::uint64_t bits, unsigned source);
unsigned lane();
unsigned char* dynamic_shared();

// What the build `count` counts of floating-point arithmetic; see counted.h.
enum Operation { kFma, kAdd, kMultiply, kDivide, kExponential, kLogarithm, kExtremum, kMma, kOperations };
void count(Operation operation);

template <class T>
T shuffle(const Place& place, unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves at most 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = warp_exchange(place, mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

// ---- positions

extern __thread emulator::Index threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

// ---- barriers. The caller's file and line come in as default arguments.

#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_CALLER) {
  emulator::block_barrier({"__syncthreads", file, line}, emulator::Reduction::none, 0);
}
inline int __syncthreads_and(int predicate, EMULATOR_CALLER) {
  return emulator::block_barrier({"__syncthreads_and", file, line}, emulator::Reduction::conjunction, predicate);
}
inline int __syncthreads_or(int predicate, EMULATOR_CALLER) {
  return emulator::block_barrier({"__syncthreads_or", file, line}, emulator::Reduction::disjunction, predicate);
}
inline int __syncthreads_count(int predicate, EMULATOR_CALLER) {
  return emulator::block_barrier({"__syncthreads_count", file, line}, emulator::Reduction::count, predicate);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_CALLER) {
  emulator::warp_barrier({"__syncwarp", file, line}, mask);
}

// ---- shuffles. A source outside the segment of `width` lanes gives a thread its own value back.

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, EMULATOR_CALLER) {
  const unsigned base = emulator::lane() & ~unsigned(width - 1);
  return emulator::shuffle({"__shfl_sync", file, line}, mask, value, base | (unsigned(source) & unsigned(width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, EMULATOR_CALLER) {
  const unsigned own = emulator::lane();
  const bool inside = (own & unsigned(width - 1)) >= delta;
  return emulator::shuffle({"__shfl_up_sync", file, line}, mask, value, inside ? own - delta : own);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, EMULATOR_CALLER) {
  const unsigned own = emulator::lane();
  const bool inside = (own & unsigned(width - 1)) + delta < unsigned(width);
  return emulator::shuffle({"__shfl_down_sync", file, line}, mask, value, inside ? own + delta : own);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = warpSize, EMULATOR_CALLER) {
  const unsigned own = emulator::lane(), other = own ^ unsigned(flip);
  const bool inside = (other & ~unsigned(width - 1)) <= (own & ~unsigned(width - 1));
  return emulator::shuffle({"__shfl_xor_sync", file, line}, mask, value, inside ? other : own);
}

// ---- votes

inline int __any_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
  int any = 0;
  for (unsigned source = 0; source < unsigned(warpSize); ++source) {
    if (mask >> source & 1) any |= emulator::shuffle({"__any_sync", file, line}, mask, predicate != 0, source);
  }
  return any;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, EMULATOR_CALLER) {
  unsigned largest = 0;
  for (unsigned source = 0; source < unsigned(warpSize); ++source) {
    if (!(mask >> source & 1)) continue;
    const unsigned theirs = emulator::shuffle({"__reduce_max_sync", file, line}, mask, value, source);
    if (theirs > largest) largest = theirs;
  }
  return largest;
}

// ---- PTX primitives
//
// What the emulated bodies of templates/include/primitives.cuh call. A primitive that is not there yet gets its wrapper
// there, with PTX under __CUDACC__ and else a call of a function that is declared here and defined in engine.cpp.
// Accesses of memory are made here, in code that is compiled with the kernel: sanitizers and counters see them.

namespace emulator {

using Float = float;  // this one, also where counted.h gives the kernel another

// One row of an 8x8 matrix of 16-bit numbers, moved by one access; and narrower pieces of memory of any type.
typedef unsigned Row __attribute__((vector_size(16), may_alias));
typedef std::uint64_t Piece8 __attribute__((may_alias));
typedef std::uint32_t Piece4 __attribute__((may_alias));

unsigned pack_halves(Float low, Float high);
Float unpack_half(unsigned bits);  // of the low 16 bits
unsigned pack_bfloats(Float low, Float high);
Float fast_exp2(Float x);

// Faults unless `row` can be given to ldmatrix: 16 aligned bytes of shared memory.
void check_row(const Place& place, const void* row);
// Lane l gives row l % 8 of matrix l / 8; every lane takes two numbers of each matrix.
void exchange_rows(const Place& place, unsigned* m, const void* row, bool transposed);
unsigned transpose_matrix(const Place& place, unsigned m);
// d[4] = a[4] * b[2] (+ d), over a warp: mma.m16n8k16. d holds floats, counted or not.
void multiply_matrices(const Place& place, void* d, const unsigned* a, unsigned b0, unsigned b1, bool add);
// The same of bf16 numbers.
void multiply_bfloats(const Place& place, void* d, const unsigned* a, unsigned b0, unsigned b1, bool add);

inline void load_matrices(const Place& place, unsigned* m, const void* row, bool transposed) {
  check_row(place, row);
  const Row mine = *static_cast<const Row*>(row);
  exchange_rows(place, m, &mine, transposed);
}

// A copy under way: `bytes` have been read, and are written when their thread waits for them.
struct Copy {
  void* to;
  unsigned bytes;
  unsigned group;  // how many groups the thread had committed when it asked for the copy
  alignas(16) unsigned char content[16];
};

// Faults unless both are aligned to `bytes`, and the first lies in shared memory.
void check_copy(const Place& place, const void* shared, const void* global, unsigned bytes);
void begin_copy(void* shared, const void* content, unsigned bytes);
void commit_copies();
// The next copy of the calling thread that is in none of its `pending` newest groups; null when there is none.
const Copy* next_copy(const Place& place, unsigned pending);
void group_barrier(const Place& place, int name, int threads);

template <class Piece>
void move_piece(void* to, const void* from) {
  *static_cast<Piece*>(to) = *static_cast<const Piece*>(from);
}
inline void move_bytes(void* to, const void* from, unsigned bytes) {
  if (bytes == 16) return move_piece<Row>(to, from);
  if (bytes == 8) return move_piece<Piece8>(to, from);
  move_piece<Piece4>(to, from);
}

inline void copy_async(const Place& place, void* shared, const void* global, unsigned bytes) {
  check_copy(place, shared, global, bytes);
  alignas(16) unsigned char content[16], poison[16];
  move_bytes(content, global, bytes);
  begin_copy(shared, content, bytes);
  // From now on the hardware may write at any time: whoever reads before the wait reads NaN, and races with this.
  std::memset(poison, 0xff, sizeof poison);
  move_bytes(shared, poison, bytes);
}

// Writes what the copy has read, unseen by the counters: they have seen it where it was asked for.
void deliver(const Copy& copy);

inline void wait_copies(const Place& place, unsigned pending) {
  while (const Copy* copy = next_copy(place, pending)) {
#ifdef EMULATOR_COUNT
    deliver(*copy);
#else
    move_bytes(copy->to, copy->content, copy->bytes);
#endif
  }
}

// ---- barriers and bulk copies of sm_90: templates/include/hopper.cuh

constexpr std::uint64_t kBarrierContent = 0x5ba221e2ba221e25u;  // of an mbarrier; what it says is the engine's

// Each faults unless the barrier is one, which its content tells.
void check_barrier(const Place& place, const void* barrier);  // its address alone
std::uint64_t content_of(const void* barrier);  // unseen by the counters
void set_barrier(const Place& place, void* barrier, int arrivals);
void expect_bytes(const Place& place, void* barrier, std::uint64_t content, int bytes);
// Reads what is to be copied, and later lets the barrier know that all of it has been.
void begin_bulk(const Place& place, void* shared, const void* global, int bytes, void* barrier, std::uint64_t content);
void finish_bulk(const Place& place, int bytes, void* barrier);
// Returns when the phase has ended; false if the wait is ignored. Other threads' waits do not return until
// end_delivery.
bool wait_for_phase(const Place& place, void* barrier, std::uint64_t content, int parity);
struct BulkCopy {
  unsigned char* to;
  const unsigned char* content;
  unsigned bytes;
};
// The next copy of a phase that has ended, to be delivered by whoever waits for it first; false when there is none.
bool next_bulk(void* barrier, BulkCopy& copy);
void end_delivery(void* barrier, int parity);
// Both unseen by the counters.
void poison(void* shared, int bytes);
void deliver(const BulkCopy& copy);

inline std::uint64_t read_barrier(const Place& place, const void* barrier) {
  check_barrier(place, barrier);
#ifdef EMULATOR_COUNT
  return content_of(barrier);
#else
  return *static_cast<const Piece8*>(barrier);
#endif
}

inline void barrier_init(const Place& place, void* barrier, int arrivals) {
  check_barrier(place, barrier);
  set_barrier(place, barrier, arrivals);
#ifndef EMULATOR_COUNT
  *static_cast<Piece8*>(barrier) = kBarrierContent;
#endif
}

inline void barrier_expect(const Place& place, void* barrier, int bytes) {
  expect_bytes(place, barrier, read_barrier(place, barrier), bytes);
}

#ifdef EMULATOR_COUNT
extern "C" void __tsan_read_range(void* address, unsigned long bytes);
extern "C" void __tsan_write_range(void* address, unsigned long bytes);
#endif

inline void copy_bulk(const Place& place, void* shared, const void* global, int bytes, void* barrier) {
  begin_bulk(place, shared, global, bytes, barrier, read_barrier(place, barrier));
#ifdef EMULATOR_COUNT
  __tsan_read_range(const_cast<void*>(global), static_cast<unsigned long>(bytes));
  __tsan_write_range(shared, static_cast<unsigned long>(bytes));
  poison(shared, bytes);
#else
  // The engine has read it, unseen by sanitizers. What is read before the wait is NaN, as with copy_async.
  for (int i = 0; i < bytes / 16; ++i) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    const Row seen = static_cast<const Row*>(global)[i];
    asm volatile("" : : "m"(seen));
#endif
    static_cast<Row*>(shared)[i] = Row{~0u, ~0u, ~0u, ~0u};
  }
#endif
  finish_bulk(place, bytes, barrier);
}

inline void barrier_wait(const Place& place, void* barrier, int parity) {
  if (!wait_for_phase(place, barrier, read_barrier(place, barrier), parity)) return;
  for (BulkCopy copy; next_bulk(barrier, copy);) {
#ifdef EMULATOR_COUNT
    deliver(copy);
#else
    for (unsigned i = 0; i < copy.bytes; i += 16) move_piece<Row>(copy.to + i, copy.content + i);
#endif
  }
  end_delivery(barrier, parity);
}

// ---- products by a warpgroup, four warps: templates/include/hopper.cuh

struct GroupOperands {
  void* d;  // floats, counted or not
  unsigned columns;
  bool transposed, accumulate;
  std::uint64_t b;  // a descriptor
};

void fence_async();
std::uint64_t describe_matrix(const Place& place, const void* shared, int leading, int stride);
void group_fence();
void group_commit();
// Takes what the calling thread gives to a product, and makes d poison.
void begin_product(const Place& place, const GroupOperands& product, const unsigned* a);
// Of the rows of B that are the calling thread's to read: where the i-th is, null past the last; and its content.
const void* row_to_read(const Place& place, unsigned i);
void give_row(unsigned i, const void* content);
// Returns when what all but the newest `pending` groups give has been formed; false if the wait is ignored.
bool wait_for_products(const Place& place, unsigned pending);
struct Finished {
  void* d;  // null where a later product goes on with it
  const void* sums;
  unsigned bytes;
  const void* rows[2];  // null where there is none
};
// The next product that the calling thread has waited for; false when there is none.
bool next_product(const Place& place, Finished& product);

inline void group_multiply(const Place& place, const GroupOperands& product, const unsigned* a) {
  begin_product(place, product, a);
  for (unsigned i = 0; const void* row = row_to_read(place, i); ++i) {
    const Row content = *static_cast<const Row*>(row);
    give_row(i, &content);
  }
}

inline void group_wait(const Place& place, unsigned pending) {
  if (!wait_for_products(place, pending)) return;
  for (Finished product; next_product(place, product);) {
#if !defined(EMULATOR_COUNT) && (defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__))
    // The hardware may read as late as this.
    for (const void* row : product.rows) {
      if (!row) continue;
      const Row seen = *static_cast<const Row*>(row);
      asm volatile("" : : "m"(seen));
    }
#endif
    if (!product.d) continue;
    for (unsigned i = 0; i < product.bytes; i += 4) {
      move_piece<Piece4>(static_cast<char*>(product.d) + i, static_cast<const char*>(product.sums) + i);
    }
  }
}

}  // namespace emulator

// ---- counting floating-point operations

#ifdef EMULATOR_COUNT
#include "counted.h"
#endif

#endif  // INVPOOL_CUDA_ON_CPU_H
