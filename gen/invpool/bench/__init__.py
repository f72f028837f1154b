"""Measuring: our kernels and what people would pick instead, on the GPU at hand."""
