// Kernels of kernels.py, each with one pass over memory:
//
//   unit_forward, unit_backward   3x3 depthwise convolution, GroupNorm, skip, Leaky-ReLU: a unit
//   norm_forward, norm_backward   the same without the convolution
//   column_sums                   sums over rows
//   move_rows                     swaps the first two axes and converts the type
//
// A block processes one group of one sample after another. In a unit a thread owns a channel and keeps its plane
// (H x W values) in registers: the convolution finds neighbours there, and threads share only the two moments of the
// norm. In a norm alone several threads share a channel. Maps are channels last, so the threads of a warp read
// neighbouring addresses. cp.async copies samples to shared memory; if there is room, the next sample is copied while
// the current one is processed.
//
// Macros, compiled in for each use, since flags at run time would cost so many registers that values spill:
//   C, H, W    shape of a map
//   GROUP      channels of a group
//   LANES      threads that share a channel; 1 in a unit
//   THREADS    threads of a block: GROUP x LANES, rounded up to whole warps
//   BLOCKS     blocks that a multiprocessor should hold at a time
//   SKIP       a skip is added before the activation
//   MORE       unit_backward adds `more` to dx
//   EPS, SLOPE of the norm and of Leaky-ReLU
//   ELEMENT    (norm alone) scale and shift are (H x W, C), one for each value, instead of (C,)
//   PARTS, DEPTH   (norm_backward) explained there

#ifndef KRNET_ON_CPU  // the tests compile this file for a CPU, with tests/cuda_shim.h in place of what follows
typedef unsigned short Value;  // bf16
extern __shared__ __align__(16) Value tiles[];

__device__ __forceinline__ float widen(Value value) { return __uint_as_float(unsigned(value) << 16); }

__device__ __forceinline__ bool negative(Value value) { return value & 0x8000; }

__device__ __forceinline__ Value narrow(float value) {
  Value result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}

// Copies 16 bytes to shared memory without passing through registers.
__device__ __forceinline__ void copy_async(const Value* source, Value* target) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(target);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(source));
}

// end_batch makes a batch of this thread's copies since its last call; arrive waits until at most PENDING batches of
// this thread are unfinished.
__device__ __forceinline__ void end_batch() { asm volatile("cp.async.commit_group;"); }

template <int PENDING>
__device__ __forceinline__ void arrive() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif

#ifdef COLUMN_SUMS
// source (rows, columns) -> target (columns). The order of the sum is fixed, so equal inputs give equal sums. A block
// sums 32 columns; its warps divide the rows among them.
constexpr int WARPS = 16;

extern "C" __global__ __launch_bounds__(32 * WARPS) void column_sums(
    const float* __restrict__ source, float* __restrict__ target, int rows, int columns) {
  __shared__ float parts[WARPS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
  float total = 0.f;
  if (column < columns) {
#pragma unroll 8
    for (int row = warp; row < rows; row += WARPS) total += source[(long long)row * columns + column];
  }
  parts[warp][lane] = total;
  __syncthreads();
  if (warp == 0 && column < columns) {
#pragma unroll
    for (int other = 1; other < WARPS; ++other) total += parts[other][lane];
    target[column] = total;
  }
}
#endif

#ifdef MOVE_ROWS
// source (FIRST, SECOND, K) of type FROM -> target (SECOND, FIRST, K) of type TO. Each block moves one row of K values.
constexpr int WIDTH = K % 8 == 0 ? 8 : 1;

template <typename Kind>
struct alignas(WIDTH * sizeof(Kind) < 16 ? WIDTH * sizeof(Kind) : 16) Pack {
  Kind values[WIDTH];
};

template <typename One, typename Other>
constexpr bool same = false;
template <typename One>
constexpr bool same<One, One> = true;

__device__ __forceinline__ TO convert(FROM value) {
  if constexpr (same<FROM, TO>) {
    return value;
  } else if constexpr (same<TO, float>) {
    return widen(value);
  } else {
    return narrow(value);
  }
}

extern "C" __global__ __launch_bounds__(THREADS) void move_rows(const FROM* __restrict__ source,
                                                                TO* __restrict__ target) {
  const long long to = (long long)(blockIdx.x % SECOND) * FIRST + blockIdx.x / SECOND;
  const Pack<FROM>* read = reinterpret_cast<const Pack<FROM>*>(source + (long long)blockIdx.x * K);
  Pack<TO>* written = reinterpret_cast<Pack<TO>*>(target + to * K);
  for (int i = threadIdx.x; i < K / WIDTH; i += THREADS) {
    const Pack<FROM> found = read[i];
    Pack<TO> moved;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) moved.values[j] = convert(found.values[j]);
    written[i] = moved;
  }
}
#endif

