// Levels of groups of weights: binary coding by alternating least squares, clipped ranges of uniform and affine grids,
// nearest codes. What the CPU does group by group in group_solver.h, from the same initial solutions; torch has it in
// crelle.quantizers (bcq, gptq, alternating_ls), as the reference.
//
// A team of lanes of one warp has a group (sorted_group.cuh, group_levels.cuh). Its weights and running sums stay in
// shared memory from the sort to the last round: 12 bytes a weight, 20 with importances. Groups too large for that lie
// in a workspace in global memory (GLOBAL), where the caches hold what the searches touch.
//
// Groups are [R, G]; importances [C, G], where that of group r is row (first + r) modulo C, or null: all 1. Grid:
// ceil(R / teams), thread blocks of whole warps.
#include "solver/group_levels.cuh"

namespace crelle {

constexpr int THREADS = 128;  // the most of a thread block

// Thread blocks a multiprocessor, as many as no register is spilled for.
__host__ __device__ constexpr int blocks(int bits) { return bits <= 4 ? 4 : bits <= 6 ? 3 : 2; }

struct Groups {
  const float *w, *importance;
  char *workspace;  // `bytes` for each thread block
  long long bytes;
  int R, G, C, first;
};

// Read and sort this team's group; `memory`: shared memory for groups that lie there.
template <class Team, bool GLOBAL>
__device__ __forceinline__ SortedGroup load_group(const Groups &of, char *memory, int &row) {
  const int teams = blockDim.x / Team::LANES, G = of.G;
  row = blockIdx.x * teams + Team::index();
  const int clamped = min(row, of.R - 1);  // lanes without a group repeat the last one
  if (row >= of.R) row = -1;
  if constexpr (GLOBAL) memory = of.workspace + blockIdx.x * of.bytes;
  SortedGroup g = SortedGroup::in(memory, Team::index(), teams, G, of.importance != nullptr);
  const float *const h = of.importance + (size_t)((of.first + clamped) % of.C) * G;
  g.set<Team>(of.w + (size_t)clamped * G, h, G);
  return g;
}

// --- binary coding

// Plane by plane: alpha is the mean size of the residual, whose sign is the next plane. Weights whose signs are alike
// so far are an interval, and their residual is the distance from one value; the codes that begin with these signs
// all have it.
template <int P>
__device__ __forceinline__ Scales<P> greedy_planes(const SortedGroup &g, bool bias) {
  using Team = crelle::Team<P>;
  constexpr int SLOTS = Team::SLOTS;
  Scales<P> s = {};
  s.z = bias ? (float)(g.sum(0, g.n) / g.mass()) : 0.0f;
  float center[SLOTS];
  int first[SLOTS], end[SLOTS];
#pragma unroll
  for (int j = 0; j < SLOTS; j++) center[j] = s.z, first[j] = 0, end[j] = g.n;
#pragma unroll 1
  for (int p = 0; p < P; p++) {
    const int bit = 1 << (P - 1 - p);
    double total = 0;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
      const int code = Team::lane() * SLOTS + j, split = g.place(center[j], first[j], end[j]);
      if (code % (2 * bit) == 0) total += g.distance(center[j], first[j], split, end[j]);
      const bool plus = code & bit;
      first[j] = plus ? split : first[j], end[j] = plus ? end[j] : split;
    }
    const float alpha = (float)(Team::sum(total) / g.mass());
#pragma unroll
    for (int j = 0; j < SLOTS; j++) center[j] += (Team::lane() * SLOTS + j) & bit ? alpha : -alpha;
#pragma unroll
    for (int q = 0; q < P; q++) s.alpha[q] = q == p ? alpha : s.alpha[q];
  }
  return s;
}

template <int P>
__device__ __forceinline__ Scales<P> uniform_planes(const SortedGroup &g, const SignBook<P> &book) {
  float low = g.low(), high = g.high();
  if (!book.bias) high = fmaxf(fabsf(high), fabsf(low)), low = -high;
  const float step = (high - low) / (float)(book.levels() - 1);
  Scales<P> s;
#pragma unroll
  for (int p = 0; p < P; p++) s.alpha[p] = book.has(p) ? step * (float)(1 << (P - 1 - p)) / 2 : 0.0f;
  s.z = (low + high) / 2;
  return s;
}

