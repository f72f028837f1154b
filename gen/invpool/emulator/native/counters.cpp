// SPDX-License-Identifier: Apache-2.0
//
// counters.cpp: what a kernel does, counted from the code as it runs.
//
// Memory: the kernel is compiled with -fsanitize=thread, which calls a hook before every load and store; the hooks
// here count instead of looking for races. Floating point: counted.h. What the lanes of a warp do at the same call,
// for the n-th time each, is one instruction of the warp; its addresses tell bank conflicts and lines.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine.h"

namespace emulator {

namespace {

constexpr const char* kOperationNames[kOperations] = {"fma", "add", "multiply", "divide",
                                                      "exp", "log", "extremum", "mma"};
constexpr unsigned kWarp = 32;
constexpr unsigned kBanks = 32, kBankBytes = 4, kWidestBytes = 16;
constexpr std::uintptr_t kLineBytes = 128;
constexpr int kShared = -1, kElsewhere = -2;  // beside the numbers of arguments

struct Traffic {
  std::uint64_t reads = 0, read_bytes = 0, writes = 0, write_bytes = 0;
};

struct Footprint {
  std::vector<bool> read, written;
};

// One instruction of a warp: what its lanes access at the same call for the n-th time.
struct WarpAccess {
  bool shared;
  unsigned bytes;
  std::vector<std::uintptr_t> rows[4];  // of each of the matrices that ldmatrix takes; empty for any other access
  std::vector<std::uintptr_t> addresses[2];  // of each half warp
};

struct Thread {
  std::uint64_t operations[kOperations] = {};
  std::vector<std::uint64_t> calls;                    // hashes of the calls that lead here
  std::unordered_map<std::uint64_t, unsigned> visits;  // how often each access has been executed
  bool at_matrix_row = false;  // the next access is one by ldmatrix
  std::uint32_t fences = 0;  // how often it has called fence_async
};

// Who wrote a word of shared memory last, from 1, and how many fences of its own had come before.
struct Writer {
  std::uint32_t thread = 0, fences = 0;
};
constexpr std::size_t kWordBytes = 4;

std::vector<Thread> threads;
std::vector<Writer> writers;
std::vector<std::unordered_map<std::uint64_t, WarpAccess>> warps;
std::uint64_t operations[kOperations], issued[kOperations];
Traffic shared_traffic;
std::vector<Traffic> argument_traffic;
std::vector<Footprint> footprints;
std::uint64_t shared_wavefronts, global_wavefronts, barriers;

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

int space_of(std::uintptr_t address) {
  if (is_shared(address)) return kShared;
  const Argument* arguments = current_arguments();
  for (std::size_t i = 0; i < current_launch().argument_count; ++i) {
    if (address - arguments[i].value < arguments[i].bytes) return static_cast<int>(i);
  }
  return kElsewhere;  // a thread's own variables: registers, on a GPU
}

void access(const void* pointer, std::uint64_t bytes, bool write, const void* caller) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const int space = space_of(address);
  if (space == kElsewhere) return;
  Traffic& traffic = space == kShared ? shared_traffic : argument_traffic[space];
  ++(write ? traffic.writes : traffic.reads);
  (write ? traffic.write_bytes : traffic.read_bytes) += bytes;
  if (space != kShared) {
    auto& bits = write ? footprints[space].written : footprints[space].read;
    const std::uint64_t first = address - current_arguments()[space].value;
    for (std::uint64_t byte = first; byte < first + bytes; ++byte) bits[byte] = true;
  }
  Thread& thread = threads[current_thread()];
  if (space == kShared && write) {
    const std::size_t first = shared_offset(address);
    for (std::size_t word = first / kWordBytes; word <= (first + bytes - 1) / kWordBytes; ++word) {
      writers[word] = {current_thread() + 1, thread.fences};
    }
  }
  const std::uint64_t place =
      mix(thread.calls.empty() ? 0 : thread.calls.back(), reinterpret_cast<std::uintptr_t>(caller));
  const std::uint64_t key = mix(place, thread.visits[place]++);
  WarpAccess& together = warps[current_thread() / kWarp][key];
  together.shared = space == kShared;
  together.bytes = static_cast<unsigned>(bytes);
  // Arrays start a line, as they do on a GPU, wherever the host put them.
  const std::uintptr_t seen =
      space == kShared ? address : address - current_arguments()[space].value + (std::uintptr_t(space) << 48);
  if (std::exchange(thread.at_matrix_row, false)) {
    together.rows[current_thread() % kWarp / 8].push_back(seen);
  } else {
    together.addresses[current_thread() % kWarp / (kWarp / 2)].push_back(seen);
  }
}

std::vector<std::uintptr_t> all_addresses(const WarpAccess& access) {
  std::vector<std::uintptr_t> all = access.addresses[0];
  all.insert(all.end(), access.addresses[1].begin(), access.addresses[1].end());
  return all;
}

// Passes over the banks: invpool.layout.wavefronts, which explains the rule.
unsigned passes_over_banks(std::vector<std::uintptr_t> addresses, unsigned bytes) {
  const std::size_t group = std::max<std::size_t>(1, kBanks * kBankBytes / std::max(bytes, kBankBytes));
  std::sort(addresses.begin(), addresses.end());  // they came in any order: a fiber runs when it runs
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  unsigned total = 0;
  for (std::size_t first = 0; first < addresses.size(); first += group) {
    std::vector<std::uintptr_t> words;
    for (std::size_t i = first; i < std::min(first + group, addresses.size()); ++i) {
      const std::uintptr_t address = addresses[i];
      for (std::uintptr_t word = address / kBankBytes; word <= (address + bytes - 1) / kBankBytes; ++word) {
        words.push_back(word);
      }
    }
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    unsigned per_bank[kBanks] = {};
    for (const std::uintptr_t word : words) ++per_bank[word % kBanks];
    total += *std::max_element(per_bank, per_bank + kBanks);
  }
  return total;
}

unsigned passes_over_banks(const WarpAccess& access) {
  if (!access.rows[0].empty()) {
    unsigned total = 0;  // the matrices come one after the other, whatever they have in common
    for (const auto& matrix : access.rows) total += passes_over_banks(matrix, access.bytes);
    return total;
  }
  if (access.bytes == kWidestBytes) {
    return passes_over_banks(access.addresses[0], access.bytes) + passes_over_banks(access.addresses[1], access.bytes);
  }
  return passes_over_banks(all_addresses(access), access.bytes);
}

unsigned lines(const WarpAccess& access) {
  std::vector<std::uintptr_t> touched;
  for (const std::uintptr_t address : all_addresses(access)) {
    for (std::uintptr_t line = address / kLineBytes; line <= (address + access.bytes - 1) / kLineBytes; ++line) {
      touched.push_back(line);
    }
  }
  std::sort(touched.begin(), touched.end());
  return static_cast<unsigned>(std::unique(touched.begin(), touched.end()) - touched.begin());
}

}  // namespace

