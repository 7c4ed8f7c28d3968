// Memory for weights and activations: 64-byte aligned, on huge pages where the system grants them.
//
// A 4-bit 4096 x 4096 matrix is 8 MB: 2,000 small pages but 4 huge ones. A matrix that is streamed once per token
// misses the TLB on every small page, which costs 10 to 20% of the bandwidth when the stream comes from DRAM.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace crelle::cpu {

// Owns zeroed bytes; movable, not copyable.
class Buffer {
public:
  Buffer() = default;
  explicit Buffer(size_t bytes) { grow(bytes); }
  Buffer(Buffer &&o) noexcept : data_(std::exchange(o.data_, nullptr)), capacity_(std::exchange(o.capacity_, 0)) {}
  Buffer &operator=(Buffer &&o) noexcept {
    std::swap(data_, o.data_);
    std::swap(capacity_, o.capacity_);
    return *this;
  }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() { std::free(data_); }

  // Make room for at least `bytes`; the contents are lost (and zero) when the buffer has to move.
  void grow(size_t bytes) {
    if (bytes <= capacity_) return;
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t align = bytes >= kHuge / 2 ? kHuge : 64;
    const size_t size = (bytes + align - 1) / align * align;
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;
    void *p = std::aligned_alloc(align, size);
    if (!p) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (align == kHuge) madvise(p, size, MADV_HUGEPAGE);
#endif
    std::memset(p, 0, size);
    data_ = static_cast<uint8_t *>(p);
    capacity_ = size;
  }

  uint8_t *data() { return data_; }
  const uint8_t *data() const { return data_; }
  size_t capacity() const { return capacity_; }

private:
  uint8_t *data_ = nullptr;
  size_t capacity_ = 0;
};

inline float *floats_of(Buffer &b) { return reinterpret_cast<float *>(b.data()); }

}  // namespace crelle::cpu
