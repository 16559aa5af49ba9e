// Kernels of batchnorm.py: BatchNorm, skip, ReLU. Appended to kernels.cu, which defines Value, widen and narrow.
//
//   forward    batch_moments sums over rows; batch_norm_forward combines the sums and writes y
//   backward   batch_sums sums over rows; batch_norm_backward combines the sums and writes dx and dskip
//
// Maps are channels last and are read as (rows, channels); a row is one place of one sample. A block processes SLAB
// channels (chosen by blockIdx.x, so that blocks of the same rows run together) of some of the rows. A thread
// processes eight of these channels, 16 bytes, of every ROUND-th row. It loads DEPTH rows at a time, the first of them
// while it computes the scale and shift of its channels. No atomics: equal inputs give equal results.
//
// Macros, compiled in for each use:
//   SLAB         channels of a block: 8, 16 or 32
//   THREADS      threads of a block
//   MOST_PARTS   largest number of parts into which the rows of a sum are divided
//   SKIP, RELU   whether there is a skip, a ReLU
//   TRAINING     normalise by the statistics of the batch, not by the running ones
//   EPS, MOMENTUM   of the norm

#ifdef SLAB
constexpr int VECTORS = SLAB / 8;
constexpr int ROUND = THREADS / VECTORS;  // rows that a block reads at a time

// Eight values, two of bf16 to a 32-bit word: as separate values they would occupy eight registers while being loaded.
struct alignas(16) Eight {
  unsigned words[2 * sizeof(Value)];

  __device__ __forceinline__ Value value(int j) const {
    if constexpr (sizeof(Value) == 2) return Value(words[j / 2] >> j % 2 * 16);
    return reinterpret_cast<const Value*>(words)[j];
  }
};

__device__ __forceinline__ Eight narrow(const float (&values)[8]) {
  Eight result;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const Value value = narrow(values[j]);
    if constexpr (sizeof(Value) == 2)
      result.words[j / 2] = j % 2 ? result.words[j / 2] | unsigned(value) << 16 : unsigned(value);
    else
      reinterpret_cast<Value*>(result.words)[j] = value;
  }
  return result;
}

struct alignas(8) Pair {
  float first, second;
};

__device__ __forceinline__ Eight load(const Value* own, int row, int channels) {
  return *reinterpret_cast<const Eight*>(own + (long long)row * channels);
}

__device__ __forceinline__ void store(Value* own, int row, int channels, const Eight& eight) {
  *reinterpret_cast<Eight*>(own + (long long)row * channels) = eight;
}

// y = first x + second. Forward and backward both compute it here, so that they get the same bits.
__device__ __forceinline__ Pair factors(float weight, float bias, float mean, float rstd) {
  const float scale = weight * rstd;
  return {scale, fmaf(-mean, scale, bias)};
}

// The gradient before the ReLU: 0 where the output is 0. Without a skip, x decides where that is and y is not read.
__device__ __forceinline__ float before_relu(Value gradient, Value x, Value y, float scale, float shift) {
  if (!RELU) return widen(gradient);
  return (SKIP ? widen(y) : fmaf(widen(x), scale, shift)) <= 0.f ? 0.f : widen(gradient);
}

// Sums both arrays over the rows of the block. One thread per channel calls use(channel, sum of one, sum of other).
template <typename Use>
__device__ __forceinline__ void sum_rows(const float (&one)[8], const float (&other)[8], Use use) {
  __shared__ float kept[2][8][THREADS];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    kept[0][j][threadIdx.x] = one[j];
    kept[1][j][threadIdx.x] = other[j];
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int j = threadIdx.x / 32; j < 8; j += THREADS / 32) {
    float first = 0.f, second = 0.f;
#pragma unroll
    for (int i = 0; i < THREADS; i += 32) {
      first += kept[0][j][i + lane];
      second += kept[1][j][i + lane];
    }
    for (int offset = 16; offset >= VECTORS; offset >>= 1) {
      first += __shfl_xor_sync(~0u, first, offset);
      second += __shfl_xor_sync(~0u, second, offset);
    }
    if (lane < VECTORS) use(lane * 8 + j, first, second);
  }
}

