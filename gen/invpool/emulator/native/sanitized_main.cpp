// SPDX-License-Identifier: Apache-2.0
//
// sanitized_main.cpp: one launch in a process of its own, for kernels built with a sanitizer: the sanitizer's run
// time must be there before anything else, which a shared library in a Python process cannot have.
//
//   kernel <request>     reads the launch and the contents of its arrays, runs it, writes the arrays back
//
// The request: a Launch; for each argument its value, its bytes and the address modulo 16 that its memory has to
// have; then the memory of each, back to back. All numbers are 64-bit but for those of Launch.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#ifdef EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#endif

#include "engine.h"

// The kernel; the linker is told its name.
extern "C" void emulator_entry();

namespace {

constexpr std::uint64_t kFront = 16;  // malloc's own alignment

struct Requested {
  std::uint64_t value, bytes, misalignment;
};

void exactly(bool good, const char* what) {
  if (!good) {
    std::fprintf(stderr, "the emulator's request cannot be %s\n", what);
    std::exit(2);
  }
}

}  // namespace

int main(int, char** argv) {
  std::FILE* file = std::fopen(argv[1], "r+b");
  exactly(file != nullptr, "opened");
  emulator::Launch launch;
  exactly(std::fread(&launch, sizeof launch, 1, file) == 1, "read");
  std::vector<Requested> requested(launch.argument_count);
  exactly(std::fread(requested.data(), sizeof(Requested), requested.size(), file) == requested.size(), "read");
  const long contents = std::ftell(file);

  std::vector<emulator::Argument> arguments;
  for (const auto& one : requested) {
    emulator::Argument argument{one.value, one.bytes};
    if (one.bytes) {
      // The end of the allocation is the end of the array. What lies before it is off limits too, to the last
      // multiple of eight bytes: AddressSanitizer knows no finer start.
      const std::uint64_t offset = one.misalignment ? kFront + one.misalignment : 0;
      auto* memory = static_cast<unsigned char*>(std::malloc(offset + one.bytes));
#ifdef EMULATOR_ASAN
      __asan_poison_memory_region(memory, offset / 8 * 8);
#endif
      argument.value = reinterpret_cast<std::uintptr_t>(memory + offset);
      exactly(std::fread(memory + offset, 1, one.bytes, file) == one.bytes, "read");
    }
    arguments.push_back(argument);
  }

  std::string text(1 << 16, '\0');
  const int failed = emulator_launch(emulator_entry, &launch, arguments.data(), text.data(), text.size());
  std::puts(text.c_str());
  if (failed) return 1;
  std::fseek(file, contents, SEEK_SET);
  for (const auto& argument : arguments) {
    if (argument.bytes) {
      const void* memory = reinterpret_cast<const void*>(argument.value);
      exactly(std::fwrite(memory, 1, argument.bytes, file) == argument.bytes, "written");
    }
  }
  return std::fclose(file) == 0 ? 0 : 2;
}