// Planes move up by one, for another plane behind them.
template <int P>
__device__ __forceinline__ Scales<P> with_plane(const Scales<P> &s, float alpha) {
  Scales<P> more;
#pragma unroll
  for (int p = 0; p + 1 < P; p++) more.alpha[p] = s.alpha[p + 1];
  more.alpha[P - 1] = alpha, more.z = s.z;
  return more;
}

// One plane more, greedily on the residual.
template <int P>
__device__ __forceinline__ Scales<P> grown(const SortedGroup &g, const SignBook<P> &book, const Scales<P> &s) {
  Intervals<SignBook<P>> at;
  at.set(g, book, s);
  double total = 0;
#pragma unroll
  for (int j = 0; j < at.SLOTS; j++) {
    const int a = at.first[j], b = at.first[j + 1];
    if (at.place(j) < book.levels()) total += g.distance(at.level[j], a, g.place(at.level[j], a, b), b);
  }
  return with_plane(s, (float)(Team<P>::sum(total) / g.mass()));
}

// For each number of planes the best from three starts, before and after alternating: greedy, uniform, and the best
// solution of one plane fewer with a greedy plane more. left: all greedy planes, from which each number takes one more.
template <int P>
__device__ __forceinline__ Scales<P> best_planes(const SortedGroup &g, SignBook<P> book, Scales<P> left, int rounds) {
  Scales<P> greedy = {}, more = {};
  greedy.z = left.z;
#pragma unroll 1
  for (int planes = 1;; planes++) {
    book.planes = planes;
    greedy = with_plane(greedy, left.alpha[0]), left = with_plane(left, 0);
    const Scales<P> uniform = uniform_planes(g, book);
    const int starts = planes > 1 ? 3 : 2;
    Best<SignBook<P>> best;
#pragma unroll 1
    for (int k = 0; k < 2 * starts; k++) {
      const int start = k % starts;
      Scales<P> s = more;
      if (start == 0) s = greedy;
      if (start == 1) s = uniform;
      alternate(g, book, k < starts ? 0 : rounds, s);
      best.add(g, book, s);
    }
    if (planes == P) return best.found;
    more = grown(g, book, best.found);
  }
}

// alpha [R, P], z [R]; rounds = 0: greedy.
template <int P, bool GLOBAL>
__global__ void __launch_bounds__(THREADS, blocks(P))
    binary_scales(const __grid_constant__ Groups of, float *alpha, float *z, int rounds, bool bias) {
  using Team = crelle::Team<P>;
  extern __shared__ __align__(128) char shared[];
  double *const scratch = reinterpret_cast<double *>(shared);
  constexpr int STRIDE = 2 * Team::LEVELS + 1;  // odd: teams of a warp use different banks
  int row;
  const SortedGroup g = load_group<Team, GLOBAL>(of, shared + blockDim.x / Team::LANES * STRIDE * sizeof(double), row);
  Scales<P> s = greedy_planes<P>(g, bias);
  if (rounds) s = best_planes<P>(g, {P, bias, scratch + Team::index() * STRIDE}, s, rounds);
  if (Team::lane() || row < 0) return;
#pragma unroll
  for (int p = 0; p < P; p++) alpha[(size_t)row * P + p] = g.n ? s.alpha[p] : 0.0f;
  z[row] = g.n ? s.z : 0.0f;
}

// The code of the level nearest to each weight, codes [R, G]; ties go to the lower level.
template <int P>
__global__ void __launch_bounds__(THREADS)
    binary_codes(const float *__restrict__ w, const float *__restrict__ alpha, const float *__restrict__ z,
                 unsigned char *codes, int R, int G) {
  using Team = crelle::Team<P>;
  extern __shared__ __align__(128) char shared[];
  constexpr int LEVELS = Team::LEVELS, STRIDE = LEVELS + 1;
  const int teams = blockDim.x / Team::LANES, row = blockIdx.x * teams + Team::index(), clamped = min(row, R - 1);
  float *const borders = reinterpret_cast<float *>(shared) + Team::index() * STRIDE;
  int *const order = reinterpret_cast<int *>(shared) + (teams + Team::index()) * STRIDE;
  Scales<P> s;
#pragma unroll
  for (int p = 0; p < P; p++) s.alpha[p] = alpha[(size_t)clamped * P + p];
  s.z = z[clamped];
  Intervals<SignBook<P>> at;
  at.sort_levels({P, true, nullptr}, s);
  float border[at.SLOTS];
  at.borders(border);
#pragma unroll
  for (int j = 0; j < at.SLOTS; j++) borders[at.place(j)] = border[j], order[at.place(j)] = at.code[j];
  __syncwarp();
  if (row >= R) return;
  for (int k = Team::lane(); k < G; k += Team::LANES) {
    const float v = w[(size_t)row * G + k];
    int rank = 0;
#pragma unroll
    for (int half = LEVELS / 2; half > 0; half /= 2) rank += v > borders[rank + half] ? half : 0;
    codes[(size_t)row * G + k] = order[rank];
  }
}