// Sums term(part) over all parts. Each of the first SLAB threads calls use(first sum, second sum) for its channel. Also
// a barrier.
template <typename Term, typename Use>
__device__ __forceinline__ void combine(const Pair* __restrict__ partials, int parts, Term term, Use use) {
  __shared__ Pair kept[THREADS / 32][SLAB];
  constexpr int LANES = THREADS / SLAB, EACH = (MOST_PARTS + LANES - 1) / LANES;
  const int channel = threadIdx.x % SLAB, lane = threadIdx.x / SLAB;
  float first = 0.f, second = 0.f;
  Pair found[EACH];
#pragma unroll
  for (int k = 0; k < EACH; ++k)
    if (lane + k * LANES < parts) found[k] = partials[(lane + k * LANES) * SLAB + channel];
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    if (lane + k * LANES < parts) {
      const Pair part = term(found[k], lane + k * LANES);
      first += part.first;
      second += part.second;
    }
  }
  for (int offset = 16; offset >= SLAB; offset >>= 1) {
    first += __shfl_xor_sync(~0u, first, offset);
    second += __shfl_xor_sync(~0u, second, offset);
  }
  if (threadIdx.x % 32 < SLAB) kept[threadIdx.x / 32][channel] = {first, second};
  __syncthreads();
  if (threadIdx.x < SLAB) {
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) {
      first += kept[warp][channel].first;
      second += kept[warp][channel].second;
    }
    use(first, second);
  }
  __syncthreads();
}
#endif

#ifdef BATCH_MOMENTS
// Writes partials (slabs, parts, SLAB): mean of a part's rows, and sum of squared deviations from it. Each channel's
// value in the first row is subtracted first: plain squares of values far from 0 leave no digits for the variance.
extern "C" __global__ __launch_bounds__(THREADS) void batch_moments(
    const Value* __restrict__ x, Pair* __restrict__ partials, int rows, int channels, int share) {
  constexpr int DEPTH = 8;
  const int begin = blockIdx.y * share, end = begin + share < rows ? begin + share : rows;
  const Value* slab = x + blockIdx.x * SLAB;
  const Value* own = slab + threadIdx.x % VECTORS * 8;
  const Eight origin = load(own, begin, channels);
  const float each = 1.f / (end - begin);
  float total[8], squares[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) total[j] = squares[j] = 0.f;
  for (int row = begin + threadIdx.x / VECTORS; row < end; row += DEPTH * ROUND) {
    Eight found[DEPTH];
#pragma unroll
    for (int k = 0; k < DEPTH; ++k)
      if (row + k * ROUND < end) found[k] = load(own, row + k * ROUND, channels);
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (row + k * ROUND < end) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float away = widen(found[k].value(j)) - widen(origin.value(j));
          total[j] += away;
          squares[j] += away * away;
        }
      }
    }
  }
  Pair* part = partials + (blockIdx.x * gridDim.y + blockIdx.y) * SLAB;
  sum_rows(total, squares, [&](int channel, float first, float second) {
    const float mean = first * each;
    part[channel] = {widen(slab[(long long)begin * channels + channel]) + mean, second - first * mean};
  });
}
#endif

