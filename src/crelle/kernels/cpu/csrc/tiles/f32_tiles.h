// Tiles of f32 for instruction sets without AMX: planes and mixed matrices by many rows of x.
//
// Look-ups cost the same for every row of x, for each plane. Here a panel of weights is dequantized once for all rows:
// 128 inputs of some outputs, which stay in L1, times tiles of 16 rows of x that lie side by side. A weight is
// broadcast and multiplied by a vector of rows, so no sum crosses lanes: a row of x has the same bits in any batch, and
// sums run from the first input to the last. x is not rounded.
//
//   panel   [input][output]
//   x       [input][16 rows], in the order of the stream (mixed matrices: 2-bit groups before 4-bit groups)
//
// Included inside a namespace of the including file, after simd.h.

constexpr int kDepth = 64;                                             // inputs of a panel
constexpr int kWidth = kPartLanes == 16 ? 64 : 32;                     // outputs of a panel
constexpr int kTall = kPartLanes == 16 ? 8 : kPartLanes == 8 ? 6 : 4;  // outputs multiplied at a time
constexpr int kWide = kPartLanes == 16 ? 2 : 1;                        // tiles of x at a time

struct alignas(64) Panel {
  float values[kDepth][kWidth];
  int output[kWidth];  // which one of the panel's outputs stands there
};

CRELLE_INLINE PartInt load_ints(const void *p) {
  PartInt v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// `count` floats, a multiple of 16, of f16 or f32.
inline void widen_scales(const Weight &w, const uint8_t *at, int count, float *out) {
  for (int i = 0; i < count; i += kLanes)
    store(out + i,
          w.wide_scales ? load(reinterpret_cast<const float *>(at) + i) : load(reinterpret_cast<const Half *>(at) + i));
}

// w = offset + sum of +-alpha, by the bit of each plane; minus: -alpha, to which a set bit gives the other sign.
template <int L>
struct PlaneLevels {
  float minus[8][L], offset[L];
};

// Levels of a group for the R outputs of a block, in the order of a panel.
template <int R>
inline void load_levels(const Weight &w, const uint8_t *scales, const uint8_t *zeros, const int *output,
                        PlaneLevels<R> &levels) {
  const bool bcq = w.kind == Kind::Bcq;
  const int P = w.P, sets = bcq ? P + w.bias : 1;
  alignas(64) float plain[9 * R];
  widen_scales(w, scales, sets * R, plain);
  if (bcq) {
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < R; ++i) levels.minus[p][i] = -plain[p * R + output[i]];
    for (int i = 0; i < R; ++i) levels.offset[i] = w.bias ? plain[P * R + output[i]] : 0.0f;
    return;
  }
  const float middle = 0.5f * static_cast<float>((1 << P) - 1), usual = static_cast<float>(1 << (P - 1));
  for (int i = 0; i < R; ++i) {
    const float scale = plain[output[i]], zero = w.bias ? static_cast<float>(zeros[output[i]]) : usual;
    for (int p = 0; p < P; ++p) levels.minus[p][i] = -0.5f * static_cast<float>(1 << (P - 1 - p)) * scale;
    levels.offset[i] = scale * (middle - zero);
  }
}

// The order in which plane_chunk writes the outputs of a block.
inline void plane_outputs(const Weight &w, int first, int *output) {
  for (int i = 0; i < w.R; ++i) {
    const int byte = 4 * (i % kPartLanes) + i / kPartLanes;
    const int row = w.stream == Stream::QuadPlanes ? i : byte_plane_row(byte, w.R);
    output[i] = first + row;
  }
}