#ifdef GROUP
constexpr int AREA = H * W;
constexpr int TILE = AREA * GROUP;  // values of one group of one sample, laid out as (AREA, GROUP)
constexpr float COUNT = float(TILE);

// Sums both values over the block. Also a barrier for shared memory.
__device__ __forceinline__ void block_sums(float& one, float& other, float (&shared)[2][32]) {
  for (int offset = 16; offset; offset >>= 1) {
    one += __shfl_xor_sync(~0u, one, offset);
    other += __shfl_xor_sync(~0u, other, offset);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    shared[0][threadIdx.x / 32] = one;
    shared[1][threadIdx.x / 32] = other;
  }
  __syncthreads();
  one = threadIdx.x % 32 < THREADS / 32 ? shared[0][threadIdx.x % 32] : 0.f;
  other = threadIdx.x % 32 < THREADS / 32 ? shared[1][threadIdx.x % 32] : 0.f;
  for (int offset = 16; offset; offset >>= 1) {
    one += __shfl_xor_sync(~0u, one, offset);
    other += __shfl_xor_sync(~0u, other, offset);
  }
}

__device__ __forceinline__ float block_sum(float value, float (&shared)[2][32]) {
  float none = 0.f;
  block_sums(value, none, shared);
  return value;
}

// Starts copying the block's group of a sample to shared memory. Counts and steps are compile-time constants, so that
// addresses cost no registers.
__device__ __forceinline__ void fetch(const Value* __restrict__ source, Value* target) {
  constexpr int WIDTH = 16 / sizeof(Value), ROUND = THREADS * WIDTH;
  source += blockIdx.y * GROUP;
  if (GROUP % WIDTH == 0 && C % WIDTH == 0) {
    const int first = threadIdx.x * WIDTH;
#pragma unroll
    for (int done = 0; done < TILE; done += ROUND) {
      const int i = first + done;
      const int from = ROUND % GROUP ? i / GROUP * C + i % GROUP : first / GROUP * C + first % GROUP + done / GROUP * C;
      if (done + ROUND <= TILE || i < TILE) copy_async(source + from, target + i);
    }
  } else {
    for (int i = threadIdx.x; i < TILE; i += THREADS) target[i] = source[i / GROUP * C + i % GROUP];
  }
}

__device__ __forceinline__ float activate(float value) { return value >= 0.f ? value : value * SLOPE; }

// The gradient before the activation. `below`: the output of the activation, and so its input, is negative.
__device__ __forceinline__ float before_activation(Value gradient, bool below) {
  const float d = widen(gradient);
  return below ? d * SLOPE : d;
}
#endif

#if defined(UNIT_FORWARD) || defined(UNIT_BACKWARD)
// The place that tap t reads when the filter is centred on place p; -1 outside the map.
__host__ __device__ constexpr int neighbour(int p, int t) {
  const int row = p / W + t / 3 - 1, column = p % W + t % 3 - 1;
  return row < 0 || row >= H || column < 0 || column >= W ? -1 : row * W + column;
}

