// A unit (3x3 depthwise convolution, GroupNorm, skip, Leaky-ReLU) in one pass over memory forward and one backward,
// and backward through GroupNorm, skip, Leaky-ReLU alone. See kernels.py.
//
// A block owns one group of one sample, a thread one channel of it: in a unit the plane (H x W values) stays in the
// thread's registers, so neighbours need no memory, and only the two moments of the norm are shared. Maps lie channels
// last, so the threads of a warp read neighbouring addresses.
//
// Compiled for each use: C, GROUP (channels of a group), H, W, LANES (threads that share a channel; 1 in a unit),
// THREADS (GROUP x LANES rounded up to warps), BLOCKS (of these that a multiprocessor should hold at a time), SKIP,
// MORE (backward adds `more` to dx), EPS, SLOPE. Flags at run time instead would cost so many registers that values
// spill.

typedef unsigned short bf16;
constexpr int AREA = H * W;
constexpr float COUNT = float(GROUP) * AREA;

__device__ __forceinline__ float widen(bf16 value) { return __uint_as_float(unsigned(value) << 16); }

__device__ __forceinline__ bf16 narrow(float value) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}

// Where tap t of the filter, laid on place p, reads: -1 outside the map.
__host__ __device__ constexpr int neighbour(int p, int t) {
  const int row = p / W + t / 3 - 1, column = p % W + t % 3 - 1;
  return row < 0 || row >= H || column < 0 || column >= W ? -1 : row * W + column;
}

__device__ __forceinline__ float block_sum(float value, float* shared) {
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < THREADS / 32 ? shared[threadIdx.x % 32] : 0.f;
  for (int offset = 16; offset; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// Value by value into all the sums it is part of: it is needed once and then no more.
template <int STRIDE>
__device__ __forceinline__ void convolve(const bf16* __restrict__ x, const float (&taps)[9], float (&z)[AREA]) {
#pragma unroll
  for (int p = 0; p < AREA; ++p) z[p] = 0.f;
#pragma unroll
  for (int p = 0; p < AREA; ++p) {
    const float value = widen(x[p * STRIDE]);
#pragma unroll
    for (int t = 0; t < 9; ++t)
      if (neighbour(p, 8 - t) >= 0) z[neighbour(p, 8 - t)] += value * taps[t];
  }
}

#ifdef UNIT_FORWARD
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void unit_forward(
    const bf16* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ gamma,
    const float* __restrict__ beta, const bf16* __restrict__ skip, bf16* __restrict__ y, float* __restrict__ moments) {
  __shared__ float shared[32];
  const bool owned = GROUP == THREADS || threadIdx.x < GROUP;
  const int channel = blockIdx.y * GROUP + (owned ? threadIdx.x : 0);
  const long long at = (long long)blockIdx.x * AREA * C + channel;
  float taps[9], z[AREA];
#pragma unroll
  for (int t = 0; t < 9; ++t) taps[t] = weight[channel * 9 + t];
  convolve<C>(x + at, taps, z);
  float total = 0.f, squares = 0.f;
#pragma unroll
  for (int p = 0; p < AREA; ++p) total += z[p];
  const float mean = block_sum(owned ? total : 0.f, shared) / COUNT;
#pragma unroll
  for (int p = 0; p < AREA; ++p) squares += (z[p] - mean) * (z[p] - mean);
  const float rstd = rsqrtf(block_sum(owned ? squares : 0.f, shared) / COUNT + EPS);
  const float scale = gamma[channel] * rstd, shift = beta[channel] - mean * scale;
  if (owned) {
#pragma unroll
    for (int p = 0; p < AREA; ++p) {
      float out = z[p] * scale + shift;
      if (SKIP) out += widen(skip[at + p * C]);
      y[at + p * C] = narrow(out >= 0.f ? out : out * SLOPE);
    }
  }
  if (threadIdx.x == 0) {
    moments[(blockIdx.x * gridDim.y + blockIdx.y) * 2] = mean;
    moments[(blockIdx.x * gridDim.y + blockIdx.y) * 2 + 1] = rstd;
  }
}

#endif

// The block's part of one sample into shared memory, (AREA, GROUP), without passing through registers.
__device__ __forceinline__ void fetch(const bf16* __restrict__ source, bf16* target) {
  if (GROUP % 8 == 0 && C % 8 == 0) {
    for (int i = threadIdx.x * 8; i < AREA * GROUP; i += THREADS * 8) {
      const unsigned place = (unsigned)__cvta_generic_to_shared(target + i);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(source + i / GROUP * C + i % GROUP));
    }
  } else {
    for (int i = threadIdx.x; i < AREA * GROUP; i += THREADS) target[i] = source[i / GROUP * C + i % GROUP];
  }
}

#ifdef UNIT_BACKWARD
// dx gets `more` added to it; `sums` (blocks, 11, C) the gradients of the nine taps, of scale and of shift.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void unit_backward(
    const bf16* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ gamma,
    const bf16* __restrict__ y, const float* __restrict__ moments, const bf16* __restrict__ gradient,
    const bf16* __restrict__ more, bf16* __restrict__ dx, bf16* __restrict__ dskip, float* __restrict__ sums,
    int batch) {
  extern __shared__ __align__(16) bf16 tiles[];  // x, y and gradient of one sample
  __shared__ float shared[32];
  __shared__ float kept[11][THREADS];  // each thread its own column: registers are short
  const bool owned = GROUP == THREADS || threadIdx.x < GROUP;
  const int own = owned ? threadIdx.x : 0, channel = blockIdx.y * GROUP + own;
  const bf16 *own_x = tiles + own, *own_y = own_x + AREA * GROUP, *own_gradient = own_y + AREA * GROUP;
  float taps[9], z[AREA];
#pragma unroll
  for (int t = 0; t < 9; ++t) taps[t] = weight[channel * 9 + t];
#pragma unroll
  for (int t = 0; t < 11; ++t) kept[t][threadIdx.x] = 0.f;
  const float scale = owned ? gamma[channel] : 0.f;
  for (int b = blockIdx.x; b < batch; b += gridDim.x) {
    const long long sample = (long long)b * AREA * C, at = sample + channel;
    __syncthreads();  // all are done with the sample before
    fetch(x + sample + blockIdx.y * GROUP, tiles);
    fetch(y + sample + blockIdx.y * GROUP, tiles + AREA * GROUP);
    fetch(gradient + sample + blockIdx.y * GROUP, tiles + 2 * AREA * GROUP);
    const float mean = moments[(b * gridDim.y + blockIdx.y) * 2], rstd = moments[(b * gridDim.y + blockIdx.y) * 2 + 1];
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    convolve<GROUP>(own_x, taps, z);
    float sum_gamma = 0.f, sum_beta = 0.f;
#pragma unroll
    for (int p = 0; p < AREA; ++p) {
      float d = widen(own_gradient[p * GROUP]);
      d = own_y[p * GROUP] & 0x8000 ? d * SLOPE : d;
      if (SKIP && owned) dskip[at + p * C] = narrow(d);
      sum_gamma += d * (z[p] - mean);
      sum_beta += d;
    }
    sum_gamma *= rstd;
    kept[9][threadIdx.x] += sum_gamma;
    kept[10][threadIdx.x] += sum_beta;
    // dz = rstd (scale d - mean of that - n times mean of n times that), as a d + b z + c.
    const float by_d = rstd * scale;
    const float by_z = -rstd * rstd * block_sum(scale * sum_gamma, shared) / COUNT;
    const float offset = -rstd * block_sum(scale * sum_beta, shared) / COUNT - by_z * mean;
#pragma unroll
    for (int p = 0; p < AREA; ++p) {
      float d = widen(own_gradient[p * GROUP]);
      d = own_y[p * GROUP] & 0x8000 ? d * SLOPE : d;
      z[p] = by_d * d + by_z * z[p] + offset;
    }
    float dtaps[9] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int p = 0; p < AREA; ++p) {
      const float value = widen(own_x[p * GROUP]);
      float into = MORE ? widen(more[at + p * C]) : 0.f;
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
#pragma unroll
    for (int t = 0; t < 11; ++t) sums[(blockIdx.x * 11 + t) * C + channel] = kept[t][threadIdx.x];
  }
}