#ifdef BATCH_NORM_FORWARD
// Writes y and moments (2, channels): mean and 1 / standard deviation. TRAINING updates the running statistics.
extern "C" __global__ __launch_bounds__(THREADS) void batch_norm_forward(
    const Value* __restrict__ x, const Value* __restrict__ skip, const float* __restrict__ weight,
    const float* __restrict__ bias, const Pair* __restrict__ partials, float* running_mean, float* running_var,
    long long* num_batches, Value* __restrict__ y, float* __restrict__ moments, int rows, int channels, int share,
    int parts) {
  constexpr int DEPTH = 4;
  __shared__ Pair shared[SLAB];
  const int first_channel = blockIdx.x * SLAB, own = first_channel + threadIdx.x % VECTORS * 8;
  const int step = gridDim.y * ROUND;
  int row = blockIdx.y * ROUND + threadIdx.x / VECTORS;
  Eight found[DEPTH], skipped[DEPTH];
  auto fetch = [&] {
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (row + k * step < rows) {
        found[k] = load(x + own, row + k * step, channels);
        if (SKIP) skipped[k] = load(skip + own, row + k * step, channels);
      }
    }
  };
  fetch();

  // A thread reads all it may need for its channel at once: each wait for memory is noticeable in a kernel this short.
  const int channel = first_channel + threadIdx.x % SLAB;
  const float by = weight[channel], offset = bias[channel];
  const float old_mean = running_mean[channel], old_var = running_var[channel];
  auto keep = [&](float mean, float rstd) {
    shared[threadIdx.x] = factors(by, offset, mean, rstd);
    if (blockIdx.y == 0) {
      moments[channel] = mean;
      moments[channels + channel] = rstd;
    }
  };
  if (TRAINING) {
    // Chan et al. (1979) for many parts at once: part means are taken relative to the first part's, for precision.
    const Pair* own_partials = partials + blockIdx.x * parts * SLAB;
    const float origin = own_partials[threadIdx.x % SLAB].first, each = 1.f / rows, unbiased = 1.f / (rows - 1);
    const long long seen = *num_batches;
    auto around = [&](Pair part, int number) -> Pair {
      const float count = share < rows - number * share ? share : rows - number * share;
      const float away = part.first - origin;
      return {count * away, part.second + count * away * away};
    };
    combine(own_partials, parts, around, [&](float total, float squares) {
      const float mean = origin + total * each, spread = squares - total * (total * each);
      keep(mean, rsqrtf(spread * each + EPS));
      if (blockIdx.y == 0) {
        running_mean[channel] = old_mean + MOMENTUM * (mean - old_mean);
        running_var[channel] = old_var + MOMENTUM * (spread * unbiased - old_var);
        if (channel == 0) *num_batches = seen + 1;
      }
    });
  } else {
    if (threadIdx.x < SLAB) keep(old_mean, rsqrtf(old_var + EPS));
    __syncthreads();
  }

  float scale[8], shift[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    scale[j] = shared[own - first_channel + j].first;
    shift[j] = shared[own - first_channel + j].second;
  }
  while (row < rows) {
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (row + k * step < rows) {
        float result[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float value = fmaf(widen(found[k].value(j)), scale[j], shift[j]);
          if (SKIP) value += widen(skipped[k].value(j));
          result[j] = RELU && value < 0.f ? 0.f : value;  // NaN stays NaN
        }
        store(y + own, row + k * step, channels, narrow(result));
      }
    }
    row += DEPTH * step;
    fetch();
  }
}
#endif

#ifdef BATCH_SUMS
// Writes partials (slabs, parts, SLAB): the sum of the gradient d before the ReLU, and of d times the normalised x.
extern "C" __global__ __launch_bounds__(THREADS) void batch_sums(
    const Value* __restrict__ x, const Value* __restrict__ y, const Value* __restrict__ gradient,
    const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ moments,
    Pair* __restrict__ partials, int rows, int channels, int share) {
  constexpr int DEPTH = 4;
  const int begin = blockIdx.y * share, end = begin + share < rows ? begin + share : rows;
  const int first_channel = blockIdx.x * SLAB, own = first_channel + threadIdx.x % VECTORS * 8;
  int row = begin + threadIdx.x / VECTORS;
  Eight found[DEPTH], after[DEPTH], slope[DEPTH];
  auto fetch = [&] {
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (row + k * ROUND < end) {
        slope[k] = load(gradient + own, row + k * ROUND, channels);
        found[k] = load(x + own, row + k * ROUND, channels);
        if (RELU && SKIP) after[k] = load(y + own, row + k * ROUND, channels);
      }
    }
  };
  fetch();

  __shared__ Pair shared[2][SLAB];
  if (threadIdx.x < SLAB) {
    const int channel = first_channel + threadIdx.x;
    shared[0][threadIdx.x] = {moments[channel], moments[channels + channel]};
    shared[1][threadIdx.x] = factors(weight[channel], bias[channel], moments[channel], moments[channels + channel]);
  }
  __syncthreads();
  float mean[8], scale[8], shift[8], total[8], products[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    mean[j] = shared[0][own - first_channel + j].first;
    scale[j] = shared[1][own - first_channel + j].first;
    shift[j] = shared[1][own - first_channel + j].second;
    total[j] = products[j] = 0.f;
  }
  while (row < end) {
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (row + k * ROUND < end) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const Value value = found[k].value(j);
          const float d = before_relu(slope[k].value(j), value, after[k].value(j), scale[j], shift[j]);
          total[j] += d;
          products[j] += d * (widen(value) - mean[j]);
        }
      }
    }
    row += DEPTH * ROUND;
    fetch();
  }
  Pair* part = partials + (blockIdx.x * gridDim.y + blockIdx.y) * SLAB;
  sum_rows(total, products, [&](int channel, float first, float second) {
    part[channel] = {first, second * shared[0][channel].second};
  });
}
#endif

