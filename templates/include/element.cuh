// ---- element.cuh: conversions and vector access ----

template <class T>
__device__ Scalar to_scalar(T value) {
  return static_cast<Scalar>(value);
}

template <class T>
__device__ T from_scalar(Scalar value) {
  return static_cast<T>(value);
}

// N neighbours moved by one instruction; the address must be a multiple of the size.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T lane[N];
};

template <int N, class T>
__device__ Pack<T, N> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, class T>
__device__ void store_pack(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// The widest power of two of T's that 16 bytes hold and that divides both numbers.
template <class T>
__host__ __device__ constexpr int pack_width(int a, int b) {
  int width = 16 / static_cast<int>(sizeof(T));
  while (width > 1 && (a % width != 0 || b % width != 0)) width /= 2;
  return width;
}
