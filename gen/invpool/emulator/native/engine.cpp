// SPDX-License-Identifier: Apache-2.0
//
// engine.cpp: runs a kernel block by block, each CUDA thread as a fiber (or, as a cross-check, a std::thread).
//
// Compiled without sanitizers even where the kernel has them: the engine's own bookkeeping is nothing they should
// watch. It tells them about its fibers and barriers instead, by EMULATOR_ASAN and EMULATOR_TSAN. A switch between
// fibers orders no memory for ThreadSanitizer; only barriers do, so a missing one is seen whatever ran first.

#include "engine.h"

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#ifdef EMULATOR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_UCONTEXT
#endif
#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

__thread emulator::Index threadIdx, blockIdx, blockDim, gridDim;

// What the linker makes of the kernel's __shared__ variables; null where it has none.
extern "C" {
extern unsigned char __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
}

namespace emulator {
namespace {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStackBytes = std::size_t(256) << 10;
constexpr std::size_t kGuardBytes = std::size_t(64) << 10;  // a page on every CPU that Linux runs on
constexpr unsigned kPoison = 0xff;  // NaN in every floating-point type, when all bytes are so
// What a product gives that is not a number. A GPU's own is 0x7fffffff, of which a minus sign would make poison here;
// there every sum and product makes it the same again.
constexpr unsigned kNotANumber = 0x7fc00000u;
constexpr std::size_t kMostArguments = 32;
constexpr unsigned kGroups = 16;  // named barriers; the first is that of __syncthreads
constexpr unsigned kWarpgroup = 128;
constexpr unsigned kMostColumns = 128;  // of a product by a warpgroup
constexpr unsigned kMostProducts = 128;  // under way, of a warpgroup
// Of what registers hold while a product is to write them. A signalling NaN: arithmetic makes a quiet one of it, which
// shows that they have been touched.
constexpr std::uint32_t kUnderWay = 0xffbfffffu;
constexpr unsigned kMostBarriers = 64;  // in shared memory
constexpr unsigned kMostBulkCopies = 1024;  // under way, of a barrier
constexpr int kMostTransactions = (1 << 20) - 1;  // bytes, or arrivals, of one phase: the hardware counts no further
constexpr std::chrono::seconds kPatience{60};  // of the cross-check

// ---- contexts: where a fiber goes on

#ifdef EMULATOR_UCONTEXT
struct Context {
  ucontext_t state;
};
void start_context(Context& context, unsigned char* stack, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = kStackBytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}
void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
#else
struct Context {
  void* stack_pointer;
};
extern "C" void emulator_switch(void** from, void* to);
// The System V ABI lets a call destroy all but these six registers and the stack pointer.
asm(R"(
  .text
  .hidden emulator_switch
  .globl  emulator_switch
  .type   emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq  %rsp, (%rdi)
  movq  %rsi, %rsp
  popq  %r15
  popq  %r14
  popq  %r13
  popq  %r12
  popq  %rbx
  popq  %rbp
  ret
  .size   emulator_switch, .-emulator_switch
)");
void start_context(Context& context, unsigned char* stack, void (*entry)()) {
  // Six registers, the address to return to, and a zero where the entry's caller would be (16-byte alignment).
  void** top = reinterpret_cast<void**>(stack + kStackBytes) - 2;
  top[0] = reinterpret_cast<void*>(entry);
  top[1] = nullptr;
  std::fill(top - 6, top, nullptr);
  context.stack_pointer = top - 6;
}
void switch_context(Context& from, Context& to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }
#endif

// ---- one launch

enum class State {
  ready,
  at_block_barrier,
  at_group_barrier,
  at_phase,
  at_warp_operation,
  at_warpgroup_operation,
  done,
};

struct Matrices;  // what the lanes of a warp give to each other
using Combine = void (*)(Matrices&);

struct Fiber {
  Context context;
  unsigned char* stack = nullptr;
  State state = State::ready;
  Place place{};
  Reduction reduction{};
  int predicate = 0;
  unsigned mask = 0;
  unsigned source = 0;  // the lane that a shuffle takes from
  std::uint64_t bits = 0;  // what it gives
  std::uint64_t received = 0;
  Combine combine = nullptr;  // of a warp operation on matrices
  unsigned group_name = 0, group_threads = 0;  // of a named barrier
  unsigned barrier = 0;  // the number of one in shared memory
  int parity = 0;  // of its phase that the thread waits for
  std::uint64_t products = 0;  // how many, from the first, are to have been formed
#ifdef EMULATOR_ASAN
  void* fake_stack = nullptr;
#endif
#ifdef EMULATOR_TSAN
  void* tsan = nullptr;
#endif
};

struct SynchronisationPoint {
  Place place;
  std::uint64_t executions;  // by blocks or, for warp operations, by warps
};

struct Random {  // splitmix64
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    // The high half of a product, since a remainder takes as long as a switch of fibers.
    for (std::size_t left = items.size(); left > 1; --left) {
      std::swap(items[left - 1], items[static_cast<std::size_t>(static_cast<unsigned __int128>(next()) * left >> 64)]);
    }
  }
};

struct ThreadBlock;

struct BulkUnderWay {
  BulkCopy copy;
  std::uint64_t phase;
  Place place;
  unsigned thread;
};

// A barrier in shared memory. Its arrays are as long as they can be: a fiber must not free what another one has made,
// or ThreadSanitizer sees a race.
struct PhaseBarrier {
  std::uintptr_t address;
  unsigned arrivals, arrived;
  std::uint64_t phase;
  std::int64_t expected, copied;  // bytes, in this phase
  char sync[2];  // of phases in turn
  unsigned first, under_way;  // in a ring
  BulkUnderWay copies[kMostBulkCopies];

  BulkUnderWay& copy(unsigned i) { return copies[(first + i) % kMostBulkCopies]; }
};

// A product by a warpgroup: what its threads have given, and what they take.
struct GroupProduct {
  Place place;
  GroupOperands product;  // but for d, the same for all
  unsigned group;
  unsigned given;  // by how many threads
  void* d[kWarpgroup];
  const GroupProduct* before[kWarpgroup];  // the one under way whose sums this one goes on with
  unsigned a[kWarpgroup][4];
  alignas(16) std::uint16_t b[2 * kMostColumns][8];  // row by row, as in shared memory
  float sums[kWarpgroup][kMostColumns / 2];
};

// The products of one thread, numbered from 0.
struct Products {
  std::uint64_t begun, waited, taken;
  unsigned groups;  // committed
  bool fenced;
};

// The products of a warpgroup in a ring; a thread may be as far ahead of another as there can be under way. When none
// is under way, another ring begins, while some threads still take from the one before: few are in use, and in cache.
struct Warpgroup {
  GroupProduct rings[2][2 * kMostProducts];
  std::uint64_t first[2];  // of each ring
  unsigned ring;
  std::uint64_t formed;
  bool used;

  GroupProduct& product(std::uint64_t number) {
    const unsigned which = number < first[ring] ? 1 - ring : ring;
    return rings[which][(number - first[which]) % (2 * kMostProducts)];
  }
};

// The asynchronous copies of one thread, oldest first.
struct Copies {
  std::vector<Copy> all;
  std::size_t delivered = 0;
  unsigned groups = 0;  // committed
};

// What a thread throws that cannot go on; the kernel catches nothing.
struct Fault {};

const Launch* launch;
const Argument* arguments;
void (*kernel)();
unsigned block_threads;
unsigned char* dynamic;
std::vector<SynchronisationPoint> points;
std::mutex points_guard;  // the threads of the cross-check meet here; fibers never do
std::vector<Fiber> fibers;
Context scheduler;
int reduced;  // what the last block barrier returns
unsigned block_generation;
std::vector<unsigned> warp_generation;
unsigned group_generation[kGroups];
std::vector<Copies> copies;  // of each thread
PhaseBarrier phase_barriers[kMostBarriers];
unsigned phase_barrier_count;
std::mutex phase_barriers_guard;  // in the cross-check
std::condition_variable phase_barriers_changed;
bool given_up;  // one of its threads was stopped: nobody need wait for it
// What bulk copies under way have read, each at its place in shared memory. Not freed: nothing orders the end of the
// process behind fibers that have stalled, and ThreadSanitizer would see a race.
auto& dynamic_shadow = *new std::vector<unsigned char>;
auto& static_shadow = *new std::vector<unsigned char>;
std::vector<Products> products;  // of each thread
Warpgroup* warpgroups;  // those of a block; made by the first launch that needs as many
unsigned warpgroups_made;
std::mutex products_guard;  // in the cross-check
std::string fault_text;  // why a thread was stopped
thread_local unsigned current;
thread_local ThreadBlock* on_threads = nullptr;

// Addresses that stand for barriers. Two each in turn: a thread that is late to leave one barrier must not be
// ordered behind what others did on their way to the next.
char block_barrier_sync[2];
char group_barrier_sync[kGroups][2];
std::vector<char> warp_barrier_sync;
// Not one address for both: a thread that starts late must not be ordered behind one that has ended.
char block_start_sync, block_end_sync;
#ifdef EMULATOR_ASAN
const void* scheduler_stack;
std::size_t scheduler_stack_bytes;
#endif
#ifdef EMULATOR_TSAN
void* scheduler_tsan;
#endif

void sync_release([[maybe_unused]] char* address) {
#ifdef EMULATOR_TSAN
  __tsan_release(address);
#endif
}
void sync_acquire([[maybe_unused]] char* address) {
#ifdef EMULATOR_TSAN
  __tsan_acquire(address);
#endif
}

bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }
bool same_place(const Place& a, const Place& b) {
  return a.line == b.line && same_text(a.operation, b.operation) && same_text(a.file, b.file);
}

