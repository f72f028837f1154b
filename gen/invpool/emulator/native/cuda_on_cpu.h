// SPDX-License-Identifier: Apache-2.0
//
// cuda_on_cpu.h: the part of CUDA C++ that lets g++ compile a kernel as it is and run it on a CPU.
//
// Compile the .cu file with `g++ -x c++ -std=c++17 -include cuda_on_cpu.h` and link it with engine.cpp. Every CUDA
// thread is a fiber; a fiber runs until it meets a barrier or a warp operation, and the engine goes on with the
// next. Line numbers in messages are those of the .cu file.
//
//   modelled      threadIdx blockIdx blockDim gridDim warpSize, __shared__, block and warp barriers, shuffles
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
enum Operation { kFma, kAdd, kMultiply, kDivide, kExponential, kLogarithm, kExtremum, kOperations };
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

// ---- PTX primitives
//
// None yet: no kernel uses one. The first that does puts its wrapper into templates/include/primitives.cuh, with
// the emulated body calling a function declared here and defined in engine.cpp; a copy that is waited for later
// (cp.async, bulk copies) is delivered at the wait, not before, so that a read too early shows.

// ---- counting floating-point operations

#ifdef EMULATOR_COUNT
#include "counted.h"
#endif

#endif  // INVPOOL_CUDA_ON_CPU_H