// One vector of outputs for 8 inputs, whose bits lie in dwords from bit `Shift` on.
template <int P, int R, int Shift>
CRELLE_INLINE void plane_values(const PartInt (&bits)[P], const PlaneLevels<R> &levels, int at, int inputs,
                                float (*out)[kWidth], int column) {
  Part minus[P];
  for (int p = 0; p < P; ++p) minus[p] = load_part(levels.minus[p] + at);
  const Part offset = load_part(levels.offset + at);
  const auto one = [&](auto i) __attribute__((always_inline)) {
    if (i >= inputs) return;
    Part v = offset;
    for (int p = 0; p < P; ++p) v += (Part)(((bits[p] << (31 - Shift - i)) & int(0x80000000)) ^ (PartInt)minus[p]);
    store_part(out[i] + column, v);
  };
  const auto all = [&]<int... i>(std::integer_sequence<int, i...>)
                       __attribute__((always_inline)) { (one(std::integral_constant<int, i>{}), ...); };
  all(std::make_integer_sequence<int, 8>{});
}

// `inputs` of a chunk for the outputs of a block.
template <int P, Stream S, int R>
void plane_chunk(const uint8_t *chunk, const PlaneLevels<R> &levels, int inputs, float (*out)[kWidth], int column) {
  constexpr int L = kPartLanes;
  PartInt bits[P];
  if constexpr (S == Stream::BytePlanes) {
    for (int j = 0; 8 * j < inputs; ++j, chunk += P * R) {
      for (int p = 0; p < P; ++p) bits[p] = load_ints(chunk + p * R);
      plane_values<P, R, 0>(bits, levels, 0, inputs - 8 * j, out + 8 * j, column);
      plane_values<P, R, 8>(bits, levels, L, inputs - 8 * j, out + 8 * j, column + L);
      plane_values<P, R, 16>(bits, levels, 2 * L, inputs - 8 * j, out + 8 * j, column + 2 * L);
      plane_values<P, R, 24>(bits, levels, 3 * L, inputs - 8 * j, out + 8 * j, column + 3 * L);
    }
  } else {
    for (int r = 0; r < R; r += L) {
      for (int p = 0; p < P; ++p) bits[p] = load_ints(chunk + (r / 16 * P + p) * 64 + r % 16 * 4);
      plane_values<P, R, 0>(bits, levels, r, inputs, out, column + r);
      plane_values<P, R, 8>(bits, levels, r, inputs - 8, out + 8, column + r);
      plane_values<P, R, 16>(bits, levels, r, inputs - 16, out + 16, column + r);
      plane_values<P, R, 24>(bits, levels, r, inputs - 24, out + 24, column + r);
    }
  }
}

// Goes through the chunks of a row's groups, up to kDepth inputs at a time.
struct PlaneWalk {
  const Weight &w;
  int group = 0, chunk = 0;

  bool done() const { return group == w.partition.groups; }
  // Fills `panel` for blocks [b, b + count) and goes on; returns the number of inputs.
  template <Stream S, int R>
  int fill(int b, int count, Panel &panel) {
    using Chunk = void (*)(const uint8_t *, const PlaneLevels<R> &, int, float (*)[kWidth], int);
    static constexpr Chunk kChunks[] = {plane_chunk<1, S, R>, plane_chunk<2, S, R>, plane_chunk<3, S, R>,
                                        plane_chunk<4, S, R>, plane_chunk<5, S, R>, plane_chunk<6, S, R>,
                                        plane_chunk<7, S, R>, plane_chunk<8, S, R>};
    const KPartition &k = w.partition;
    int depth = 0, g = 0, c = 0, output[R];
    plane_outputs(w, 0, output);
    for (int i = 0; i < count; ++i) {
      plane_outputs(w, i * R, panel.output + i * R);
      depth = 0, g = group, c = chunk;
      while (g < k.groups && depth + kChunk <= kDepth) {
        const uint8_t *const block = w.block(b + i);
        const size_t group_bytes = w.scale_bytes + k.full_chunks * w.chunk_bytes;
        const uint8_t *const scales = block + w.zeros_bytes + g * group_bytes;
        PlaneLevels<R> levels;
        load_levels(w, scales, block + g * R, output, levels);
        for (; c < k.chunks_of(g) && depth + kChunk <= kDepth; ++c) {
          const int left = k.inputs_of(g) - c * kChunk, inputs = left < kChunk ? left : kChunk;
          kChunks[w.P - 1](scales + w.scale_bytes + c * w.chunk_bytes, levels, inputs, panel.values + depth, i * R);
          depth += inputs;
        }
        if (c == k.chunks_of(g)) ++g, c = 0;
      }
    }
    group = g, chunk = c;
    return depth;
  }
};