void record(const Place& place, unsigned executions) {
  const std::lock_guard<std::mutex> guard(points_guard);
  auto point = std::find_if(points.begin(), points.end(), [&](const auto& p) { return same_place(p.place, place); });
  if (point == points.end()) point = points.insert(points.end(), {place, 0});
  point->executions += executions;
}

void poison(unsigned char* from, const unsigned char* to) {
  // Volatile: no call of memset, which sanitizers would watch.
  for (volatile unsigned char* byte = from; byte != to; ++byte) *byte = kPoison;
}

// Copies whole rows, also without a call that sanitizers would watch.
void copy_rows(void* to, const void* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes / sizeof(Row); ++i) {
    static_cast<Row*>(to)[i] = static_cast<const Row*>(from)[i];
    asm volatile("" : : : "memory");
  }
}

void poison_shared() {
  poison(dynamic, dynamic + launch->shared_bytes);
  if (__start_emulated_shared) poison(__start_emulated_shared, __stop_emulated_shared);
}

template <std::size_t... I>
void call_with(std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype(static_cast<void>(I), std::uint64_t())...)>(kernel)(arguments[I].value...);
}
template <std::size_t N = 0>
void call_kernel() {
  if constexpr (N <= kMostArguments) {
    if (launch->argument_count == N) {
      call_with(std::make_index_sequence<N>());
    } else {
      call_kernel<N + 1>();
    }
  }
}

std::string describe(const Place& place) {
  return std::string(place.operation) + " at " + place.file + ":" + std::to_string(place.line);
}

// Ends the calling thread, and with it the launch.
[[noreturn]] void stop(const Place& place, const std::string& why) {
  {
    const std::lock_guard<std::mutex> guard(points_guard);
    if (fault_text.empty()) {
      const Index& block = blockIdx;
      fault_text = "thread " + std::to_string(current) + " of block " +
                   std::to_string(block.x + launch->grid.x * (block.y + std::uint64_t(launch->grid.y) * block.z)) +
                   " was stopped in " + describe(place) + ": " + why;
    }
  }
  throw Fault();
}

Index position(std::uint64_t number, const Index& extent) {
  return {unsigned(number % extent.x), unsigned(number / extent.x % extent.y),
          unsigned(number / extent.x / extent.y)};
}

// ---- matrices of 16-bit numbers, as the lanes of a warp hold them

struct Lane {
  unsigned words[6];  // a row; or four registers of A and two of B
  float sums[4];  // C
};

// Lanes give before they wait; what they take is formed once all have given.
struct Matrices {
  Lane given[kWarp], taken[kWarp];
};

std::vector<Matrices> matrices;  // of each warp

// Vectors as wide as the registers of any CPU with four floats; g++ spills wider ones.
typedef std::uint32_t Word4 __attribute__((vector_size(16)));
typedef float Float4 __attribute__((vector_size(16)));
typedef double Double2 __attribute__((vector_size(16)));

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// fp16's bits put where those of a float are make a float 2^112 too small, infinities and NaN apart.
float from_half(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t(half & 0x8000u) << 16, rest = half & 0x7fffu;
  const float size = rest >= 0x7c00u ? float_of(rest << 13 | 0x7f800000u) : float_of(rest << 13) * 0x1p112f;
  return float_of(sign | bits_of(size));
}
// Eight of them.
void from_halves(const std::uint16_t* halves, void* doubles) {
  double values[8];
  for (unsigned i = 0; i < 8; i += 4) {
    const Word4 bits = {halves[i], halves[i + 1], halves[i + 2], halves[i + 3]};
    const Word4 rest = (bits & 0x7fffu) << 13;
    const Word4 scaled = reinterpret_cast<Word4>(reinterpret_cast<Float4>(rest) * 0x1p112f);
    const Word4 special = reinterpret_cast<Word4>(rest >= (0x7c00u << 13));
    const Word4 size = (special & (rest | 0x7f800000u)) | (~special & scaled);
    const Float4 floats = reinterpret_cast<Float4>(size | (bits & 0x8000u) << 16);
    for (unsigned j = 0; j < 4; ++j) values[i + j] = floats[j];
  }
  std::memcpy(doubles, values, sizeof values);
}

// The same of bf16 numbers, which are the upper halves of floats.
void from_bfloats(const std::uint16_t* bfloats, void* doubles) {
  double values[8];
  for (unsigned i = 0; i < 8; ++i) values[i] = float_of(std::uint32_t(bfloats[i]) << 16);
  std::memcpy(doubles, values, sizeof values);
}

// To the nearest, ties to even; NaN loses its payload, as in PTX.
unsigned to_bfloat(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
unsigned to_half(float value) {
  std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return 0x7fffu;
  if (bits >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
  // Below fp16's normal numbers: 0.5f has their last place, so adding it rounds there.
  if (bits < 0x38800000u) return sign | (bits_of(float_of(bits) + 0.5f) - 0x3f000000u);
  bits += 0xfffu + (bits >> 13 & 1);
  return sign | ((bits >> 13) - (112u << 10));
}

// Lane l takes numbers 2 * (l % 4) and the next of row l / 4 of each of the four matrices.
void give_rows(Matrices& warp) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    for (unsigned i = 0; i < 4; ++i) warp.taken[lane].words[i] = warp.given[8 * i + lane / 4].words[lane % 4];
  }
}

// The number in an even or an odd column, of the two that a word holds.
unsigned number_of(unsigned word, unsigned column) { return word >> 16 * (column % 2) & 0xffffu; }

// The same of the transposed matrices.
void give_columns(Matrices& warp) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    const unsigned column = lane / 4, row = 2 * (lane % 4);
    for (unsigned i = 0; i < 4; ++i) {
      const Lane* rows = warp.given + 8 * i;
      warp.taken[lane].words[i] = number_of(rows[row].words[column / 2], column) |
                                  number_of(rows[row + 1].words[column / 2], column) << 16;
    }
  }
}

void transpose(Matrices& warp) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    const unsigned column = lane / 4, row = 2 * (lane % 4);
    warp.taken[lane].words[0] = number_of(warp.given[4 * row + column / 2].words[0], column) |
                                number_of(warp.given[4 * (row + 1) + column / 2].words[0], column) << 16;
  }
}

// A sum of products as tensor cores give it: what does not fit is cut off, and never rounded up.
float cut(double sum) {
  const auto nearest = static_cast<float>(sum);
  if (std::isnan(nearest)) return float_of(kNotANumber);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
}

// mma.m16n8k16: products and sums in double, where both are all but exact, and then cut off. The hardware aligns the
// products to the largest and cuts off what is some bits below: near enough.
template <void CONVERT(const std::uint16_t*, void*)>
void multiply(Matrices& warp) {
  alignas(16) std::uint16_t a[16][16], b[16][8];
  alignas(64) double sums[16][8];
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    const Lane& given = warp.given[lane];
    const unsigned group = lane / 4, pair = 2 * (lane % 4);
    std::memcpy(&a[group][pair], &given.words[0], 4);
    std::memcpy(&a[group + 8][pair], &given.words[1], 4);
    std::memcpy(&a[group][pair + 8], &given.words[2], 4);
    std::memcpy(&a[group + 8][pair + 8], &given.words[3], 4);
    for (unsigned i = 0; i < 2; ++i) {
      b[pair + 8 * i][group] = static_cast<std::uint16_t>(given.words[4 + i]);
      b[pair + 8 * i + 1][group] = static_cast<std::uint16_t>(given.words[4 + i] >> 16);
      sums[group][pair + i] = given.sums[i];
      sums[group + 8][pair + i] = given.sums[2 + i];
    }
  }
  alignas(64) double left[16][16];
  Double2 right[16][4];
  for (unsigned k = 0; k < 16; ++k) CONVERT(b[k], right[k]);
  for (unsigned row = 0; row < 16; ++row) {
    CONVERT(a[row], left[row]);
    CONVERT(a[row] + 8, left[row] + 8);
  }
  for (unsigned row = 0; row < 16; ++row) {
    Double2 sum[4];
    std::memcpy(sum, sums[row], sizeof sum);
#pragma GCC unroll 4
    for (unsigned k = 0; k < 16; ++k) {
#pragma GCC unroll 4
      for (unsigned i = 0; i < 4; ++i) sum[i] += left[row][k] * right[k][i];
    }
    std::memcpy(sums[row], sum, sizeof sum);
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    const unsigned group = lane / 4, pair = 2 * (lane % 4);
    for (unsigned i = 0; i < 4; ++i) {
      warp.taken[lane].words[i] = bits_of(cut(sums[group + 8 * (i / 2)][pair + i % 2]));
    }
  }
}