void count_matrix_row() { threads[current_thread()].at_matrix_row = true; }
void count(Operation operation) { ++threads[current_thread()].operations[operation]; }

void count_fence() { ++threads[current_thread()].fences; }

unsigned count_unfenced(const void* shared, unsigned bytes) {
  const std::size_t first = shared_offset(reinterpret_cast<std::uintptr_t>(shared));
  for (std::size_t word = first / kWordBytes; word < (first + bytes) / kWordBytes; ++word) {
    const Writer& writer = writers[word];
    if (writer.thread && threads[writer.thread - 1].fences == writer.fences) return writer.thread;
  }
  return 0;
}

void count_replaced(const void* shared, unsigned bytes) {
  const std::size_t first = shared_offset(reinterpret_cast<std::uintptr_t>(shared)) / kWordBytes;
  std::fill_n(writers.begin() + std::ptrdiff_t(first), bytes / kWordBytes, Writer());
}

void count_begin_launch() {
  const Launch& launch = current_launch();
  std::fill(std::begin(operations), std::end(operations), 0);
  std::fill(std::begin(issued), std::end(issued), 0);
  shared_traffic = {};
  argument_traffic.assign(launch.argument_count, {});
  footprints.assign(launch.argument_count, {});
  for (std::size_t i = 0; i < launch.argument_count; ++i) {
    footprints[i].read.resize(current_arguments()[i].bytes);
    footprints[i].written.resize(current_arguments()[i].bytes);
  }
  shared_wavefronts = global_wavefronts = barriers = 0;
}