// Outliers of some blocks by panel of inputs: lists, first [panels].
struct Outlier {
  float value;
  int input, column, next;
};
struct Outliers {
  Buffer first_buffer, all_buffer;
  int *first = nullptr;
  Outlier *all = nullptr;

  void clear(int panels, size_t count) {
    first_buffer.grow(panels * sizeof(int)), all_buffer.grow(count * sizeof(Outlier) + 1);
    first = reinterpret_cast<int *>(first_buffer.data()), all = reinterpret_cast<Outlier *>(all_buffer.data());
    for (int i = 0; i < panels; ++i) first[i] = -1;
  }
};

// Mixed matrices: words of 16 inputs, those of 2 bits first; what a word lacks is multiplied by zeros of x.
struct MixedWalk {
  static constexpr int kWords = kDepth / kWord;  // of a panel
  const Weight &w;
  const int32_t *place;  // of each group of inputs among those of the stream
  Outliers &outliers;
  int word = 0;

  int words() const { return w.mixed->words2 + w.mixed->words4; }
  bool done() const { return word == words(); }

  // Value r of those at `at`, f16 or f32.
  float value_at(const uint8_t *at, int r) const {
    float value;
    Half half;
    __builtin_memcpy(&half, at + 2 * r, 2);
    if (!w.mixed->wide) return float_of_half(half.bits);
    __builtin_memcpy(&value, at + 4 * r, 4);
    return value;
  }

  // Scale and scale times zero of a 2-bit group for the outputs of a block.
  void scales2(const uint8_t *header, int j, float *scale, float *low) const {
    const MixedLayout &l = *w.mixed;
    float second = 0;
    if (!l.decoded) {
      Half half;
      __builtin_memcpy(&half, header + kHeaderSecond + 2 * j, 2);
      second = float_of_half(half.bits);
    }
    for (int r = 0; r < kMixedRows; ++r) {
      const int code = header[j / 2 * kMixedRows + r] >> 4 * (j % 2) & 15;
      scale[r] = second * static_cast<float>(code + header[kHeaderSecondZeros + j]);
    }
    if (l.decoded) __builtin_memcpy(scale, header + kUnitHeader + 4 * j * kMixedRows, 4 * kMixedRows);
    for (int r = 0; r < kMixedRows; ++r)
      low[r] = -0.5f * static_cast<float>((header[kHeaderZeros + r] >> 2 * j & 3) + 1) * scale[r];
  }

  // 8 or 16 inputs of `bits` bits: field f of byte i of an output's dword is input i + 4 f.
  template <int Bits>
  static CRELLE_INLINE void word_values(const uint8_t *codes, const float *scale, const float *low, int field,
                                        int fields, float (*out)[kWidth], int column) {
    for (int r = 0; r < kMixedRows; r += kPartLanes) {
      const PartInt v = load_ints(codes + 4 * r);
      const Part s = load_part(scale + r), z = load_part(low + r);
      for (int f = field; f < field + fields; ++f)
        for (int i = 0; i < 4; ++i) {
          const PartInt q = (v >> (8 * i + Bits * f)) & ((1 << Bits) - 1);
          store_part(out[4 * f + i] + column + r, z + s * __builtin_convertvector(q, Part));
        }
    }
  }