// Adds each value to all outputs that it contributes to, so that it is read once.
__device__ __forceinline__ void convolve(const Value* x, const float (&taps)[9], float (&z)[AREA]) {
#pragma unroll
  for (int p = 0; p < AREA; ++p) z[p] = 0.f;
#pragma unroll
  for (int p = 0; p < AREA; ++p) {
    const float value = widen(x[p * GROUP]);
#pragma unroll
    for (int t = 0; t < 9; ++t)
      if (neighbour(p, 8 - t) >= 0) z[neighbour(p, 8 - t)] += value * taps[t];
  }
}
#endif

#ifdef UNIT_FORWARD
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void unit_forward(
    const Value* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ gamma,
    const float* __restrict__ beta, const Value* __restrict__ skip, Value* __restrict__ y, float* __restrict__ moments,
    int batch) {
  __shared__ float shared[2][32];
  const bool owned = GROUP == THREADS || threadIdx.x < GROUP;
  const int own = owned ? threadIdx.x : 0, channel = blockIdx.y * GROUP + own;
  float taps[9], z[AREA];
#pragma unroll
  for (int t = 0; t < 9; ++t) taps[t] = weight[channel * 9 + t];
  const long long step = (long long)AREA * C;
  fetch(x + blockIdx.x * step, tiles);
  end_batch();
  if (SKIP) {
    fetch(skip + blockIdx.x * step, tiles + TILE);
    end_batch();
  }
  for (int b = blockIdx.x, next = b + gridDim.x; b < batch; b = next, next += gridDim.x) {
    arrive<SKIP>();
    __syncthreads();
    convolve(tiles + own, taps, z);
    float total = 0.f, squares = 0.f;
#pragma unroll
    for (int p = 0; p < AREA; ++p) total += z[p];
    const float mean = block_sum(owned ? total : 0.f, shared) / COUNT;
    if (next < batch) fetch(x + next * step, tiles);  // all have read x
    end_batch();
#pragma unroll
    for (int p = 0; p < AREA; ++p) squares += (z[p] - mean) * (z[p] - mean);
    if (SKIP) arrive<1>();
    const float rstd = rsqrtf(block_sum(owned ? squares : 0.f, shared) / COUNT + EPS);
    const float scale = gamma[channel] * rstd, shift = beta[channel] - mean * scale;
    if (owned) {
#pragma unroll
      for (int p = 0; p < AREA; ++p) {
        float out = z[p] * scale + shift;
        if (SKIP) out += widen(tiles[TILE + own + p * GROUP]);
        y[b * step + channel + p * C] = narrow(activate(out));
      }
    }
    if (threadIdx.x == 0) {
      moments[(b * gridDim.y + blockIdx.y) * 2] = mean;
      moments[(b * gridDim.y + blockIdx.y) * 2 + 1] = rstd;
    }
    if (SKIP) {
      __syncthreads();  // all have read the skip
      if (next < batch) fetch(skip + next * step, tiles + TILE);
      end_batch();
    }
  }
}
#endif