// What wgmma.mma_async of m64nNk16 gives, in the same way.
void multiply(GroupProduct& one) {
  const unsigned columns = one.product.columns;
  alignas(16) std::uint16_t halves[16][kMostColumns];
  for (unsigned row = 0; row < 2 * columns; ++row) {
    const unsigned core = row / 8, k = core % 2 * 8, column = core / 2 * 8;
    for (unsigned i = 0; i < 8; ++i) {
      if (one.product.transposed) {
        halves[k + row % 8][column + i] = one.b[row][i];
      } else {
        halves[k + i][column + row % 8] = one.b[row][i];
      }
    }
  }
  Double2 right[kMostColumns / 8][16][4];
  for (unsigned tile = 0; tile < columns / 8; ++tile) {
    for (unsigned k = 0; k < 16; ++k) from_halves(&halves[k][8 * tile], right[tile][k]);
  }
  for (unsigned warp = 0; warp < kWarpgroup / kWarp; ++warp) {
    alignas(16) std::uint16_t a[16][16];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      for (unsigned i = 0; i < 4; ++i) {
        std::memcpy(&a[lane / 4 + i % 2 * 8][2 * (lane % 4) + i / 2 * 8], &one.a[kWarp * warp + lane][i], 4);
      }
    }
    for (unsigned row = 0; row < 16; ++row) {
      alignas(64) double left[16];
      from_halves(a[row], left);
      from_halves(a[row] + 8, left + 8);
      for (unsigned tile = 0; tile < columns / 8; ++tile) {
        Double2 sum[4];
        float* mine[4];
        for (unsigned i = 0; i < 4; ++i) {
          const unsigned thread = kWarp * warp + row % 8 * 4 + i, first = 4 * tile + row / 8 * 2;
          mine[i] = &one.sums[thread][first];
          const GroupProduct* before = one.before[thread];
          const float* c = before ? &before->sums[thread][first] : mine[i];
          sum[i] = one.product.accumulate ? Double2{c[0], c[1]} : Double2{};
        }
#pragma GCC unroll 16
        for (unsigned k = 0; k < 16; ++k) {
#pragma GCC unroll 4
          for (unsigned i = 0; i < 4; ++i) sum[i] += left[k] * right[tile][k][i];
        }
        for (unsigned i = 0; i < 4; ++i) {
          for (unsigned j = 0; j < 2; ++j) {
            mine[i][j] = cut(sum[i][j]);
          }
        }
      }
    }
  }
}

// Forms the products before number `count`, which all threads of the warpgroup, `base` and so on, wait for.
void form_products(unsigned base, std::uint64_t count) {
  Warpgroup& warpgroup = warpgroups[base / kWarpgroup];
  for (; warpgroup.formed < count; ++warpgroup.formed) multiply(warpgroup.product(warpgroup.formed));
  const auto first = products.begin() + base;
  if (std::all_of(first, first + kWarpgroup, [&](const Products& one) { return one.begun == count; })) {
    warpgroup.ring = 1 - warpgroup.ring;
    warpgroup.first[warpgroup.ring] = count;
  }
}

// ---- fibers