  int fill(int b, int count, Panel &panel) {
    const MixedLayout &l = *w.mixed;
    if (word == 0) collect_outliers(b, count);
    const int end = words() - word < kWords ? words() : word + kWords;
    for (int i = 0; i < count; ++i) {
      const int column = i * kMixedRows;
      for (int r = 0; r < kMixedRows; ++r) panel.output[column + r] = column + r;
      const uint8_t *const head = w.block(b + i), *const four = head + l.head_bytes(),
                           *const two = four + l.words4 * kWord4Bytes;
      alignas(64) float scale[kMixedRows], low[kMixedRows];
      int loaded = -1;  // the 2-bit group whose scales are there
      const auto load_group = [&](int group) {
        if (group == loaded) return;
        scales2(two + group / kUnitGroups * l.unit_bytes(), group % kUnitGroups, scale, low);
        loaded = group;
      };
      int at = word;
      for (; at < end && at < l.words2; ++at) {
        const int unit_words = kUnitGroups * l.G / kWord;
        const uint8_t *const codes =
            two + at / unit_words * l.unit_bytes() + l.header_bytes() + at % unit_words * kWord2Bytes;
        float (*const out)[kWidth] = panel.values + (at - word) * kWord;
        const int group = at * kWord / l.G;
        load_group(group);
        word_values<2>(codes, scale, low, 0, l.G == 8 ? 2 : 4, out, column);
        if (l.G != 8) continue;
        load_group(group + 1);
        word_values<2>(codes, scale, low, 2, 2, out, column);
      }
      if (at < end)
        for (int r = 0; r < kMixedRows; ++r) {
          scale[r] = value_at(head, r);
          low[r] = -scale[r] * static_cast<float>(head[l.zeros_at() + r]);
        }
      for (; at < end; ++at) {
        const uint8_t *const codes = four + (at - l.words2) * kWord4Bytes;
        float (*const out)[kWidth] = panel.values + (at - word) * kWord;
        word_values<4>(codes, scale, low, 0, 2, out, column);
        word_values<4>(codes + kWord4Bytes / 2, scale, low, 0, 2, out + 8, column);
      }
    }
    for (int i = outliers.first[word / kWords]; i >= 0; i = outliers.all[i].next) {
      const Outlier &o = outliers.all[i];
      panel.values[o.input - word * kWord][o.column] += o.value;
    }
    const int depth = (end - word) * kWord;
    word = end;
    return depth;
  }

  void collect_outliers(int b, int count) const {
    const MixedLayout &l = *w.mixed;
    const int shift = __builtin_ctz(l.G);  // a group has 8, 16, 32 or 64 inputs
    const auto slots_of = [&](int i) {
      uint32_t slots;
      __builtin_memcpy(&slots, w.block(b + i) + l.slots_at(), 4);
      return slots;
    };
    size_t room = 0;
    for (int i = 0; i < count; ++i) room += slots_of(i) * kMixedRows;
    outliers.clear((words() + kWords - 1) / kWords, room);
    int made = 0;
    for (int i = 0; i < count; ++i) {
      const uint8_t *slot = w.block(b + i) + l.head_bytes() + l.words4 * kWord4Bytes + l.units * l.unit_bytes();
      for (uint32_t left = slots_of(i); left > 0; --left, slot += l.slot_bytes())
        for (int r = 0; r < kMixedRows; ++r) {
          uint16_t column;
          __builtin_memcpy(&column, slot + 2 * r, 2);
          const float value = value_at(slot + 2 * kMixedRows, r);
          if (value == 0) continue;  // also in slots that the row does not need
          const int input = (place[column >> shift] << shift) + (column & (l.G - 1));
          int &first = outliers.first[input / kDepth];
          outliers.all[made] = {value, input, i * kMixedRows + r, first};
          first = made++;
        }
    }
  }
};

