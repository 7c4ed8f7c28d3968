// What files with bindings share: arrays of Python, checked, and names of dtypes and activations.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "planes/activations.h"
#include "decoder/ops.h"

namespace nb = nanobind;

namespace crelle::cpu {

template <class T, int Dim>
using In = nb::ndarray<const T, nb::ndim<Dim>, nb::c_contig, nb::device::cpu>;
template <class T, int Dim>
using Out = nb::ndarray<T, nb::ndim<Dim>, nb::c_contig, nb::device::cpu>;
using AnyMatrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using AnyCache = nb::ndarray<nb::ndim<5>, nb::c_contig, nb::device::cpu>;

// Rows, columns and heads that kernels count in an int, and round up.
constexpr size_t kMostCount = size_t(std::numeric_limits<int>::max()) - 1024;

inline void require(bool ok, const char *what) {
  if (!ok) throw std::invalid_argument(what);
}
inline void require(bool ok, const std::string &what) { require(ok, what.c_str()); }

// A kernel over bf16 tiles: emulated, or by AMX, which only x86 has: CRELLE_AMX gives its address, or null.
#if defined(__x86_64__)
#define CRELLE_AMX(kernel) (&(kernel))
#else
#define CRELLE_AMX(kernel) nullptr
#endif
template <class Kernel>
const Kernel &tile_kernel(bool emulate, const Kernel &emulated, const std::type_identity_t<Kernel> *amx) {
  if (emulate) return emulated;
  const bool found = std::any_of(isas().begin(), isas().end(), [](auto *p) { return !std::strcmp(p->name, "amx"); });
  require(amx && found, "this machine has no AMX");
  return *amx;
}

inline DType dtype_of(nb::dlpack::dtype d) {
  if (d == nb::dtype<float>()) return DType::F32;
  require(d.bits == 16 && d.lanes == 1, "values must be f32, f16 or bf16");
  if (d.code == uint8_t(nb::dlpack::dtype_code::Float)) return DType::F16;
  require(d.code == uint8_t(nb::dlpack::dtype_code::Bfloat), "values must be f32, f16 or bf16");
  return DType::BF16;
}

inline bool is_bf16(nb::dlpack::dtype d) {
  return d.bits == 16 && d.lanes == 1 && d.code == uint8_t(nb::dlpack::dtype_code::Bfloat);
}

inline DType f32_or_bf16(nb::dlpack::dtype d, const char *otherwise) {
  require(d == nb::dtype<float>() || is_bf16(d), otherwise);
  return dtype_of(d);
}

inline Dense dense_of(const AnyMatrix &a) {
  return {static_cast<const uint8_t *>(a.data()), dtype_of(a.dtype()), int(a.shape(0)), int(a.shape(1))};
}

inline Activation activation_of(const std::string &name) {
  if (name == "silu") return Activation::Silu;
  if (name == "gelu") return Activation::Gelu;
  if (name == "gelu_tanh") return Activation::GeluTanh;
  if (name == "relu") return Activation::Relu;
  if (name == "swigluoai") return Activation::SwigluOai;
  throw std::invalid_argument("there is no activation '" + name + "'");
}

inline Precision precision_of(const std::string &name) {
  if (name == "int8") return Precision::Int8;
  if (name == "exact") return Precision::Exact;
  throw std::invalid_argument("precision must be 'int8' or 'exact', got '" + name + "'");
}

void bind_timing(nb::module_ &m);
void bind_ops(nb::module_ &m);
void bind_row_ops(nb::module_ &m);
void bind_solver(nb::module_ &m);
void bind_groups(nb::module_ &m);
void bind_stats(nb::module_ &m);
void bind_bf16_gemm(nb::module_ &m);
void bind_i16_gemm(nb::module_ &m);
void bind_bf16_attention(nb::module_ &m);
void bind_f32_attention(nb::module_ &m);
void bind_integer(nb::module_ &m);
void bind_trellis(nb::module_ &m);
void bind_decoder(nb::module_ &m);

}  // namespace crelle::cpu