void to_scheduler() {
  Fiber& self = fibers[current];
#ifdef EMULATOR_ASAN
  __sanitizer_start_switch_fiber(&self.fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
#ifdef EMULATOR_TSAN
  __tsan_switch_to_fiber(scheduler_tsan, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(self.context, scheduler);
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(self.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

void run_fiber(unsigned thread) {
  Fiber& fiber = fibers[thread];
  current = thread;
  threadIdx = position(thread, launch->block);
#ifdef EMULATOR_ASAN
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack, kStackBytes);
#endif
#ifdef EMULATOR_TSAN
  __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(scheduler, fiber.context);
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

// A fiber's life: one block after the other.
void fiber_main() {
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  for (;;) {
    sync_acquire(&block_start_sync);
    try {
      call_kernel();
    } catch (const Fault&) {
    }
    sync_release(&block_end_sync);
    fibers[current].state = State::done;
    to_scheduler();
  }
}

// The stacks of a launch's fibers, gone with it: every kernel of a process has an engine of its own, and the
// system grants a process only so many mappings.
class Stacks {
 public:
  explicit Stacks(unsigned count) : bytes_(std::size_t(count) * kStride) {
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<unsigned char*>(memory);
    // A stack that overflows must not run into its neighbour.
    for (unsigned i = 0; i < count; ++i) mprotect(memory_ + i * kStride, kGuardBytes, PROT_NONE);
  }
  ~Stacks() { munmap(memory_, bytes_); }
  Stacks(const Stacks&) = delete;
  unsigned char* operator[](unsigned i) const { return memory_ + i * kStride + kGuardBytes; }

 private:
  static constexpr std::size_t kStride = kGuardBytes + kStackBytes;
  std::size_t bytes_;
  unsigned char* memory_;
};

void make_fibers(const Stacks& stacks) {
  fibers.assign(block_threads, {});
  for (unsigned t = 0; t < block_threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.stack = stacks[t];
#ifdef EMULATOR_TSAN
    fiber.tsan = __tsan_create_fiber(0);
    char name[32];
    std::snprintf(name, sizeof name, "CUDA thread %u", t);
    __tsan_set_fiber_name(fiber.tsan, name);
#endif
    start_context(fiber.context, fiber.stack, fiber_main);
  }
}

// ---- faults of the processor. A kernel that reads a wild pointer, or a vector that is not aligned, must not take
// the host's process along; sanitizers have handlers of their own, which say more.

volatile sig_atomic_t faulted;  // the signal that ended a fiber

#if !defined(EMULATOR_ASAN) && !defined(EMULATOR_TSAN)
constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

void leave_fiber(int signal) {
  faulted = signal;
  switch_context(fibers[current].context, scheduler);  // for good
}

// Catches faults as long as it lives. The handler has a stack of its own: a fiber's may be what has run out.
class FaultGuard {
 public:
  FaultGuard() : memory_(new unsigned char[kStackBytes]) {
    stack_t stack{};
    stack.ss_sp = memory_.get();
    stack.ss_size = kStackBytes;
    sigaltstack(&stack, &stack_before_);
    struct sigaction action {};
    action.sa_handler = leave_fiber;
    action.sa_flags = SA_ONSTACK | SA_NODEFER;  // the handler does not return, so nothing would unblock the signal
    for (std::size_t i = 0; i < std::size(kFaults); ++i) sigaction(kFaults[i], &action, &before_[i]);
  }
  ~FaultGuard() {
    for (std::size_t i = 0; i < std::size(kFaults); ++i) sigaction(kFaults[i], &before_[i], nullptr);
    sigaltstack(&stack_before_, nullptr);
  }

 private:
  std::unique_ptr<unsigned char[]> memory_;
  stack_t stack_before_{};
  struct sigaction before_[std::size(kFaults)];
};
#else
struct FaultGuard {};
#endif

// ---- what stops a block

std::string describe_threads(const std::vector<unsigned>& threads) {
  std::string text = threads.size() == 1 ? "thread " : "threads ";
  for (std::size_t first = 0; first < threads.size();) {
    std::size_t last = first;
    while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) ++last;
    if (first) text += ", ";
    text += std::to_string(threads[first]);
    if (last > first) text += "-" + std::to_string(threads[last]);
    first = last + 1;
  }
  return text;
}

// Why a barrier in shared memory keeps a thread waiting.
std::string describe_phase(const PhaseBarrier& barrier, int parity) {
  return " for parity " + std::to_string(parity) + ", in phase " + std::to_string(barrier.phase) + ": " +
         std::to_string(barrier.arrived) + " of " + std::to_string(barrier.arrivals) + " arrivals, " +
         std::to_string(barrier.expected) + " bytes expected, " + std::to_string(barrier.copied) + " copied";
}

// Everything that keeps the block from going on, one line a group of threads.
std::string explain_stall(std::uint64_t block) {
  std::vector<std::pair<std::string, std::vector<unsigned>>> groups;
  bool returned = false, in_warp = false, in_group = false, in_phase = false, in_warpgroup = false,
       disagree = false;
  unsigned group_threads[kGroups] = {};
  for (unsigned t = 0; t < block_threads; ++t) {
    const Fiber& fiber = fibers[t];
    std::string what = "returned";
    if (fiber.state == State::done) {
      returned = true;
    } else {
      const bool in = fiber.state == State::at_warp_operation || fiber.state == State::at_warpgroup_operation;
      what = (in ? "wait in " : "wait at ") + describe(fiber.place);
      in_warpgroup |= fiber.state == State::at_warpgroup_operation;
      in_warp |= fiber.state == State::at_warp_operation;
      if (fiber.state == State::at_group_barrier) {
        in_group = true;
        unsigned& threads = group_threads[fiber.group_name];
        disagree |= threads && threads != fiber.group_threads;
        threads = fiber.group_threads;
        what += ", number " + std::to_string(fiber.group_name) + ", for " + std::to_string(fiber.group_threads) +
                " threads";
      }
      if (fiber.state == State::at_phase) {
        in_phase = true;
        what += describe_phase(phase_barriers[fiber.barrier], fiber.parity);
      }
      if (fiber.state == State::at_warp_operation) {
        char mask[32];
        std::snprintf(mask, sizeof mask, " with mask 0x%08x", fiber.mask);
        what += mask;
      }
    }
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == what; });
    if (group == groups.end()) group = groups.insert(groups.end(), {what, {}});
    group->second.push_back(t);
  }
  std::string text = in_phase   ? "a barrier in shared memory does not end the phase that is waited for"
                     : in_warpgroup ? "a wait for products was not reached by all 128 threads of its warpgroup"
                     : in_warp  ? "a warp operation was not reached by all lanes of its mask"
                     : disagree ? "threads disagree on how many a named barrier waits for"
                     : in_group ? "a named barrier was not reached by exactly the threads that it waits for"
                     : returned ? "part of the block returned before a barrier"
                                : "the block diverged: its threads wait at different barriers";
  text += " (block " + std::to_string(block) + ")";
  for (const auto& [what, threads] : groups) text += "\n  " + describe_threads(threads) + ": " + what;
  return text;
}

// Lets the warps go on whose operation is complete. Returns whether any did.
bool finish_warp_operations() {
  bool any = false;
  for (unsigned base = 0; base < block_threads; base += kWarp) {
    const unsigned lanes = std::min(kWarp, block_threads - base);
    for (unsigned leader = 0; leader < lanes; ++leader) {
      if (fibers[base + leader].state != State::at_warp_operation) continue;
      const Place place = fibers[base + leader].place;
      const unsigned mask = fibers[base + leader].mask;
      const Combine combine = fibers[base + leader].combine;
      bool complete = !combine || lanes == kWarp;
      for (unsigned lane = 0; lane < lanes && complete; ++lane) {
        const Fiber& other = fibers[base + lane];
        if (mask >> lane & 1) {
          complete = other.state == State::at_warp_operation && other.mask == mask && same_place(other.place, place);
        }
      }
      if (!complete) continue;
      if (combine) combine(matrices[base / kWarp]);
      for (unsigned lane = 0; lane < lanes; ++lane) {
        Fiber& fiber = fibers[base + lane];
        if (!(mask >> lane & 1)) continue;
        // A lane beyond the block or the mask has nothing to give: CUDA leaves the value open, here it is poison.
        const bool given = fiber.source < lanes && (mask >> fiber.source & 1);
        fiber.received = given ? fibers[base + fiber.source].bits : ~std::uint64_t(0);
        fiber.combine = nullptr;
        fiber.state = State::ready;
      }
      ++warp_generation[base / kWarp];
      record(place, 1);
      any = true;
    }
  }
  return any;
}

// Forms the products that all threads of a warpgroup wait for. Returns whether any do.
bool finish_warpgroup_operations() {
  bool any = false;
  for (unsigned base = 0; base + kWarpgroup <= block_threads; base += kWarpgroup) {
    const Fiber& first = fibers[base];
    const auto waits = [&](const Fiber& fiber) {
      return fiber.state == State::at_warpgroup_operation && fiber.products == first.products &&
             same_place(fiber.place, first.place);
    };
    if (!std::all_of(fibers.begin() + base, fibers.begin() + base + kWarpgroup, waits)) continue;
    form_products(base, first.products);
    for (unsigned t = base; t < base + kWarpgroup; ++t) fibers[t].state = State::ready;
    record(first.place, 1);
    any = true;
  }
  return any;
}

void begin_block() {
  copies.assign(block_threads, {});
  phase_barrier_count = 0;
  given_up = false;
  products.assign(block_threads, {});
  for (unsigned i = 0; i < block_threads / kWarpgroup; ++i) {
    Warpgroup& one = warpgroups[i];
    if (!std::exchange(one.used, false)) continue;
    one.formed = one.first[0] = one.first[1] = one.ring = 0;
    for (auto& ring : one.rings) {
      for (GroupProduct& product : ring) {
        if (product.given) product.given = 0;  // a page that has never been written stays away
      }
    }
  }
}

// Lets those go on who are as many at a named barrier as it waits for: whole warps, each at one place. Returns whether
// any did.
bool finish_group_barriers() {
  std::vector<unsigned> groups[kGroups];
  for (unsigned t = 0; t < block_threads; ++t) {
    if (fibers[t].state == State::at_group_barrier) groups[fibers[t].group_name].push_back(t);
  }
  bool any = false;
  for (unsigned name = 1; name < kGroups; ++name) {
    const std::vector<unsigned>& waiting = groups[name];
    if (waiting.empty()) continue;
    const unsigned threads = fibers[waiting.front()].group_threads;
    if (waiting.size() != threads) continue;
    bool complete = true;
    for (std::size_t i = 0; i < threads; ++i) {
      const unsigned first = waiting[i / kWarp * kWarp];
      const Fiber& fiber = fibers[waiting[i]];
      complete &= first % kWarp == 0 && waiting[i] == first + i % kWarp && fiber.group_threads == threads &&
                  same_place(fiber.place, fibers[first].place);
    }
    if (!complete) continue;
    std::vector<Place> places;
    for (const unsigned t : waiting) {
      const Place& place = fibers[t].place;
      if (std::none_of(places.begin(), places.end(), [&](const Place& p) { return same_place(p, place); })) {
        places.push_back(place);
      }
      fibers[t].state = State::ready;
    }
    for (const Place& place : places) record(place, 1);
    ++group_generation[name];
    any = true;
  }
  return any;
}

bool has_ended(const PhaseBarrier& barrier, int parity) { return int(barrier.phase % 2) != parity; }

// Lets those go on whose phase has ended. Returns whether any did.
bool finish_phases() {
  if (!phase_barrier_count) return false;
  bool any = false;
  for (Fiber& fiber : fibers) {
    if (fiber.state != State::at_phase || !has_ended(phase_barriers[fiber.barrier], fiber.parity)) continue;
    fiber.state = State::ready;
    any = true;
  }
  return any;
}

// Returns an empty text, or which copy nobody has waited for: it could reach the next block's shared memory.
std::string explain_copies_under_way(std::uint64_t block) {
  for (unsigned i = 0; i < phase_barrier_count; ++i) {
    if (!phase_barriers[i].under_way) continue;
    const BulkUnderWay& first = phase_barriers[i].copy(0);
    return "block " + std::to_string(block) + " ended before anybody had waited for the " +
           std::to_string(first.copy.bytes) + " bytes that thread " + std::to_string(first.thread) + " asked for in " +
           describe(first.place);
  }
  return {};
}

int reduce(Reduction reduction, const std::vector<int>& predicates) {
  const auto set = std::count_if(predicates.begin(), predicates.end(), [](int p) { return p != 0; });
  switch (reduction) {
    case Reduction::conjunction:
      return set == static_cast<long>(predicates.size());
    case Reduction::disjunction:
      return set != 0;
    case Reduction::count:
      return static_cast<int>(set);
    case Reduction::none:
      break;
  }
  return 0;
}

// Lets the block go on if all of its threads wait at the same barrier. Returns whether they did.
bool finish_block_barrier() {
  const Fiber& first = fibers[0];
  for (unsigned t = 0; t < block_threads; ++t) {
    if (fibers[t].state != State::at_block_barrier || !same_place(fibers[t].place, first.place)) return false;
  }
  std::vector<int> predicates(block_threads);
  for (unsigned t = 0; t < block_threads; ++t) predicates[t] = fibers[t].predicate;
  reduced = reduce(first.reduction, predicates);
  for (unsigned t = 0; t < block_threads; ++t) fibers[t].state = State::ready;
  ++block_generation;
  record(first.place, 1);
  if (count_barrier) count_barrier();
  return true;
}

// Returns an empty text, or why the block cannot go on.
std::string run_block_on_fibers(std::uint64_t block, Random& random) {
  std::vector<unsigned> order(block_threads);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned t = 0; t < block_threads; ++t) fibers[t].state = State::ready;
  begin_block();
  sync_release(&block_start_sync);
  for (;;) {
    random.shuffle(order);  // no order of the threads between two barriers is promised
    for (const unsigned thread : order) {
      if (fibers[thread].state != State::ready) continue;
      run_fiber(thread);
      if (!fault_text.empty()) {
        sync_acquire(&block_end_sync);  // the text was made by the thread that has ended
        return fault_text;
      }
      if (faulted) {
        return "thread " + std::to_string(thread) + " of block " + std::to_string(block) + " was stopped by " +
               strsignal(faulted) + "; the build 'address' says where";
      }
    }
    const bool all_done =
        std::all_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.state == State::done; });
    if (all_done) break;
    if (!finish_phases() && !finish_warp_operations() && !finish_warpgroup_operations() && !finish_group_barriers() &&
        !finish_block_barrier()) {
      return explain_stall(block);
    }
  }
  sync_acquire(&block_end_sync);
  return explain_copies_under_way(block);
}

}  // namespace