#ifdef UNIT_BACKWARD
// Writes dx (plus `more`), dskip and sums (blocks, 11 C): the gradients of the nine taps of each channel, of the scales
// and of the shifts.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void unit_backward(
    const Value* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ gamma,
    const Value* __restrict__ y, const float* __restrict__ moments, const Value* __restrict__ gradient,
    const Value* __restrict__ more, Value* __restrict__ dx, Value* __restrict__ dskip, float* __restrict__ sums,
    int batch) {
  __shared__ float shared[2][32];
  // Each thread has its own column; registers would not suffice. Once the signs of y are kept, its tile is free.
  constexpr int WORDS = (AREA + 31) / 32;
  __shared__ float kept[11][THREADS];
  __shared__ unsigned signs[WORDS][THREADS];
  const bool owned = GROUP == THREADS || threadIdx.x < GROUP;
  const int own = owned ? threadIdx.x : 0, channel = blockIdx.y * GROUP + own;
  Value *tile_x = tiles, *tile_y = tiles + TILE, *tile_gradient = tiles + 2 * TILE;
  float taps[9], z[AREA];
#pragma unroll
  for (int t = 0; t < 9; ++t) taps[t] = weight[channel * 9 + t];
#pragma unroll
  for (int t = 0; t < 11; ++t) kept[t][threadIdx.x] = 0.f;
  const float scale = owned ? gamma[channel] : 0.f;
  const long long step = (long long)AREA * C;
  if (!MORE) fetch(y + blockIdx.x * step, tile_y);
  fetch(gradient + blockIdx.x * step, tile_gradient);
  for (int b = blockIdx.x, next = b + gridDim.x; b < batch; b = next, next += gridDim.x) {
    const long long at = b * step + channel;
    __syncthreads();  // all are done with the sample before
    fetch(x + b * step, tile_x);
    if (MORE) fetch(y + b * step, tile_y);
    end_batch();
    const float mean = moments[(b * gridDim.y + blockIdx.y) * 2], rstd = moments[(b * gridDim.y + blockIdx.y) * 2 + 1];
    arrive<0>();
    __syncthreads();
    convolve(tile_x + own, taps, z);
    float sum_gamma = 0.f, sum_beta = 0.f;
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      unsigned bits = 0;
#pragma unroll
      for (int p = 32 * word; p < 32 * word + 32; ++p) {
        if (p < AREA) {
          const bool below = negative(tile_y[own + p * GROUP]);
          const float d = before_activation(tile_gradient[own + p * GROUP], below);
          if (SKIP && owned) dskip[at + p * C] = narrow(d);
          sum_gamma += d * (z[p] - mean);
          sum_beta += d;
          bits |= unsigned(below) << p % 32;
        }
      }
      signs[word][threadIdx.x] = bits;
    }
    sum_gamma *= rstd;
    kept[9][threadIdx.x] += sum_gamma;
    kept[10][threadIdx.x] += sum_beta;
    float first = scale * sum_gamma, second = scale * sum_beta;
    block_sums(first, second, shared);
    if (MORE) fetch(more + b * step, tile_y);  // all have read y
    if (!MORE && next < batch) fetch(y + next * step, tile_y);
    end_batch();
    // With n the normalised z and g = scale d: dz = rstd (g - mean(g) - n mean(n g)) = by_d d + by_z z + offset.
    const float by_d = rstd * scale;
    const float by_z = -rstd * rstd * first / COUNT;
    const float offset = -rstd * second / COUNT - by_z * mean;
#pragma unroll
    for (int p = 0; p < AREA; ++p) {
      const bool below = signs[p / 32][threadIdx.x] >> p % 32 & 1;
      z[p] = by_d * before_activation(tile_gradient[own + p * GROUP], below) + by_z * z[p] + offset;
    }
    if (MORE) arrive<0>();
    __syncthreads();  // all have read the gradient
    if (next < batch) fetch(gradient + next * step, tile_gradient);
    float dtaps[9] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int p = 0; p < AREA; ++p) {
      const float value = widen(tile_x[own + p * GROUP]);
      float into = MORE ? widen(tile_y[own + p * GROUP]) : 0.f;
#pragma unroll
      for (int t = 0; t < 9; ++t) {
        if (neighbour(p, 8 - t) >= 0) {
          dtaps[t] += value * z[neighbour(p, 8 - t)];
          into += taps[t] * z[neighbour(p, 8 - t)];
        }
      }
      if (owned) dx[at + p * C] = narrow(into);
    }
#pragma unroll
    for (int t = 0; t < 9; ++t) kept[t][threadIdx.x] += dtaps[t];
  }
  if (owned) {
    float* row = sums + (long long)blockIdx.x * 11 * C;
#pragma unroll
    for (int t = 0; t < 9; ++t) row[channel * 9 + t] = kept[t][threadIdx.x];
    row[9 * C + channel] = kept[9][threadIdx.x];
    row[10 * C + channel] = kept[10][threadIdx.x];
  }
}
#endif

#if defined(NORM_FORWARD) || defined(NORM_BACKWARD)
constexpr int EACH = (AREA + LANES - 1) / LANES;  // places (of H x W) per thread
#endif

