#include "planes/weight.h"

#include <algorithm>
#include <array>

#include "base/half.h"
#include "isa/isa.h"
#include "base/pool.h"

namespace crelle::cpu {
namespace {

// spread[n]: bit j of the nibble n at bit 0 of byte j.
constexpr std::array<uint32_t, 16> kSpread = [] {
  std::array<uint32_t, 16> t{};
  for (uint32_t n = 0; n < 16; ++n) t[n] = (n & 1) | (n >> 1 & 1) << 8 | (n >> 2 & 1) << 16 | (n >> 3 & 1) << 24;
  return t;
}();

// The eight inputs 8j...8j+7 of a chunk as stored, or zeros beyond the group and beyond row N.
struct Source {
  const Stored &s;
  size_t row_bytes;

  uint8_t byte(int p, int n, int g, int chunk, int j) const {
    const int in_group = chunk * kChunk + 8 * j, inputs = std::min(s.G, s.K - g * s.G);
    if (n >= s.N || in_group >= inputs) return 0;
    return s.planes[(size_t(p) * s.N + n) * row_bytes + (size_t(g) * s.G + in_group) / 8];
  }
};

void put_dword(uint8_t *at, uint32_t v) { std::memcpy(at, &v, 4); }

// The field that holds the bit of weight 2^place of codes of P bits: see Stream::Fields.
struct Field {
  int first = 0, width = 8, bit;  // vectors and lower bits before it; its bits; which of them