// ---- the cross-check: a std::thread for each CUDA thread. It finds no fault; it must agree on kernels without.

namespace {

struct Meeting {
  explicit Meeting(unsigned count) : members(count), barrier(count) {}
  unsigned members;
  std::barrier<> barrier;
  std::uint64_t values[kWarp] = {};
};

struct ThreadBlock {
  explicit ThreadBlock(unsigned threads) : barrier(threads), predicates(threads) {
    for (unsigned base = 0; base < threads; base += kWarp) {
      warps.push_back(std::make_unique<Meeting>(std::min(kWarp, threads - base)));
    }
    for (unsigned base = 0; base < threads; base += kWarpgroup) {
      warpgroup_meetings.push_back(std::make_unique<Meeting>(std::min(kWarpgroup, threads - base)));
    }
  }
  std::barrier<> barrier;
  std::vector<int> predicates;
  std::vector<std::unique_ptr<Meeting>> warps, warpgroup_meetings;
  struct Group {
    unsigned threads = 0, arrived = 0;
    std::uint64_t generation = 0;
  };
  std::mutex groups_guard;
  std::condition_variable groups_changed;
  Group groups[kGroups];
  bool stopped = false;  // one of the threads: nobody need wait for it

  int wait(const Place& place, Reduction reduction, int predicate) {
    predicates[current] = predicate;
    barrier.arrive_and_wait();
    const int result = reduce(reduction, predicates);
    if (current == 0) record(place, 1);
    barrier.arrive_and_wait();  // nobody may set the next predicate before all have read
    return result;
  }
  std::uint64_t exchange(const Place& place, std::uint64_t bits, unsigned source) {
    Meeting& warp = *warps[current / kWarp];
    warp.values[current % kWarp] = bits;
    warp.barrier.arrive_and_wait();
    const std::uint64_t result = warp.values[source];
    if (current % kWarp == 0) record(place, 1);
    warp.barrier.arrive_and_wait();
    return result;
  }
  void exchange_matrices(const Place& place, Combine combine) {
    Meeting& warp = *warps[current / kWarp];
    if (warp.members != kWarp) stop(place, "its warp has not all 32 lanes");
    warp.barrier.arrive_and_wait();
    if (current % kWarp == 0) {
      combine(matrices[current / kWarp]);
      record(place, 1);
    }
    warp.barrier.arrive_and_wait();
  }
  void form_products_together(const Place& place, std::uint64_t count) {
    Meeting& meeting = *warpgroup_meetings[current / kWarpgroup];
    meeting.barrier.arrive_and_wait();
    if (current % kWarpgroup == 0) {
      form_products(current, count);
      record(place, 1);
    }
    meeting.barrier.arrive_and_wait();
  }
  void wait_for_group(const Place& place, unsigned name, unsigned threads) {
    std::unique_lock<std::mutex> guard(groups_guard);
    Group& group = groups[name];
    if (group.arrived && group.threads != threads) {
      guard.unlock();
      stop(place, "threads disagree on how many a named barrier waits for");
    }
    group.threads = threads;
    const std::uint64_t generation = group.generation;
    if (++group.arrived == threads) {
      group.arrived = 0;
      ++group.generation;
      record(place, 1);
      groups_changed.notify_all();
      return;
    }
    groups_changed.wait_for(guard, kPatience, [&] { return stopped || group.generation != generation; });
    if (group.generation == generation) {
      guard.unlock();
      stop(place, "a named barrier was not reached by exactly the threads that it waits for");
    }
  }
  void give_up() {
    const std::lock_guard<std::mutex> guard(groups_guard);
    stopped = true;
    groups_changed.notify_all();
    const std::lock_guard<std::mutex> phases_guard(phase_barriers_guard);
    given_up = true;
    phase_barriers_changed.notify_all();
  }
};

void run_block_on_threads() {
  ThreadBlock state(block_threads);
  begin_block();
  const Index block = blockIdx;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < block_threads; ++t) {
    threads.emplace_back([&state, block, t] {
      on_threads = &state;
      current = t;
      threadIdx = position(t, launch->block);
      blockIdx = block;
      blockDim = launch->block;
      gridDim = launch->grid;
      try {
        call_kernel();
      } catch (const Fault&) {
        state.give_up();
      }
      state.warps[t / kWarp]->barrier.arrive_and_drop();
      state.warpgroup_meetings[t / kWarpgroup]->barrier.arrive_and_drop();
      state.barrier.arrive_and_drop();
    });
  }
  for (auto& thread : threads) thread.join();
}

// Nothing may be recorded here: what a fiber does in the engine must not look like an access of the kernel's.
bool is_ignored(const Place& place) { return place.line == launch->ignored_line; }

}  // namespace

// ---- what the kernel calls

unsigned current_thread() { return current; }
unsigned lane() { return current % kWarp; }
unsigned char* dynamic_shared() { return dynamic; }
const Launch& current_launch() { return *launch; }
const Argument* current_arguments() { return arguments; }

bool is_shared(std::uintptr_t address) {
  const auto within = [address](const unsigned char* from, const unsigned char* to) {
    return address >= reinterpret_cast<std::uintptr_t>(from) && address < reinterpret_cast<std::uintptr_t>(to);
  };
  return within(dynamic, dynamic + launch->shared_bytes) || within(__start_emulated_shared, __stop_emulated_shared);
}

int block_barrier(const Place& place, Reduction reduction, int predicate) {
  if (is_ignored(place)) return predicate;
  if (on_threads) return on_threads->wait(place, reduction, predicate);
  Fiber& self = fibers[current];
  char* const sync = &block_barrier_sync[block_generation % 2];
  self.place = place;
  self.reduction = reduction;
  self.predicate = predicate;
  self.state = State::at_block_barrier;
  sync_release(sync);
  to_scheduler();
  sync_acquire(sync);
  return reduced;
}

void warp_barrier(const Place& place, unsigned mask) {
  if (is_ignored(place)) return;
  if (on_threads) {
    on_threads->exchange(place, 0, 0);
    return;
  }
  Fiber& self = fibers[current];
  const unsigned warp = current / kWarp;
  char* const sync = &warp_barrier_sync[2 * warp + warp_generation[warp] % 2];
  self.place = place;
  self.mask = mask;
  self.state = State::at_warp_operation;
  sync_release(sync);
  to_scheduler();
  sync_acquire(sync);
}

std::uint64_t warp_exchange(const Place& place, unsigned mask, std::uint64_t bits, unsigned source) {
  if (on_threads) return on_threads->exchange(place, bits, source);
  Fiber& self = fibers[current];
  self.place = place;
  self.mask = mask;
  self.bits = bits;
  self.source = source;
  self.state = State::at_warp_operation;
  to_scheduler();
  return self.received;
}

// ---- PTX primitives

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr std::size_t kMostDelivered = 256;

// Returns when all 32 lanes have given and what they take has been formed. Orders no memory, as the hardware does not.
void exchange_matrices(const Place& place, Combine combine) {
  if (on_threads) return on_threads->exchange_matrices(place, combine);
  Fiber& self = fibers[current];
  self.place = place;
  self.mask = kAllLanes;
  self.combine = combine;
  self.state = State::at_warp_operation;
  to_scheduler();
}

Matrices& own_matrices() { return matrices[current / kWarp]; }

bool is_aligned(const void* address, unsigned bytes) { return reinterpret_cast<std::uintptr_t>(address) % bytes == 0; }