#ifdef NORM_FORWARD
// A block processes one sample. A multiprocessor runs several blocks: one computes while others wait for memory.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void norm_forward(
    const Value* __restrict__ x, const float* __restrict__ gamma, const float* __restrict__ beta,
    const Value* __restrict__ skip, Value* __restrict__ y, float* __restrict__ moments) {
  __shared__ float shared[2][32];
  const int lane = threadIdx.x / GROUP, own = threadIdx.x % GROUP, channel = blockIdx.y * GROUP + own;
  const bool owned = lane < LANES;
  const long long sample = (long long)blockIdx.x * AREA * C;
  fetch(x + sample, tiles);
  end_batch();
  arrive<0>();
  __syncthreads();
  float total = 0.f, squares = 0.f;
  if (owned) {
#pragma unroll 8
    for (int k = 0; k < EACH; ++k) {
      const int p = lane + k * LANES;
      if (AREA % LANES && p >= AREA) continue;
      total += widen(tiles[own + p * GROUP]);
    }
  }
  const float mean = block_sum(total, shared) / COUNT;
  if (owned) {
#pragma unroll 8
    for (int k = 0; k < EACH; ++k) {
      const int p = lane + k * LANES;
      if (AREA % LANES && p >= AREA) continue;
      const float centred = widen(tiles[own + p * GROUP]) - mean;
      squares += centred * centred;
    }
  }
  const float rstd = rsqrtf(block_sum(squares, shared) / COUNT + EPS);
  if (owned) {
    const float scale = ELEMENT ? 0.f : gamma[channel] * rstd, shift = ELEMENT ? 0.f : beta[channel];
#pragma unroll 8
    for (int k = 0; k < EACH; ++k) {
      const int p = lane + k * LANES;
      if (AREA % LANES && p >= AREA) continue;
      const float centred = widen(tiles[own + p * GROUP]) - mean;
      float out = ELEMENT ? centred * rstd * gamma[p * C + channel] + beta[p * C + channel] : centred * scale + shift;
      if (SKIP) out += widen(skip[sample + channel + p * C]);
      y[sample + channel + p * C] = narrow(activate(out));
    }
  }
  if (threadIdx.x == 0) {
    moments[(blockIdx.x * gridDim.y + blockIdx.y) * 2] = mean;
    moments[(blockIdx.x * gridDim.y + blockIdx.y) * 2 + 1] = rstd;
  }
}
#endif

