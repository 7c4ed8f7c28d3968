// N neighbouring values, read and written in one access.
#pragma once

namespace crelle {

template <int N, typename T>
struct __align__(N * sizeof(T)) Vector {
  T v[N];
};

}  // namespace crelle
