// ---- primitives.cuh: the PTX that tensor cores and asynchronous copies need, with a body for the emulator ----

static_assert(sizeof(Scalar) == 4, "tensor cores sum in float32");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "mma.m16n8k16 and cp.async need sm_80"
#endif

// Two fp16 numbers, the first in the low half.
using Halves = unsigned;

// Two bf16 numbers, likewise: the upper halves of two floats.
using Bfloats = unsigned;

// A warp holds an 8x8 matrix of fp16 as one Halves a lane: row lane / 4, columns 2 * (lane % 4) and the next.
// A of 16x16 is four of them, a[0] upper left, a[1] lower left, a[2] upper right, a[3] lower right; B of 16x8 is
// b0 over b1, both transposed; D of 16x8 is d[0..1] in row lane / 4 and d[2..3] eight rows below.

#ifdef __CUDACC__

// Computing is not volatile: the compiler may move it about. What touches memory stays where it is between barriers.

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ inline Halves pack_halves(Scalar low, Scalar high) {
  Halves pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline Scalar low_half(Halves pair) {
  Scalar value;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(pair));
  return value;
}

__device__ inline Scalar high_half(Halves pair) {
  Scalar value;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(value) : "r"(pair));
  return value;
}

// 2^x to 2 units of the last place; 0 where that is below 2^-126.
__device__ inline Scalar fast_exp2(Scalar x) {
  Scalar power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// 1 / x to 1 unit of the last place; 0 where that is below 2^-126.
__device__ inline Scalar fast_reciprocal(Scalar x) {
  Scalar reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// Four 8x8 matrices from shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(Halves (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ inline void load_matrices_transposed(Halves (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ inline Halves transpose_matrix(Halves m) {
  Halves transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
  return transposed;
}

// d += a * b
__device__ inline void multiply_add(Scalar (&d)[4], const Halves (&a)[4], Halves b0, Halves b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a * b, without registers to clear
__device__ inline void multiply(Scalar (&d)[4], const Halves (&a)[4], Halves b0, Halves b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// The same of bf16 numbers.
__device__ inline Bfloats pack_bfloats(Scalar low, Scalar high) {
  Bfloats pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ inline void multiply_add_bfloats(Scalar (&d)[4], const Bfloats (&a)[4], Bfloats b0, Bfloats b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply_bfloats(Scalar (&d)[4], const Bfloats (&a)[4], Bfloats b0, Bfloats b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// Begins a copy that bypasses registers. It is there after wait_copies, for the thread that asked for it; for others
// after a barrier behind that. Only copies of 16 bytes can bypass L1.
template <int BYTES>
__device__ void copy_async(void* shared, const void* global) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async knows no other sizes");
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global))
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 :
                 : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "n"(BYTES)
                 : "memory");
  }
}

// Has the line of DRAM that holds this brought to L2; nobody waits for it.
__device__ inline void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(__cvta_generic_to_global(global)));
}

// Makes a group of the copies begun since the last one.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Waits for all groups but the newest PENDING.
template <int PENDING>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

// A barrier of `threads` threads, whole warps, which name it by a number from 1 to 15: 0 is __syncthreads.
__device__ inline void group_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(name), "r"(threads) : "memory");
}

#else  // the emulator: the same, by its engine

__device__ inline Halves pack_halves(Scalar low, Scalar high) {
  return emulator::pack_halves(static_cast<emulator::Float>(low), static_cast<emulator::Float>(high));
}
__device__ inline Scalar low_half(Halves pair) { return emulator::unpack_half(pair); }
__device__ inline Scalar high_half(Halves pair) { return emulator::unpack_half(pair >> 16); }
__device__ inline Scalar fast_exp2(Scalar x) { return emulator::fast_exp2(static_cast<emulator::Float>(x)); }
__device__ inline Scalar fast_reciprocal(Scalar x) { return Scalar(1) / x; }
__device__ inline void load_matrices(Halves (&m)[4], const void* row, EMULATOR_CALLER) {
  emulator::load_matrices({"load_matrices", file, line}, m, row, false);
}
__device__ inline void load_matrices_transposed(Halves (&m)[4], const void* row, EMULATOR_CALLER) {
  emulator::load_matrices({"load_matrices_transposed", file, line}, m, row, true);
}
__device__ inline Halves transpose_matrix(Halves m, EMULATOR_CALLER) {
  return emulator::transpose_matrix({"transpose_matrix", file, line}, m);
}
__device__ inline void multiply_add(Scalar (&d)[4], const Halves (&a)[4], Halves b0, Halves b1, EMULATOR_CALLER) {
  emulator::multiply_matrices({"multiply_add", file, line}, d, a, b0, b1, true);
}
__device__ inline void multiply(Scalar (&d)[4], const Halves (&a)[4], Halves b0, Halves b1, EMULATOR_CALLER) {
  emulator::multiply_matrices({"multiply", file, line}, d, a, b0, b1, false);
}
__device__ inline Bfloats pack_bfloats(Scalar low, Scalar high) {
  return emulator::pack_bfloats(static_cast<emulator::Float>(low), static_cast<emulator::Float>(high));
}
__device__ inline void multiply_add_bfloats(Scalar (&d)[4], const Bfloats (&a)[4], Bfloats b0, Bfloats b1, EMULATOR_CALLER) {
  emulator::multiply_bfloats({"multiply_add_bfloats", file, line}, d, a, b0, b1, true);
}
__device__ inline void multiply_bfloats(Scalar (&d)[4], const Bfloats (&a)[4], Bfloats b0, Bfloats b1, EMULATOR_CALLER) {
  emulator::multiply_bfloats({"multiply_bfloats", file, line}, d, a, b0, b1, false);
}
template <int BYTES>
__device__ void copy_async(void* shared, const void* global, EMULATOR_CALLER) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async knows no other sizes");
  emulator::copy_async({"copy_async", file, line}, shared, global, BYTES);
}
__device__ inline void prefetch_line(const void*) {}
__device__ inline void commit_copies() { emulator::commit_copies(); }
template <int PENDING>
__device__ void wait_copies(EMULATOR_CALLER) {
  emulator::wait_copies({"wait_copies", file, line}, PENDING);
}
__device__ inline void group_barrier(int name, int threads, EMULATOR_CALLER) {
  emulator::group_barrier({"group_barrier", file, line}, name, threads);
}

#endif

__device__ inline Scalar float_of_bits(unsigned bits) {
  Scalar value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
__device__ inline Scalar low_bfloat(Bfloats pair) { return float_of_bits(pair << 16); }
__device__ inline Scalar high_bfloat(Bfloats pair) { return float_of_bits(pair & 0xffff0000u); }