#ifdef NORM_BACKWARD
// Writes dx, dskip and sums: the gradients of the scales and of the shifts, (blocks, 2, C), or with ELEMENT
// (blocks, 2, H x W, C). ELEMENT sums are kept in registers. If a thread has too few, PARTS blocks read the same
// samples and each handles its part of the places. DEPTH 2 loads the next sample into tiles of its own.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void norm_backward(
    const Value* __restrict__ x, const float* __restrict__ gamma, const Value* __restrict__ y,
    const float* __restrict__ moments, const Value* __restrict__ gradient, Value* __restrict__ dx,
    Value* __restrict__ dskip, float* __restrict__ sums, int batch) {
  constexpr int SHARE = (EACH + PARTS - 1) / PARTS;  // places per thread in one part
  constexpr int KEPT = ELEMENT ? SHARE : 1, UNROLLED = ELEMENT ? SHARE : 8;  // registers cannot be indexed at run time
  __shared__ float shared[2][32];
  const int lane = threadIdx.x / GROUP, own = threadIdx.x % GROUP, channel = blockIdx.y * GROUP + own;
  const bool owned = lane < LANES;
  const int begin = lane + blockIdx.z * SHARE * LANES;  // first place of this part
  const float scale = ELEMENT ? 0.f : gamma[channel];
  float all_gamma[KEPT], all_beta[KEPT];
#pragma unroll
  for (int k = 0; k < KEPT; ++k) all_gamma[k] = all_beta[k] = 0.f;
  const long long step = (long long)AREA * C;
  auto fetch_all = [&](int b, Value* target) {
    fetch(x + b * step, target);
    fetch(y + b * step, target + TILE);
    fetch(gradient + b * step, target + 2 * TILE);
  };
  if (DEPTH == 2) fetch_all(blockIdx.x, tiles);
  end_batch();
  int turn = 0;
  for (int b = blockIdx.x; b < batch; b += gridDim.x) {
    const long long at = b * step + channel;
    const Value *own_x = tiles + turn * 3 * TILE + own, *own_y = own_x + TILE, *own_gradient = own_y + TILE;
    if (DEPTH == 2) turn ^= 1;
    __syncthreads();  // all are done with the sample before
    if (DEPTH == 1) fetch_all(b, tiles);
    if (DEPTH == 2 && b + gridDim.x < batch) fetch_all(b + gridDim.x, tiles + turn * 3 * TILE);
    end_batch();  // an empty batch after the last sample keeps the number of pending batches constant
    const float mean = moments[(b * gridDim.y + blockIdx.y) * 2], rstd = moments[(b * gridDim.y + blockIdx.y) * 2 + 1];
    arrive<DEPTH - 1>();
    __syncthreads();
    float first = 0.f, second = 0.f;
    if (owned) {
#pragma unroll 8
      for (int k = 0; k < EACH; ++k) {
        const int p = lane + k * LANES;
        if (AREA % LANES && p >= AREA) continue;
        const float d = before_activation(own_gradient[p * GROUP], negative(own_y[p * GROUP]));
        const float weighted = ELEMENT ? gamma[p * C + channel] * d : d;
        first += weighted * (widen(own_x[p * GROUP]) - mean);
        second += weighted;
      }
    }
    first *= rstd;
    if (!ELEMENT) {
      all_gamma[0] += first;
      all_beta[0] += second;
      first *= scale;
      second *= scale;
    }
    block_sums(first, second, shared);
    // As in unit_backward: dx = by_d d + by_z z + offset.
    const float by_z = -rstd * rstd * first / COUNT;
    const float offset = -rstd * second / COUNT - by_z * mean;
    if (owned) {
#pragma unroll UNROLLED
      for (int k = 0; k < SHARE; ++k) {
        const int p = begin + k * LANES;
        if (AREA % (SHARE * PARTS * LANES) && p >= AREA) continue;
        const float d = before_activation(own_gradient[p * GROUP], negative(own_y[p * GROUP]));
        const float z = widen(own_x[p * GROUP]);
        if (ELEMENT) {
          all_gamma[k % KEPT] += d * ((z - mean) * rstd);
          all_beta[k % KEPT] += d;
        }
        const float by_d = rstd * (ELEMENT ? gamma[p * C + channel] : scale);
        if (SKIP) dskip[at + p * C] = narrow(d);
        dx[at + p * C] = narrow(by_d * d + by_z * z + offset);
      }
    }
  }
  if (ELEMENT) {
    float* row = sums + (long long)blockIdx.x * 2 * AREA * C + channel;
#pragma unroll
    for (int k = 0; k < SHARE; ++k) {
      const int p = begin + k * LANES;
      if (owned && p < AREA) {
        row[p * C] = all_gamma[k % KEPT];
        row[(AREA + p) * C] = all_beta[k % KEPT];
      }
    }
    return;
  }
  float* scratch = reinterpret_cast<float*>(tiles);  // large enough, since LANES <= AREA
  for (int which = 0; which < 2; ++which) {
    float total = which ? all_beta[0] : all_gamma[0];
    if (LANES > 1) {
      __syncthreads();
      if (owned) scratch[threadIdx.x] = total;
      __syncthreads();
      for (int other = 1; other < LANES && lane == 0; ++other) total += scratch[other * GROUP + own];
    }
    if (lane == 0) sums[(blockIdx.x * 2 + which) * C + channel] = total;
  }
}
#endif