  Field(int P, int place) {
    for (; !(P & width) || place >= first + width; width /= 2) first += P & width;
    bit = place - first;
  }
  // Inputs 4 u ... 4 u + 3 of row r: where their bytes lie in a chunk, and the bit's place in each.
  size_t at(const Weight &w, int r, int u) const {
    const int lanes = w.R / 4;
    return ((size_t(r / lanes) * w.P + first + u * width / 8) * lanes + r % lanes) * 4;
  }
  int shift(int u) const { return u * width % 8 + bit; }
};

void pack_fields(const Weight &w, const Source &src, int first, int g, int c, uint8_t *out) {
  std::fill_n(out, w.chunk_bytes, uint8_t{0});
  for (int p = 0; p < w.P; ++p) {
    const Field field(w.P, w.P - 1 - p);
    const uint32_t inverted = w.P == 8 && p == 0 ? 0x01010101u : 0;  // q - kByteZero
    for (int r = 0; r < w.R; ++r)
      for (int j = 0; j < 4; ++j) {
        const uint8_t eight = src.byte(p, first + r, g, c, j);
        for (int half = 0; half < 2; ++half) {
          const int u = 2 * j + half;
          uint8_t *const to = out + field.at(w, r, u);
          uint32_t four;
          std::memcpy(&four, to, 4);
          put_dword(to, four | (kSpread[eight >> 4 * half & 15] ^ inverted) << field.shift(u));
        }
      }
  }
}

void pack_chunk(const Weight &w, const Source &src, int b, int g, int c, uint8_t *out) {
  const int first = b * w.R;
  if (w.stream == Stream::BytePlanes) {
    for (int j = 0; j < 4; ++j)
      for (int p = 0; p < w.P; ++p)
        for (int i = 0; i < w.R; ++i) *out++ = src.byte(p, first + byte_plane_row(i, w.R), g, c, j);
    return;
  }
  if (w.stream == Stream::QuadPlanes) {
    for (int r = 0; r < w.R; r += 16)
      for (int p = 0; p < w.P; ++p)
        for (int i = 0; i < 16; ++i)
          for (int j = 0; j < 4; ++j) *out++ = src.byte(p, first + r + i, g, c, j);
    return;
  }
  if (w.stream == Stream::Fields) return pack_fields(w, src, first, g, c, out);
  for (int j = 0; j < 4; ++j)
    for (int half = 0; half < (w.stream == Stream::Bytes ? 2 : 1); ++half)
      for (int r = 0; r < w.R; ++r, out += 4) {
        uint32_t codes = 0;  // four inputs, a byte each; for nibbles the next four in the upper halves
        for (int p = 0; p < w.P; ++p) {
          const uint8_t bits = src.byte(p, first + r, g, c, j);
          const int place = w.P - 1 - p;
          if (w.stream == Stream::Nibbles)
            codes |= kSpread[bits & 15] << place | kSpread[bits >> 4] << (place + 4);
          else
            codes |= kSpread[half ? bits >> 4 : bits & 15] << place;
        }
        put_dword(out, codes);
      }
}

void put_scales(const Weight &w, const float *values, size_t stride, int rows, uint8_t *at) {
  for (int r = 0; r < w.R; ++r) {
    const float v = r < rows ? values[r * stride] : 0.0f;
    if (w.wide_scales)
      std::memcpy(at + 4 * r, &v, 4);
    else {
      const uint16_t h = half_of_float(v);
      std::memcpy(at + 2 * r, &h, 2);
    }
  }
}

void pack_block(const Weight &w, const Stored &s, int b, uint8_t *out) {
  const Source src{s, size_t(s.K + 7) / 8};
  const int first = b * w.R, rows = std::min(w.R, w.N - first), C = w.partition.groups;
  if (w.kind == Kind::Uniform && w.bias)
    for (int g = 0; g < C; ++g)
      for (int r = 0; r < rows; ++r) out[g * w.R + r] = s.zero[size_t(first + r) * C + g];
  out += w.zeros_bytes;
  const size_t set = w.R * w.scale_size();
  for (int g = 0; g < C; ++g) {
    const size_t at = size_t(first) * C + g;  // of [N, C]
    if (w.kind == Kind::Bcq) {
      for (int p = 0; p < w.P; ++p) put_scales(w, s.scale + size_t(p) * s.N * C + at, C, rows, out + p * set);
      if (w.bias) put_scales(w, s.z + at, C, rows, out + w.P * set);
    } else {
      put_scales(w, s.scale + at, C, rows, out);
      if (w.kind == Kind::Affine) put_scales(w, s.z + at, C, rows, out + set);
    }
    out += w.scale_bytes;
    for (int c = 0; c < w.partition.chunks_of(g); ++c, out += w.chunk_bytes) pack_chunk(w, src, b, g, c, out);
  }
}

bool all_fit_half(const float *v, size_t n) {
  for (size_t i = 0; i < n; ++i)
    if (float_of_half(half_of_float(v[i])) != v[i]) return false;
  return true;
}

size_t padded(size_t n) { return (n + 63) / 64 * 64; }

}  // namespace

Weight prepare_weight(const Stored &s, const Isa &isa) {
  Weight w;
  w.isa = &isa;
  w.kind = s.kind;
  w.stream = isa.stream(s.kind, s.P);
  w.N = s.N, w.K = s.K, w.P = s.P;
  w.partition = KPartition(s.K, s.G);
  w.R = isa.rows;
  w.blocks = (s.N + w.R - 1) / w.R;
  const bool bcq = s.kind == Kind::Bcq, affine = s.kind == Kind::Affine;
  w.bias = bcq ? s.z != nullptr : s.zero != nullptr;
  const size_t each = size_t(s.N) * w.partition.groups;
  w.wide_scales = !all_fit_half(s.scale, bcq ? s.P * each : each) || (s.z && !all_fit_half(s.z, each));
  w.chunk_bytes = size_t(w.R) * (w.stream == Stream::Bytes ? 32 : 4 * s.P);
  w.scale_bytes = padded(w.R * w.scale_size() * (bcq ? s.P + w.bias : affine ? 2 : 1));
  w.zeros_bytes = !bcq && w.bias ? padded(size_t(w.partition.groups) * w.R) : 0;
  w.block_bytes = w.zeros_bytes + w.partition.chunks * w.chunk_bytes + w.partition.groups * w.scale_bytes;
  w.data.grow(w.blocks * w.block_bytes);
  uint8_t *data = w.data.data();
  Pool::get().run([&](int t, int n) {
    for (int b = part(w.blocks, t, n); b < part(w.blocks, t + 1, n); ++b) pack_block(w, s, b, data + b * w.block_bytes);
  });
  return w;
}

float scale_at(const Weight &w, const uint8_t *at, int i) {
  if (w.wide_scales) {
    float f;
    std::memcpy(&f, at + 4 * i, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, at + 2 * i, 2);
  return float_of_half(h);
}

void dequantize_row(const Weight &w, int n, float *out) {
  if (w.stream == Stream::Mixed) return dequantize_mixed_row(w, n, out);
  if (w.stream == Stream::Integer) return dequantize_integer_row(w, n, out);
  if (w.stream == Stream::Trellis) return dequantize_trellis_row(w, n, out);
  const int r = n % w.R;
  const uint8_t *at = w.block(n / w.R), *zeros = at;
  at += w.zeros_bytes;
  const size_t set = w.R * w.scale_size();
  const auto scale = [&](const uint8_t *p) { return scale_at(w, p, r); };
  int byte = 0;  // of Stream::BytePlanes
  while (byte_plane_row(byte, w.R) != r) ++byte;
  // Bit of input k of a chunk in plane p, or its whole code.
  const auto code = [&](const uint8_t *chunk, int k) -> int {
    const int j = k / 8, i = k % 8;
    int value = 0;
    switch (w.stream) {
      case Stream::QuadPlanes:
        for (int p = 0; p < w.P; ++p) value = value << 1 | (chunk[((r / 16 * w.P + p) * 16 + r % 16) * 4 + j] >> i & 1);
        return value;
      case Stream::BytePlanes:
        for (int p = 0; p < w.P; ++p) value = value << 1 | (chunk[(j * w.P + p) * w.R + byte] >> i & 1);
        return value;
      case Stream::Nibbles: return chunk[(j * w.R + r) * 4 + i % 4] >> (i < 4 ? 0 : 4) & 15;
      case Stream::Fields:
        for (int place = 0; place < w.P; ++place) {
          const Field field(w.P, place);
          value |= (chunk[field.at(w, r, k / 4) + k % 4] >> field.shift(k / 4) & 1) << place;
        }
        return w.P == 8 ? value ^ kByteZero : value;
      case Stream::Bytes: return chunk[((j * 2 + i / 4) * w.R + r) * 4 + i % 4];
      case Stream::Mixed:
      case Stream::Integer:
      case Stream::Trellis: break;
    }
    return 0;
  };
  for (int g = 0; g < w.partition.groups; ++g) {
    const uint8_t *scales = at;
    at += w.scale_bytes;
    float *o = out + size_t(g) * w.partition.G;
    for (int k = 0; k < w.partition.inputs_of(g); ++k) {
      const int q = code(at + k / kChunk * w.chunk_bytes, k % kChunk);
      if (w.kind == Kind::Uniform) {
        const int zero = w.bias ? zeros[g * w.R + r] : 1 << (w.P - 1);
        o[k] = scale(scales) * static_cast<float>(q - zero);
      } else if (w.kind == Kind::Affine) {
        o[k] = scale(scales + set) + scale(scales) * static_cast<float>(q);
      } else {
        float sum = 0;
        for (int p = w.P - 1; p >= 0; --p) {
          const float alpha = scale(scales + p * set);
          sum += q >> (w.P - 1 - p) & 1 ? alpha : -alpha;
        }
        o[k] = w.bias ? sum + scale(scales + w.P * set) : sum;
      }
    }
    at += w.partition.chunks_of(g) * w.chunk_bytes;
  }
}

}  // namespace crelle::cpu
