// SPDX-License-Identifier: Apache-2.0
//
// engine.h: what the host side of the emulator calls. One launch at a time, one block at a time.
#ifndef INVPOOL_ENGINE_H
#define INVPOOL_ENGINE_H

#include <cstdint>

#include "cuda_on_cpu.h"

namespace emulator {

// One argument of a kernel: a 64-bit value, or memory that the kernel may touch.
struct Argument {
  std::uint64_t value;  // the address, for memory
  std::uint64_t bytes;  // of the memory; 0 for a value
};

struct Launch {
  Index grid, block;
  std::uint64_t shared_bytes;
  std::uint64_t seed;         // orders the blocks, and the threads between two barriers
  std::int32_t on_threads;    // 0: fibers; 1: one std::thread a CUDA thread, the cross-check
  std::int32_t ignored_line;  // the synchronisation point at this line does nothing; 0: none
  std::uint64_t argument_count;
};

// Index of the calling CUDA thread in its block, x fastest.
unsigned current_thread();
// The launch under way, for the counting hooks.
const Launch& current_launch();
const Argument* current_arguments();
// Whether the byte at the address lies in the block's shared memory.
bool is_shared(std::uintptr_t address);
// Where an address of shared memory lies in it, as a matrix descriptor has it: static variables from 0, then dynamic
// memory; and where that ends.
std::size_t shared_offset(std::uintptr_t address);
std::size_t shared_extent();

// Appends what was counted to the report, as JSON members; defined by counters.cpp in counting builds.
void count_begin_launch() __attribute__((weak));
void count_begin_block() __attribute__((weak));
void count_end_block() __attribute__((weak));
void count_barrier() __attribute__((weak));
void count(Operation operation) __attribute__((weak));
void count_matrix_row() __attribute__((weak));  // the calling thread's next access is a row that ldmatrix takes
void count_fence() __attribute__((weak));  // the calling thread's fence_async
// The number, from 1, of a thread that has written some of the bytes and not called fence_async since; 0 if none has.
unsigned count_unfenced(const void* shared, unsigned bytes) __attribute__((weak));
void count_replaced(const void* shared, unsigned bytes) __attribute__((weak));  // by a bulk copy
int count_report(char* text, std::uint64_t room) __attribute__((weak));

}  // namespace emulator

extern "C" {
// Runs a kernel all of whose arguments are 64 bits wide. Returns 0, or 1 with a message in `text`; on success
// `text` holds a JSON object with the synchronisation points and, in counting builds, the counters.
int emulator_launch(void (*kernel)(), const emulator::Launch* launch, const emulator::Argument* arguments, char* text,
                    std::uint64_t room);
}

#endif  // INVPOOL_ENGINE_H