// H outputs of a panel from `column` on, T tiles of x: y[output][16] = or += the sums over `depth` inputs.
template <int H, int T>
void multiply_panel(const Panel &panel, int column, const float *x, size_t x_pitch, int depth, float *y, size_t y_pitch,
                    bool add) {
  Part sums[H][T][kParts];
  const int *const output = panel.output + column;
  for (int h = 0; h < H; ++h)
    for (int t = 0; t < T; ++t)
      for (int i = 0; i < kParts; ++i)
        sums[h][t][i] = add ? load_part(y + t * y_pitch + output[h] * kLanes + i * kPartLanes) : Part{};
  const float *values = panel.values[0] + column;
  for (int k = 0; k < depth; ++k, values += kWidth, x += kLanes) {
    Part v[T][kParts];
    for (int t = 0; t < T; ++t)
      for (int i = 0; i < kParts; ++i) v[t][i] = load_part(x + t * x_pitch + i * kPartLanes);
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h) {
      for (int t = 0; t < T; ++t)
        for (int i = 0; i < kParts; ++i) sums[h][t][i] += values[h] * v[t][i];
    }
  }
  for (int h = 0; h < H; ++h)
    for (int t = 0; t < T; ++t)
      for (int i = 0; i < kParts; ++i) store_part(y + t * y_pitch + output[h] * kLanes + i * kPartLanes, sums[h][t][i]);
}

// All outputs of a panel, `width` of them, and T tiles of x.
template <int T>
void multiply_tiles(const Panel &panel, int width, const float *x, size_t x_pitch, int depth, float *y, size_t y_pitch,
                    bool add) {
  int column = 0;
  for (; column + kTall <= width; column += kTall)
    multiply_panel<kTall, T>(panel, column, x, x_pitch, depth, y, y_pitch, add);
  for (; column < width; column += 2) multiply_panel<2, T>(panel, column, x, x_pitch, depth, y, y_pitch, add);
}

inline int packed_inputs(const Weight &w) {
  return w.stream == Stream::Mixed ? (w.mixed->words2 + w.mixed->words4) * kWord : w.K;
}

// Which input of x is packed input i; -1: none.
inline int input_at(const Weight &w, int i) {
  if (w.stream != Stream::Mixed) return i;
  const MixedLayout &l = *w.mixed;
  const int four = i - l.words2 * kWord, at = four < 0 ? i / l.G : l.C2 + four / l.G;
  if (at >= (four < 0 ? l.C2 : l.C2 + l.C4)) return -1;
  const int input = l.order[at] * l.G + (four < 0 ? i : four) % l.G;
  return input < w.K ? input : -1;
}

inline Tiles f32_tiles(const Weight &, Precision) { return Tiles::F32; }
inline size_t f32_bytes(const Weight &w, int M, Precision) {
  return sizeof(float) * kLanes * tiles_of(M) * packed_inputs(w);
}

inline void f32_pack(const Weight &w, const float *x, int M, Precision, uint8_t *out, int tile0, int tile1) {
  const int inputs = packed_inputs(w);
  float *to = reinterpret_cast<float *>(out) + size_t(tile0) * inputs * kLanes;
  for (int tile = tile0; tile < tile1; ++tile)
    for (int k = 0; k < inputs; ++k, to += kLanes) {
      const int input = input_at(w, k);
      for (int m = 0; m < kLanes; ++m) {
        const int row = tile * kTileRows + m;
        to[m] = row < M && input >= 0 ? x[size_t(row) * w.K + input] : 0.0f;
      }
    }
}

inline void f32_pack_tile(const Weight &w, const float *x, Precision, uint8_t *out) {
  auto *to = reinterpret_cast<float *>(out);
  for (int k = 0, n = packed_inputs(w); k < n; ++k, to += kLanes) {
    const int input = input_at(w, k);
    store(to, input >= 0 ? load(x + size_t(input) * kLanes) : Vec{});
  }
}