#endif

#ifdef NORM_BACKWARD
// The norm alone: what a convolution or a product made has no need of planes, and may be of any size.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void norm_backward(
    const bf16* __restrict__ x, const float* __restrict__ gamma, const bf16* __restrict__ y,
    const float* __restrict__ moments, const bf16* __restrict__ gradient, bf16* __restrict__ dx,
    bf16* __restrict__ dskip, float* __restrict__ sums, int batch) {
  extern __shared__ __align__(16) bf16 tiles[];  // x, y and gradient of one sample
  __shared__ float shared[32];
  const int lane = threadIdx.x / GROUP, own = threadIdx.x % GROUP, channel = blockIdx.y * GROUP + own;
  const bool owned = lane < LANES;
  const bf16 *own_x = tiles + own, *own_y = own_x + AREA * GROUP, *own_gradient = own_y + AREA * GROUP;
  const float scale = gamma[channel];
  float all_gamma = 0.f, all_beta = 0.f;
  for (int b = blockIdx.x; b < batch; b += gridDim.x) {
    const long long sample = (long long)b * AREA * C, at = sample + channel;
    __syncthreads();  // all are done with the sample before
    fetch(x + sample + blockIdx.y * GROUP, tiles);
    fetch(y + sample + blockIdx.y * GROUP, tiles + AREA * GROUP);
    fetch(gradient + sample + blockIdx.y * GROUP, tiles + 2 * AREA * GROUP);
    const float mean = moments[(b * gridDim.y + blockIdx.y) * 2], rstd = moments[(b * gridDim.y + blockIdx.y) * 2 + 1];
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float sum_gamma = 0.f, sum_beta = 0.f;
    if (owned) {
#pragma unroll 8
      for (int p = lane; p < AREA; p += LANES) {
        float d = widen(own_gradient[p * GROUP]);
        d = own_y[p * GROUP] & 0x8000 ? d * SLOPE : d;
        if (SKIP) dskip[at + p * C] = narrow(d);
        sum_gamma += d * (widen(own_x[p * GROUP]) - mean);
        sum_beta += d;
      }
    }
    sum_gamma *= rstd;
    all_gamma += sum_gamma;
    all_beta += sum_beta;
    const float by_d = rstd * scale;
    const float by_z = -rstd * rstd * block_sum(scale * sum_gamma, shared) / COUNT;
    const float offset = -rstd * block_sum(scale * sum_beta, shared) / COUNT - by_z * mean;
    if (owned) {
#pragma unroll 8
      for (int p = lane; p < AREA; p += LANES) {
        float d = widen(own_gradient[p * GROUP]);
        d = own_y[p * GROUP] & 0x8000 ? d * SLOPE : d;
        dx[at + p * C] = narrow(by_d * d + by_z * widen(own_x[p * GROUP]) + offset);
      }
    }
  }
  if (owned) {
    sums[((blockIdx.x * LANES + lane) * 2) * C + channel] = all_gamma;
    sums[((blockIdx.x * LANES + lane) * 2 + 1) * C + channel] = all_beta;
  }
}
#endif