#ifdef BATCH_NORM_BACKWARD
// Writes dx, sums (2, channels): the gradients of weight and bias, and dskip if there are both a skip and a ReLU.
extern "C" __global__ __launch_bounds__(THREADS) void batch_norm_backward(
    const Value* __restrict__ x, const Value* __restrict__ y, const Value* __restrict__ gradient,
    const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ moments,
    const Pair* __restrict__ partials, Value* __restrict__ dx, Value* __restrict__ dskip, float* __restrict__ sums,
    int rows, int channels, int parts) {
  constexpr int DEPTH = 4;
  __shared__ Pair shared[2][SLAB];
  const int first_channel = blockIdx.x * SLAB, own = first_channel + threadIdx.x % VECTORS * 8;
  const int step = gridDim.y * ROUND;
  int row = blockIdx.y * ROUND + threadIdx.x / VECTORS;
  Eight found[DEPTH], after[DEPTH], slope[DEPTH];
  auto fetch = [&] {
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (row + k * step < rows) {
        slope[k] = load(gradient + own, row + k * step, channels);
        if (TRAINING || RELU && !SKIP) found[k] = load(x + own, row + k * step, channels);
        if (RELU && SKIP) after[k] = load(y + own, row + k * step, channels);
      }
    }
  };
  fetch();

  const int channel = first_channel + threadIdx.x % SLAB;
  const float mean = moments[channel], rstd = moments[channels + channel], each = 1.f / rows;
  const Pair known = factors(weight[channel], bias[channel], mean, rstd);
  if (threadIdx.x < SLAB) shared[0][threadIdx.x] = known;
  auto same = [](Pair part, int) { return part; };
  combine(partials + blockIdx.x * parts * SLAB, parts, same, [&](float total, float products) {
    // With n the normalised x: dx = scale (d - mean(d) - n mean(n d)) = scale d + by_x x + offset.
    const float by_x = TRAINING ? -known.first * rstd * (products * each) : 0.f;
    shared[1][threadIdx.x] = {by_x, TRAINING ? -known.first * (total * each) - by_x * mean : 0.f};
    if (blockIdx.y == 0) {
      sums[channel] = products;
      sums[channels + channel] = total;
    }
  });

  float scale[8], shift[8], by_x[8], offset[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    scale[j] = shared[0][own - first_channel + j].first;
    shift[j] = shared[0][own - first_channel + j].second;
    by_x[j] = shared[1][own - first_channel + j].first;
    offset[j] = shared[1][own - first_channel + j].second;
  }
  while (row < rows) {
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (row + k * step < rows) {
        float result[8], skipped[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const Value value = found[k].value(j);
          const float d = before_relu(slope[k].value(j), value, after[k].value(j), scale[j], shift[j]);
          result[j] = TRAINING ? scale[j] * d + by_x[j] * widen(value) + offset[j] : scale[j] * d;
          skipped[j] = d;
        }
        store(dx + own, row + k * step, channels, narrow(result));
        if (RELU && SKIP) store(dskip + own, row + k * step, channels, narrow(skipped));
      }
    }
    row += DEPTH * step;
    fetch();
  }
}
#endif