void check_shared(const Place& place, const void* address, unsigned bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  if (!is_shared(first) || !is_shared(first + bytes - 1)) {
    stop(place, "its " + std::to_string(bytes) + " bytes are not all in the block's shared memory");
  }
}

}  // namespace

unsigned pack_halves(float low, float high) { return to_half(low) | to_half(high) << 16; }
unsigned pack_bfloats(float low, float high) { return to_bfloat(low) | to_bfloat(high) << 16; }
float unpack_half(unsigned bits) { return from_half(static_cast<std::uint16_t>(bits)); }

float fast_exp2(float x) {
  if (count) count(kExponential);
  const float power = std::exp2(x);
  return power < 0x1p-126f ? 0.0f : power;
}

void check_row(const Place& place, const void* row) {
  if (!is_aligned(row, 16)) stop(place, "the address of its row is not a multiple of 16 bytes");
  check_shared(place, row, 16);
  if (count_matrix_row) count_matrix_row();
}

void exchange_rows(const Place& place, unsigned* m, const void* row, bool transposed) {
  Matrices& warp = own_matrices();
  const unsigned lane = current % kWarp;
  std::memcpy(warp.given[lane].words, row, 16);
  exchange_matrices(place, transposed ? give_columns : give_rows);
  std::memcpy(m, warp.taken[lane].words, 16);
}

unsigned transpose_matrix(const Place& place, unsigned m) {
  Matrices& warp = own_matrices();
  const unsigned lane = current % kWarp;
  warp.given[lane].words[0] = m;
  exchange_matrices(place, transpose);
  return warp.taken[lane].words[0];
}

namespace {

void give_product(const Place& place, void* d, const unsigned* a, unsigned b0, unsigned b1, bool add, Combine combine) {
  Matrices& warp = own_matrices();
  const unsigned lane = current % kWarp;
  if (lane == 0 && count) count(kMma);
  Lane& given = warp.given[lane];
  std::memcpy(given.words, a, 16);
  given.words[4] = b0;
  given.words[5] = b1;
  if (add) {
    std::memcpy(given.sums, d, 16);
  } else {
    std::memset(given.sums, 0, 16);
  }
  exchange_matrices(place, combine);
  std::memcpy(d, warp.taken[lane].words, 16);
}

}  // namespace

void multiply_matrices(const Place& place, void* d, const unsigned* a, unsigned b0, unsigned b1, bool add) {
  give_product(place, d, a, b0, b1, add, multiply<from_halves>);
}

void multiply_bfloats(const Place& place, void* d, const unsigned* a, unsigned b0, unsigned b1, bool add) {
  give_product(place, d, a, b0, b1, add, multiply<from_bfloats>);
}

void check_copy(const Place& place, const void* shared, const void* global, unsigned bytes) {
  if (!is_aligned(shared, bytes) || !is_aligned(global, bytes)) {
    const std::string which = is_aligned(shared, bytes) ? "global" : "shared";
    stop(place, "the " + which + " address is not a multiple of " + std::to_string(bytes) + " bytes");
  }
  check_shared(place, shared, bytes);
}

void begin_copy(void* shared, const void* content, unsigned bytes) {
  Copies& mine = copies[current];
  if (mine.delivered > kMostDelivered) {  // a kernel that always has some under way must not keep all of them
    mine.all.erase(mine.all.begin(), mine.all.begin() + std::ptrdiff_t(mine.delivered));
    mine.delivered = 0;
  }
  Copy copy{shared, bytes, mine.groups, {}};
  std::memcpy(copy.content, content, bytes);
  mine.all.push_back(copy);
}

void commit_copies() { ++copies[current].groups; }

const Copy* next_copy(const Place& place, unsigned pending) {
  if (is_ignored(place)) return nullptr;
  Copies& mine = copies[current];
  if (mine.delivered < mine.all.size()) {
    const Copy& copy = mine.all[mine.delivered];
    if (copy.group + std::uint64_t(pending) >= mine.groups) return nullptr;
    ++mine.delivered;
    return &copy;
  }
  mine.all.clear();
  mine.delivered = 0;
  return nullptr;
}

void deliver(const Copy& copy) { std::memcpy(copy.to, copy.content, copy.bytes); }

// ---- barriers and bulk copies of sm_90

namespace {

// Where fibers run no lock is needed, and none may be taken: ThreadSanitizer would see an order in it.
std::unique_lock<std::mutex> lock_phase_barriers() {
  std::unique_lock<std::mutex> guard(phase_barriers_guard, std::defer_lock);
  if (on_threads) guard.lock();
  return guard;
}

PhaseBarrier* find_phase_barrier(const void* barrier) {
  const auto address = reinterpret_cast<std::uintptr_t>(barrier);
  PhaseBarrier* const end = phase_barriers + phase_barrier_count;
  PhaseBarrier* const found =
      std::find_if(phase_barriers, end, [&](const PhaseBarrier& one) { return one.address == address; });
  return found == end ? nullptr : found;
}

PhaseBarrier& known_barrier(const Place& place, const void* barrier, std::uint64_t content) {
  PhaseBarrier* const found = find_phase_barrier(barrier);
  if (!found) stop(place, "its barrier has not been initialised");
  if (content != kBarrierContent) stop(place, "the memory of its barrier has been overwritten");
  return *found;
}

void end_phase_if_complete(PhaseBarrier& barrier) {
  if (barrier.arrived < barrier.arrivals || barrier.expected != barrier.copied) return;
  ++barrier.phase;
  barrier.arrived = 0;
  barrier.expected = barrier.copied = 0;
  if (on_threads) phase_barriers_changed.notify_all();
}

// Where what is copied to this place of shared memory is kept until it is delivered; aligned in the same way.
unsigned char* shadow_of(const void* shared) {
  const auto* place = static_cast<const unsigned char*>(shared);
  const bool is_dynamic = place >= dynamic && place < dynamic + launch->shared_bytes;
  const unsigned char* const base = is_dynamic ? dynamic : __start_emulated_shared;
  const std::size_t alignment = 128;
  const auto shadow = reinterpret_cast<std::uintptr_t>((is_dynamic ? dynamic_shadow : static_shadow).data());
  const std::uintptr_t aligned = (shadow + alignment - 1) / alignment * alignment;
  return reinterpret_cast<unsigned char*>(aligned + reinterpret_cast<std::uintptr_t>(base) % alignment) +
         (place - base);
}

void make_shadows() {
  dynamic_shadow.resize(launch->shared_bytes + 256);
  static_shadow.resize(std::size_t(__stop_emulated_shared - __start_emulated_shared) + 256);
}

}  // namespace

void check_barrier(const Place& place, const void* barrier) {
  if (!is_aligned(barrier, 8)) stop(place, "the address of its barrier is not a multiple of 8 bytes");
  check_shared(place, barrier, 8);
}

std::uint64_t content_of(const void* barrier) {
  std::uint64_t content;
  std::memcpy(&content, barrier, sizeof content);
  return content;
}

void set_barrier(const Place& place, void* barrier, int arrivals) {
  if (arrivals < 1 || arrivals > kMostTransactions) {
    stop(place, "it is to wait for " + std::to_string(arrivals) + " arrivals; legal: 1 to " +
                    std::to_string(kMostTransactions));
  }
  const auto guard = lock_phase_barriers();
  PhaseBarrier* one = find_phase_barrier(barrier);
  if (one && one->under_way) stop(place, "copies of its barrier are under way");
  if (!one) {
    if (phase_barrier_count == kMostBarriers) {
      stop(place, "the block has " + std::to_string(kMostBarriers) + " barriers; the emulator knows no more");
    }
    one = &phase_barriers[phase_barrier_count++];
  }
  one->address = reinterpret_cast<std::uintptr_t>(barrier);
  one->arrivals = unsigned(arrivals);
  one->arrived = one->under_way = 0;
  one->phase = 0;
  one->expected = one->copied = 0;
  std::memcpy(barrier, &kBarrierContent, sizeof kBarrierContent);
}

void expect_bytes(const Place& place, void* barrier, std::uint64_t content, int bytes) {
  const auto guard = lock_phase_barriers();
  PhaseBarrier& one = known_barrier(place, barrier, content);
  if (one.arrived == one.arrivals) {
    stop(place, "all " + std::to_string(one.arrivals) + " arrivals of its barrier's phase have come already: " +
                    std::to_string(one.expected) + " bytes expected, " + std::to_string(one.copied) + " copied");
  }
  if (bytes < 0 || one.expected + bytes > kMostTransactions) {
    stop(place, "it lets its barrier's phase wait for " + std::to_string(one.expected + bytes) +
                    " bytes; legal: 0 to " + std::to_string(kMostTransactions));
  }
  ++one.arrived;
  one.expected += bytes;
  sync_release(&one.sync[one.phase % 2]);
  end_phase_if_complete(one);
}

