#include "isa/isa.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace crelle::cpu {

#if defined(__x86_64__)
namespace {

struct Features {
  bool avx2 = false, avx_vnni = false, avx512 = false, avx512_vnni = false, vbmi = false, amx = false;
};

// cpuid says what the core has, xgetbv which registers the system saves; both must agree.
Features detect() {
  Features f;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d)) return f;
  const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
  if (!osxsave || !avx) return f;
  unsigned lo, hi;
  __asm__("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  const bool ymm = (lo & 0x06) == 0x06, zmm = (lo & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
  const bool avx2 = b >> 5 & 1;
  const bool foundation = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
  const bool vbmi = c >> 1 & 1, vnni = c >> 11 & 1;
  f.avx2 = ymm && avx2 && fma && f16c;
  f.avx512 = f.avx2 && zmm && foundation && dq && bw && vl;
  f.avx512_vnni = f.avx512 && vnni;
  f.vbmi = f.avx512_vnni && vbmi;
  const bool amx_bf16 = d >> 22 & 1, amx_tile = d >> 24 & 1, amx_int8 = d >> 25 & 1;
  const bool tiles_saved = (lo >> 17 & 3) == 3;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return f;
  const bool avx_vnni = a >> 4 & 1, avx512_bf16 = a >> 5 & 1;
  f.avx_vnni = f.avx2 && avx_vnni;
  f.amx = f.vbmi && avx512_bf16 && amx_bf16 && amx_int8 && amx_tile && tiles_saved && request_amx();
  return f;
}

// AMX: the streams of VBMI, tiles for many rows.
Isa with_tiles(const char *name, const Gemm &gemm) {
  Isa isa = kVbmi;
  isa.name = name;
  isa.gemm = &gemm;
  isa.matmul = matmul_digits;
  isa.integer = &kIntegerAmx;
  return isa;
}

}  // namespace
#elif defined(__aarch64__)
namespace {

bool has_dotprod() {
#if defined(__linux__)
  constexpr unsigned long kDotprod = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & kDotprod;
#else
  return true;  // every other system's machines are newer
#endif
}

}  // namespace
#endif

const std::vector<const Isa *> &isas() {
  static const std::vector<const Isa *> list = [] {
    std::vector<const Isa *> v;
#if defined(__x86_64__)
    const Features f = detect();
    static const Isa amx = with_tiles("amx", kAmxGemm);
    if (f.amx) v.push_back(&amx);
    const auto add = [&](bool has, const Isa &set) {
      if (has && set.matmul) v.push_back(&set);  // left_out.cpp
    };
    add(f.vbmi, kVbmi), add(f.avx512_vnni, kAvx512Vnni), add(f.avx512, kAvx512), add(f.avx_vnni, kAvxVnni);
    if (f.avx2) v.push_back(&kAvx2);
#elif defined(__aarch64__)
    if (has_dotprod()) v.push_back(&kDotprod);
    v.push_back(&kNeon);
#endif
    v.push_back(&kGeneric);
    return v;
  }();
  return list;
}

namespace {

std::atomic<const Isa *> chosen{nullptr};

// A set whose f32 tiles multiply all that they can, also where that is slower: for tests.
struct F32Only {
  Gemm gemm;
  Isa isa;

  F32Only(const char *name, const Isa &of, const Gemm &tiles) : gemm(tiles), isa(of) {
    gemm.takes = [](const Weight &w, Precision) { return w.stream == Stream::Mixed || takes_tables(w.stream); };
    isa.name = name;
    isa.gemm = &gemm;
  }
};

// Those that are only had by name: the same instruction set with another choice of tiles.
std::vector<const Isa *> variants() {
  static const F32Only generic("generic-tiles", kGeneric, kF32Generic);
  std::vector<const Isa *> v{&generic.isa};
#if defined(__x86_64__)
  static const Isa by_int8 = with_tiles("amx-int8", kAmxInt8Gemm), by_bf16 = with_tiles("amx-bf16", kAmxBf16Gemm);
  static const F32Only avx2("avx2-tiles", kAvx2, kF32Avx2), avx512("avx512-tiles", kAvx512, kF32Avx512),
      vbmi("vbmi-tiles", kVbmi, kF32Avx512);
  for (const F32Only *set : {&avx2, &avx512, &vbmi})
    for (const Isa *p : isas())
      if (std::string(set->isa.name) == std::string(p->name) + "-tiles") v.push_back(&set->isa);
  if (isas().front()->gemm == &kAmxGemm) v.insert(v.end(), {&by_int8, &by_bf16});
#endif
  return v;
}

}  // namespace

const Isa &isa() {
  const Isa *p = chosen.load(std::memory_order_relaxed);
  return p ? *p : *isas().front();
}

bool set_isa(const std::string &name) {
  for (const auto &list : {isas(), variants()})
    for (const Isa *p : list)
      if (name == p->name) {
        chosen.store(p, std::memory_order_relaxed);
        return true;
      }
  return false;
}

}  // namespace crelle::cpu