// --- grids

// scale and zero point [R] of the grid scale * (code - zero) with the least error, of `shrinks` parts of the range and
// zero points up to `aside` steps off.
template <int BITS, bool GLOBAL>
__global__ void __launch_bounds__(THREADS, blocks(BITS))
    uniform_grids(const __grid_constant__ Groups of, float *scale, float *zero, const float *__restrict__ shrink,
                  int shrinks, bool symmetric, int aside) {
  using Book = UniformBook<BITS>;
  extern __shared__ __align__(128) char shared[];
  constexpr float top = (1 << BITS) - 1;
  int row;
  const SortedGroup g = load_group<Team<BITS>, GLOBAL>(of, shared, row);
  float low = fminf(g.low(), 0.0f), high = fmaxf(g.high(), 0.0f);
  if (symmetric) high = fmaxf(-low, high), low = -high;
  double best = infinity();
  float best_scale = TINY_HALF, best_zero = 0;
  for (int i = 0; i < shrinks; i++)
    for (int j = 0; j <= 2 * aside; j++) {
      const int step = j % 2 ? -(j + 1) / 2 : j / 2;  // 0, -1, 1, …
      const float a = stored(fmaxf((high - low) * (shrink[i] / top), TINY_HALF));
      const float rounded = rintf(-low * shrink[i] / a) + (float)step;
      const float o = symmetric ? (float)(1 << (BITS - 1)) : fminf(fmaxf(rounded, 0.0f), top);
      const typename Book::Scales s = {{a}, -a * o};
      Intervals<Book> at;
      at.set(g, {}, s);
      const double error = at.squared_error(g, {});
      const bool beyond = a > 65504.0f && best_scale <= 65504.0f;  // of f16: the caller refuses it
      if (beyond || error < best) best = beyond ? -infinity() : error, best_scale = a, best_zero = o;
    }
  if (Team<BITS>::lane() || row < 0) return;
  scale[row] = g.n ? best_scale : TINY_HALF, zero[row] = g.n ? best_zero : 0.0f;
}

// scale and lowest level [R] of the grid low + scale * code: the best clipped range, then codes and least squares in
// turn.
template <int BITS, bool GLOBAL>
__global__ void __launch_bounds__(THREADS, blocks(BITS))
    affine_grids(const __grid_constant__ Groups of, float *scale, float *low, const float *__restrict__ shrink,
                 int shrinks, int rounds) {
  using Book = UniformBook<BITS>;
  extern __shared__ __align__(128) char shared[];
  constexpr float top = (1 << BITS) - 1;
  int row;
  const SortedGroup g = load_group<Team<BITS>, GLOBAL>(of, shared, row);
  const float middle = (g.low() + g.high()) / 2, width = fmaxf((g.high() - g.low()) / top, TINY_HALF);
  Best<Book> start;
  for (int i = 0; i < shrinks; i++) {
    const float a = width * shrink[i];
    start.add(g, {}, {{a}, middle - a * (top / 2)});
  }
  typename Book::Scales s = start.found;
  alternate(g, Book{}, rounds, s);
  if (s.alpha[0] < 0) s.z += top * s.alpha[0];  // the same levels, the lowest first
  s.alpha[0] = fmaxf(fabsf(s.alpha[0]), TINY_HALF);
  Best<Book> best;
  best.add(g, {}, start.found);
  best.add(g, {}, s);
  if (Team<BITS>::lane() || row < 0) return;
  scale[row] = g.n ? best.found.alpha[0] : TINY_HALF, low[row] = g.n ? best.found.z : 0.0f;
}

}  // namespace crelle