template <class Walk, class Fill>
void f32_blocks(const Weight &w, const Walk &begin, const float *x, int tiles, float *y, size_t pitch, bool add, int b0,
                int b1, Fill &&fill) {
  const size_t x_pitch = size_t(packed_inputs(w)) * kLanes;
  const int at_once = kWidth / w.R;
  Panel panel;
  for (int b = b0; b < b1; b += at_once) {
    const int count = b1 - b < at_once ? b1 - b : at_once, width = count * w.R;
    float *const outputs = y + size_t(b - b0) * w.R * kLanes;
    const float *from = x;
    bool added = add;
    for (Walk walk = begin; !walk.done(); added = true) {
      const int depth = fill(walk, b, count, panel);
      int t = 0;
      for (; t + kWide <= tiles; t += kWide)
        multiply_tiles<kWide>(panel, width, from + t * x_pitch, x_pitch, depth, outputs + t * pitch, pitch, added);
      if (t < tiles)
        multiply_tiles<1>(panel, width, from + t * x_pitch, x_pitch, depth, outputs + t * pitch, pitch, added);
      from += size_t(depth) * kLanes;
    }
  }
}

// y: from block b0 on.
inline void f32_run_blocks(const Weight &w, const uint8_t *packed, int tiles, float *y, size_t pitch, bool add, int b0,
                           int b1) {
  const auto *x = reinterpret_cast<const float *>(packed);
  if (w.stream == Stream::Mixed) {
    static thread_local Buffer scratch;
    static thread_local Outliers outliers;
    const MixedLayout &l = *w.mixed;
    scratch.grow(l.order.size() * sizeof(int32_t) + 64);
    auto *const place = reinterpret_cast<int32_t *>(scratch.data());
    // Words of 4 bits begin after the last unit.
    for (int i = 0; i < l.C2 + l.C4; ++i) place[l.order[i]] = i < l.C2 ? i : i - l.C2 + l.words2 * kWord / l.G;
    const auto fill = [](MixedWalk &walk, int b, int count, Panel &panel) { return walk.fill(b, count, panel); };
    return f32_blocks(w, MixedWalk{w, place, outliers}, x, tiles, y, pitch, add, b0, b1, fill);
  }
  const auto fill = [&](PlaneWalk &walk, int b, int count, Panel &panel) {
    if constexpr (kPartLanes == 16)
      if (w.stream == Stream::QuadPlanes) return walk.template fill<Stream::QuadPlanes, 32>(b, count, panel);
    return walk.template fill<Stream::BytePlanes, 4 * kPartLanes>(b, count, panel);
  };
  f32_blocks(w, PlaneWalk{w}, x, tiles, y, pitch, add, b0, b1, fill);
}

inline void f32_run_tiles(const Weight &w, const uint8_t *packed, int tiles, Precision, float *y, size_t pitch,
                          bool add, int b0, int b1) {
  f32_run_blocks(w, packed, tiles, y + size_t(b0) * w.R * kLanes, pitch, add, b0, b1);
}

// y [M, N]: 16 rows at a time, turned.
inline void f32_run(const Weight &w, const uint8_t *packed, int M, Precision, float *y, size_t ldy, int b0, int b1) {
  static thread_local Buffer scratch;
  constexpr int kAtOnce = 4;  // blocks
  const int tiles = tiles_of(M);
  const size_t pitch = size_t(kAtOnce) * w.R * kLanes;
  scratch.grow(sizeof(float) * pitch * tiles);
  float *const sums = floats_of(scratch);
  for (int b = b0; b < b1; b += kAtOnce) {
    const int end = b1 - b < kAtOnce ? b1 : b + kAtOnce, n0 = b * w.R, n1 = end * w.R < w.N ? end * w.R : w.N;
    f32_run_blocks(w, packed, tiles, sums, pitch, false, b, end);
    for (int m = 0; m < M; ++m) {
      const float *const from = sums + m / kTileRows * pitch + m % kTileRows;
      for (int n = n0; n < n1; ++n) y[m * ldy + n] = from[(n - n0) * kLanes];
    }
  }
}