void count_begin_block() {
  const Index& block = current_launch().block;
  const std::size_t count = std::size_t(block.x) * block.y * block.z;
  threads.assign(count, {});
  writers.assign(shared_extent() / kWordBytes + 1, {});
  warps.assign((count + kWarp - 1) / kWarp, {});
}

void count_end_block() {
  for (std::size_t base = 0; base < threads.size(); base += kWarp) {
    for (int operation = 0; operation < kOperations; ++operation) {
      std::uint64_t most = 0;
      for (std::size_t t = base; t < std::min(base + kWarp, threads.size()); ++t) {
        operations[operation] += threads[t].operations[operation];
        most = std::max(most, threads[t].operations[operation]);
      }
      // Lanes without work wait for those that have some; an mma is the whole warp's, counted at its first lane.
      issued[operation] += operation == kMma ? most : most * kWarp;
    }
  }
  for (const auto& warp : warps) {
    for (const auto& [key, access] : warp) {
      if (access.shared) {
        shared_wavefronts += passes_over_banks(access);
      } else {
        global_wavefronts += lines(access);
      }
    }
  }
}

void count_barrier() { ++barriers; }

int count_report(char* text, std::uint64_t room) {
  const auto member = [](const char* name, std::uint64_t value) {
    return "\"" + std::string(name) + "\": " + std::to_string(value);
  };
  const auto traffic = [&](const Traffic& one) {
    return member("reads", one.reads) + ", " + member("read_bytes", one.read_bytes) + ", " +
           member("writes", one.writes) + ", " + member("write_bytes", one.write_bytes);
  };
  std::string report = ", \"counters\": {\"operations\": {";
  for (int i = 0; i < kOperations; ++i) report += (i ? ", " : "") + member(kOperationNames[i], operations[i]);
  report += "}, \"issued\": {";
  for (int i = 0; i < kOperations; ++i) report += (i ? ", " : "") + member(kOperationNames[i], issued[i]);
  report += "}, \"shared\": {" + traffic(shared_traffic) + "}, \"arguments\": [";
  for (std::size_t i = 0; i < argument_traffic.size(); ++i) {
    const auto touched = [](const std::vector<bool>& bits) { return std::count(bits.begin(), bits.end(), true); };
    report += std::string(i ? ", " : "") + "{" + traffic(argument_traffic[i]) + ", " +
              member("bytes_read_at_all", touched(footprints[i].read)) + ", " +
              member("bytes_written_at_all", touched(footprints[i].written)) + "}";
  }
  report += "], " + member("shared_wavefronts", shared_wavefronts) + ", " +
            member("global_wavefronts", global_wavefronts) + ", " + member("barriers", barriers) + "}";
  return std::snprintf(text, room, "%s", report.c_str());
}

}  // namespace emulator

// ---- the hooks of -fsanitize=thread

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void* caller) {
  auto& calls = emulator::threads[emulator::current_thread()].calls;
  calls.push_back(emulator::mix(calls.empty() ? 0 : calls.back(), reinterpret_cast<std::uintptr_t>(caller)));
}
void __tsan_func_exit() { emulator::threads[emulator::current_thread()].calls.pop_back(); }
void __tsan_read_range(void* address, unsigned long bytes) {
  emulator::access(address, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, unsigned long bytes) {
  emulator::access(address, bytes, true, __builtin_return_address(0));
}
#define HOOK(name, bytes, write) \
  void name(void* address) { emulator::access(address, bytes, write, __builtin_return_address(0)); }
HOOK(__tsan_read1, 1, false)
HOOK(__tsan_read2, 2, false)
HOOK(__tsan_read4, 4, false)
HOOK(__tsan_read8, 8, false)
HOOK(__tsan_read16, 16, false)
HOOK(__tsan_write1, 1, true)
HOOK(__tsan_write2, 2, true)
HOOK(__tsan_write4, 4, true)
HOOK(__tsan_write8, 8, true)
HOOK(__tsan_write16, 16, true)
HOOK(__tsan_unaligned_read2, 2, false)
HOOK(__tsan_unaligned_read4, 4, false)
HOOK(__tsan_unaligned_read8, 8, false)
HOOK(__tsan_unaligned_read16, 16, false)
HOOK(__tsan_unaligned_write2, 2, true)
HOOK(__tsan_unaligned_write4, 4, true)
HOOK(__tsan_unaligned_write8, 8, true)
HOOK(__tsan_unaligned_write16, 16, true)
}