void begin_bulk(const Place& place, void* shared, const void* global, int bytes, void* barrier,
                std::uint64_t content) {
  if (!is_aligned(shared, 16) || !is_aligned(global, 16)) {
    const std::string which = is_aligned(shared, 16) ? "global" : "shared";
    stop(place, "the " + which + " address is not a multiple of 16 bytes");
  }
  if (bytes < 16 || bytes % 16 != 0 || bytes > kMostTransactions) {
    stop(place, "it is to copy " + std::to_string(bytes) + " bytes; legal: multiples of 16, up to " +
                    std::to_string(kMostTransactions));
  }
  check_shared(place, shared, unsigned(bytes));
  if (is_shared(reinterpret_cast<std::uintptr_t>(global))) stop(place, "the global address is one of shared memory");
  if (count_unfenced) {
    if (const unsigned writer = count_unfenced(shared, unsigned(bytes))) {
      stop(place, "thread " + std::to_string(writer - 1) +
                      " has written to where it copies, and not called fence_async since");
    }
  }
  const auto guard = lock_phase_barriers();
  PhaseBarrier& mine = known_barrier(place, barrier, content);
  auto* const to = static_cast<unsigned char*>(shared);
  for (unsigned i = 0; i < phase_barrier_count; ++i) {
    for (unsigned j = 0; j < phase_barriers[i].under_way; ++j) {
      const BulkUnderWay& other = phase_barriers[i].copy(j);
      if (to < other.copy.to + other.copy.bytes && other.copy.to < to + bytes) {
        stop(place, "its bytes overlap those of thread " + std::to_string(other.thread) + " in " +
                        describe(other.place) + ", which nobody has waited for");
      }
    }
  }
  if (mine.under_way == kMostBulkCopies) {
    stop(place, std::to_string(kMostBulkCopies) + " copies are under way; the emulator knows no more");
  }
  unsigned char* const shadow = shadow_of(shared);
  copy_rows(shadow, global, std::size_t(bytes));
  mine.copy(mine.under_way++) = {{to, shadow, unsigned(bytes)}, mine.phase, place, current};
}

void finish_bulk(const Place& place, int bytes, void* barrier) {
  const auto guard = lock_phase_barriers();
  PhaseBarrier& one = *find_phase_barrier(barrier);
  one.copied += bytes;
  if (one.copied - one.expected > kMostTransactions) {
    stop(place, "its barrier's phase has got " + std::to_string(one.copied) + " bytes, and expects " +
                    std::to_string(one.expected));
  }
  // In the phase that the copy has begun in: it cannot have ended without these bytes, unless it expects too few.
  sync_release(&one.sync[one.phase % 2]);
  end_phase_if_complete(one);
}

bool wait_for_phase(const Place& place, void* barrier, std::uint64_t content, int parity) {
  if (is_ignored(place)) return false;
  if (parity != 0 && parity != 1) stop(place, "the parity is " + std::to_string(parity) + "; legal: 0 and 1");
  auto guard = lock_phase_barriers();
  PhaseBarrier& one = known_barrier(place, barrier, content);
  if (!has_ended(one, parity)) {
    if (on_threads) {
      phase_barriers_changed.wait_for(guard, kPatience, [&] { return given_up || has_ended(one, parity); });
      if (!has_ended(one, parity)) stop(place, "the phase does not end" + describe_phase(one, parity));
    } else {
      Fiber& self = fibers[current];
      self.place = place;
      self.barrier = unsigned(&one - phase_barriers);
      self.parity = parity;
      self.state = State::at_phase;
      to_scheduler();
    }
  }
  sync_acquire(&one.sync[parity]);
  guard.release();  // end_delivery unlocks it
  return true;
}

bool next_bulk(void* barrier, BulkCopy& copy) {
  PhaseBarrier& one = *find_phase_barrier(barrier);
  if (!one.under_way || one.copy(0).phase >= one.phase) return false;
  copy = one.copy(0).copy;
  ++one.first;
  --one.under_way;
  return true;
}

void end_delivery(void* barrier, int parity) {
  sync_release(&find_phase_barrier(barrier)->sync[parity]);
  if (on_threads) phase_barriers_guard.unlock();
}

void poison(void* shared, int bytes) {
  std::memset(shared, int(kPoison), std::size_t(bytes));
  if (count_replaced) count_replaced(shared, unsigned(bytes));
}
void deliver(const BulkCopy& copy) { std::memcpy(copy.to, copy.content, copy.bytes); }

// ---- products by a warpgroup

namespace {

constexpr unsigned kAddressBits = 18;  // of which a descriptor has all but the lowest four
constexpr std::uint64_t kField = (std::uint64_t(1) << (kAddressBits - 4)) - 1;

// Addresses of shared memory as a descriptor has them: static variables from 0, then dynamic memory.
const unsigned char* static_base() {
  return reinterpret_cast<const unsigned char*>(reinterpret_cast<std::uintptr_t>(__start_emulated_shared) / 16 * 16);
}
std::size_t dynamic_offset() { return (std::size_t(__stop_emulated_shared - static_base()) + 127) / 128 * 128; }

const unsigned char* host_address(std::size_t shared) {
  return shared < dynamic_offset() ? static_base() + shared : dynamic + (shared - dynamic_offset());
}

unsigned own_warpgroup() { return current / kWarpgroup; }
unsigned own_place() { return current % kWarpgroup; }

GroupProduct& newest_product() { return warpgroups[own_warpgroup()].product(products[current].begun - 1); }

// Where a row of B lies; null past the last.
const unsigned char* row_address(const Place& place, const GroupProduct& one, unsigned row) {
  if (row >= 2 * one.product.columns) return nullptr;
  const std::uint64_t b = one.product.b;
  const unsigned core = row / 8;
  const std::size_t offset =
      core % 2 * ((b >> 16 & kField) << 4) + core / 2 * ((b >> 32 & kField) << 4) + row % 8 * 16;
  const unsigned char* address = host_address(((b & kField) << 4) + offset);
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  if (!is_shared(first) || !is_shared(first + 15)) {
    stop(place, "its matrix has a row " + std::to_string(offset) + " bytes from its start, which is not in the block's "
                    "shared memory");
  }
  return address;
}

// Whether registers that products are to write are as they have left them.
bool is_untouched(const void* d, unsigned columns) {
  for (unsigned i = 0; i < columns / 2; ++i) {
    std::uint32_t word;
    std::memcpy(&word, static_cast<const char*>(d) + 4 * i, 4);
    if (word != kUnderWay) return false;
  }
  return true;
}

}  // namespace

std::size_t shared_offset(std::uintptr_t address) {
  const auto* const host = reinterpret_cast<const unsigned char*>(address);
  const bool is_dynamic = host >= dynamic && host < dynamic + launch->shared_bytes;
  return is_dynamic ? dynamic_offset() + std::size_t(host - dynamic) : std::size_t(host - static_base());
}

std::size_t shared_extent() { return dynamic_offset() + launch->shared_bytes; }

void fence_async() {
  if (count_fence) count_fence();
}

std::uint64_t describe_matrix(const Place& place, const void* shared, int leading, int stride) {
  if (!is_aligned(shared, 16)) stop(place, "the address of its matrix is not a multiple of 16 bytes");
  check_shared(place, shared, 16);
  for (const int offset : {leading, stride}) {
    if (offset < 0 || offset % 16 != 0 || offset >> kAddressBits) {
      stop(place, "an offset is " + std::to_string(offset) + " bytes; legal: multiples of 16, below " +
                      std::to_string(1 << kAddressBits));
    }
  }
  const std::size_t address = shared_offset(reinterpret_cast<std::uintptr_t>(shared));
  if (address >> kAddressBits) stop(place, "its address is beyond the 256 KiB that a descriptor can tell");
  return address >> 4 | std::uint64_t(leading >> 4) << 16 | std::uint64_t(stride >> 4) << 32;
}

void group_fence() { products[current].fenced = true; }
void group_commit() { ++products[current].groups; }

