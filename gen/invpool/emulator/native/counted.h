// SPDX-License-Identifier: Apache-2.0
//
// counted.h: float and double that count what is done with them, for the build `count`.
//
// A product is kept open until it is used: added to something it counts as one fused multiply-add, as nvcc
// contracts it, else as one multiplication. The value is that of two roundings either way.
#ifndef INVPOOL_COUNTED_H
#define INVPOOL_COUNTED_H

// These know the real float only, so they must come first.
#ifdef EMULATOR_CUDA_HEADERS
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace emulator {

template <class T>
struct Counted;

template <class T>
struct Product {
  T value;

  friend Counted<T> operator+(Product a, Product b) { return a + Counted<T>(b); }
  friend Counted<T> operator-(Product a, Product b) { return a - Counted<T>(b); }
  friend Counted<T> sqrt(Product a) { return sqrt(Counted<T>(a)); }
  friend Counted<T> log2(Product a) { return log2(Counted<T>(a)); }
};

// Operands come by value: an operand in memory is then read where the source names it, once.
template <class T>
struct Counted {
  T value;

  Counted() = default;
  template <class U>
  constexpr Counted(U other) : value(static_cast<T>(other)) {}
  Counted(Product<T> product) : value(product.value) { count(kMultiply); }

  explicit operator T() const { return value; }
#ifdef EMULATOR_CUDA_HEADERS
  explicit operator __half() const { return __half(value); }
  explicit operator __nv_bfloat16() const { return __nv_bfloat16(value); }
#endif

  static Counted of(T value, Operation operation) {
    count(operation);
    return Counted(value);
  }

  friend Product<T> operator*(Counted a, Counted b) { return {a.value * b.value}; }
  friend Counted operator+(Counted a, Counted b) { return of(a.value + b.value, kAdd); }
  friend Counted operator-(Counted a, Counted b) { return of(a.value - b.value, kAdd); }
  friend Counted operator/(Counted a, Counted b) { return of(a.value / b.value, kDivide); }
  friend Counted operator-(Counted a) { return Counted(-a.value); }  // a modifier of the next operation
  friend Counted operator+(Product<T> a, Counted b) { return of(a.value + b.value, kFma); }
  friend Counted operator+(Counted a, Product<T> b) { return of(a.value + b.value, kFma); }
  friend Counted operator-(Product<T> a, Counted b) { return of(a.value - b.value, kFma); }
  friend Counted operator-(Counted a, Product<T> b) { return of(a.value - b.value, kFma); }

  Counted& operator+=(Counted other) { return *this = *this + other; }
  Counted& operator-=(Counted other) { return *this = *this - other; }
  Counted& operator+=(Product<T> other) { return *this = *this + other; }
  Counted& operator-=(Product<T> other) { return *this = *this - other; }
  Counted& operator*=(Counted other) { return *this = *this * other; }
  Counted& operator/=(Counted other) { return *this = *this / other; }

  friend bool operator<(Counted a, Counted b) { return a.value < b.value; }
  friend bool operator>(Counted a, Counted b) { return a.value > b.value; }
  friend bool operator<=(Counted a, Counted b) { return a.value <= b.value; }
  friend bool operator>=(Counted a, Counted b) { return a.value >= b.value; }
  friend bool operator==(Counted a, Counted b) { return a.value == b.value; }
  friend bool operator!=(Counted a, Counted b) { return a.value != b.value; }

  friend Counted fma(Counted a, Counted b, Counted c) { return of(std::fma(a.value, b.value, c.value), kFma); }
  friend Counted fmax(Counted a, Counted b) { return of(std::fmax(a.value, b.value), kExtremum); }
  friend Counted fabs(Counted a) { return Counted(std::fabs(a.value)); }  // a modifier too
  friend Counted sqrt(Counted a) { return of(std::sqrt(a.value), kDivide); }
  friend Counted exp(Counted a) { return of(std::exp(a.value), kExponential); }
  friend Counted exp2(Counted a) { return of(std::exp2(a.value), kExponential); }
  friend Counted log(Counted a) { return of(std::log(a.value), kLogarithm); }
  friend Counted log2(Counted a) { return of(std::log2(a.value), kLogarithm); }
};

using CountedFloat = Counted<float>;
using CountedDouble = Counted<double>;
static_assert(sizeof(CountedFloat) == sizeof(float) && sizeof(CountedDouble) == sizeof(double), "same layout");
static_assert(std::is_trivially_copyable<CountedFloat>::value, "copied as its bytes");

}  // namespace emulator

// From here on, the kernel's float is ours.
#define float ::emulator::CountedFloat
#define double ::emulator::CountedDouble

#endif  // INVPOOL_COUNTED_H