void begin_product(const Place& place, const GroupOperands& product, const unsigned* a) {
  Products& mine = products[current];
  const unsigned me = own_place();
  if (current - me + kWarpgroup > block_threads) stop(place, "its warpgroup has not all 128 threads");
  if (!mine.fenced) stop(place, "no group_fence has come before it, or since the last group_wait for products");
  if (product.b & ~(kField | kField << 16 | kField << 32)) {
    stop(place, "its descriptor has bits that no address or offset has");
  }
  if (mine.begun - mine.taken == kMostProducts) {
    stop(place, std::to_string(kMostProducts) + " products are under way; the emulator knows no more");
  }
  Warpgroup& warpgroup = warpgroups[own_warpgroup()];
  GroupProduct& one = warpgroup.product(mine.begun);
  {
    std::unique_lock<std::mutex> guard(products_guard, std::defer_lock);
    if (on_threads) guard.lock();
    if (one.given % kWarpgroup == 0) {
      warpgroup.used = true;
      one.given = 0;
      one.place = place;
      one.product = product;
      one.group = mine.groups;
    } else if (!same_place(one.place, place) || one.product.columns != product.columns ||
               one.product.transposed != product.transposed || one.product.accumulate != product.accumulate ||
               one.product.b != product.b || one.group != mine.groups) {
      stop(place, "another thread of its warpgroup gave other operands, or was in " + describe(one.place));
    }
    ++one.given;
  }
  const unsigned bytes = 2 * product.columns;
  auto* const d = static_cast<char*>(product.d);
  one.d[me] = product.d;
  one.before[me] = nullptr;
  for (std::uint64_t number = mine.begun; number > mine.taken && !one.before[me];) {
    const GroupProduct& other = warpgroup.product(--number);
    auto* const theirs = static_cast<char*>(other.d[me]);
    if (d >= theirs + 2 * other.product.columns || theirs >= d + bytes) continue;
    if (d != theirs || product.columns != other.product.columns) {
      stop(place, "its d is in part that of a product under way, begun in " + describe(other.place));
    }
    if (!is_untouched(d, product.columns)) {
      stop(place, "its d was touched between group_multiply and group_wait: it is that of a product under way, begun "
                  "in " + describe(other.place));
    }
    one.before[me] = &other;
  }
  if (product.accumulate && !one.before[me]) std::memcpy(one.sums[me], d, bytes);
  for (unsigned i = 0; i < bytes; i += 4) std::memcpy(d + i, &kUnderWay, 4);
  std::memcpy(one.a[me], a, sizeof one.a[me]);
  ++mine.begun;
  if (current % kWarp == 0 && count) {
    for (unsigned i = 0; i < product.columns / 8; ++i) count(kMma);
  }
}

const void* row_to_read(const Place& place, unsigned i) {
  const unsigned char* const row = row_address(place, newest_product(), own_place() + kWarpgroup * i);
  if (row && count_unfenced) {
    if (const unsigned writer = count_unfenced(row, 16)) {
      stop(place, "thread " + std::to_string(writer - 1) + " has written to its matrix, and not called fence_async since");
    }
  }
  return row;
}

void give_row(unsigned i, const void* content) {
  std::memcpy(newest_product().b[own_place() + kWarpgroup * i], content, 16);
}

bool wait_for_products(const Place& place, unsigned pending) {
  if (is_ignored(place)) return false;
  Products& mine = products[current];
  std::uint64_t count = mine.waited;
  while (count < mine.begun && warpgroups[own_warpgroup()].product(count).group + std::uint64_t(pending) < mine.groups) {
    ++count;
  }
  if (count == mine.waited) return true;
  mine.waited = count;
  mine.fenced = false;
  if (on_threads) {
    on_threads->form_products_together(place, count);
    return true;
  }
  Fiber& self = fibers[current];
  self.place = place;
  self.products = count;
  self.state = State::at_warpgroup_operation;
  to_scheduler();
  return true;
}

bool next_product(const Place& place, Finished& finished) {
  Products& mine = products[current];
  if (mine.taken == mine.waited) return false;
  const unsigned me = own_place();
  Warpgroup& warpgroup = warpgroups[own_warpgroup()];
  const GroupProduct& one = warpgroup.product(mine.taken++);
  finished = {one.d[me], one.sums[me], 2 * one.product.columns, {}};
  for (std::uint64_t number = mine.taken; number < mine.begun; ++number) {
    if (warpgroup.product(number).d[me] == one.d[me]) finished.d = nullptr;
  }
  if (finished.d && !is_untouched(finished.d, one.product.columns)) {
    stop(place, "the d of the product begun in " + describe(one.place) + " was touched before group_wait");
  }
  for (unsigned i = 0; i < 2; ++i) {
    const unsigned row = me + kWarpgroup * i;
    finished.rows[i] = row_address(place, one, row);
    if (finished.rows[i] && std::memcmp(finished.rows[i], one.b[row], 16) != 0) {
      stop(place, "the matrix of the product begun in " + describe(one.place) + " was changed before group_wait");
    }
  }
  return true;
}

void group_barrier(const Place& place, int name, int threads) {
  if (is_ignored(place)) return;
  if (name < 1 || name >= int(kGroups)) stop(place, "its name is " + std::to_string(name) + "; legal: 1 to 15");
  if (threads < 1 || threads % int(kWarp) != 0 || unsigned(threads) > block_threads) {
    stop(place, "it waits for " + std::to_string(threads) + " threads; legal: multiples of 32, up to the block's " +
                    std::to_string(block_threads));
  }
  if (on_threads) return on_threads->wait_for_group(place, unsigned(name), unsigned(threads));
  Fiber& self = fibers[current];
  char* const sync = &group_barrier_sync[name][group_generation[name] % 2];
  self.place = place;
  self.group_name = unsigned(name);
  self.group_threads = unsigned(threads);
  self.state = State::at_group_barrier;
  sync_release(sync);
  to_scheduler();
  sync_acquire(sync);
}

}  // namespace emulator

// ---- what the host calls

using namespace emulator;

int emulator_launch(void (*entry)(), const Launch* wanted, const Argument* given, char* text, std::uint64_t room) {
  launch = wanted;
  arguments = given;
  kernel = entry;
  block_threads = launch->block.x * launch->block.y * launch->block.z;
  if (launch->argument_count > kMostArguments) {
    std::snprintf(text, room, "the kernel takes %llu arguments; the emulator passes at most %zu",
                  static_cast<unsigned long long>(launch->argument_count), kMostArguments);
    return 1;
  }
  points.clear();
  warp_generation.assign((block_threads + kWarp - 1) / kWarp, 0);
  warp_barrier_sync.assign(2 * warp_generation.size(), 0);
  matrices.assign(warp_generation.size(), {});
  fault_text.clear();
  void* memory = nullptr;
  // Exactly as many bytes as the launch asks for: AddressSanitizer guards both ends.
  if (posix_memalign(&memory, 128, std::max<std::size_t>(launch->shared_bytes, 1))) std::abort();
  dynamic = static_cast<unsigned char*>(memory);
  make_shadows();
  if (block_threads / kWarpgroup > warpgroups_made) {
    // As the system gives it: pages that no product touches are never there. Not freed, as the shadows.
    warpgroups_made = block_threads / kWarpgroup;
    warpgroups = static_cast<Warpgroup*>(std::calloc(warpgroups_made, sizeof(Warpgroup)));
  }
#ifdef EMULATOR_TSAN
  scheduler_tsan = __tsan_get_current_fiber();
#endif
  const Stacks stacks(launch->on_threads ? 1 : block_threads);
  if (!launch->on_threads) make_fibers(stacks);
  if (count_begin_launch) count_begin_launch();

  faulted = 0;
  [[maybe_unused]] const FaultGuard guard;

  Random random{launch->seed};
  std::vector<std::uint64_t> blocks(std::uint64_t(launch->grid.x) * launch->grid.y * launch->grid.z);
  std::iota(blocks.begin(), blocks.end(), std::uint64_t(0));
  random.shuffle(blocks);
  blockDim = launch->block;
  gridDim = launch->grid;
  std::string stalled;
  for (const std::uint64_t block : blocks) {
    blockIdx = position(block, launch->grid);
    poison_shared();
    if (launch->on_threads) {
      run_block_on_threads();
      stalled = fault_text.empty() ? explain_copies_under_way(block) : fault_text;
      if (!stalled.empty()) break;
    } else {
      if (count_begin_block) count_begin_block();
      stalled = run_block_on_fibers(block, random);
      if (!stalled.empty()) break;
      if (count_end_block) count_end_block();
    }
  }
#ifdef EMULATOR_TSAN
  if (stalled.empty()) std::free(memory);  // else its fibers have not ended, and it would seem a race with them
#else
  std::free(memory);
#endif
  if (!stalled.empty()) {
    std::snprintf(text, room, "%s", stalled.c_str());
    return 1;
  }
  std::string report = "{\"points\": [";
  for (const auto& point : points) {
    if (&point != &points.front()) report += ", ";
    report += "{\"operation\": \"" + std::string(point.place.operation) + "\", \"file\": \"" + point.place.file +
              "\", \"line\": " + std::to_string(point.place.line) +
              ", \"executions\": " + std::to_string(point.executions) + "}";
  }
  report += "]";
  int used = std::snprintf(text, room, "%s", report.c_str());
  if (count_report) used += count_report(text + used, room - used);
  std::snprintf(text + used, room - used, "}");
  return 0;
}
