// Enough of CUDA to run kernels.cu on a CPU, strictly: what would be a race on a GPU gives another result here.
//
//   shim, kernels.cu, ENTRY(kernel)  ->  run(grid, threads, shared bytes, order, arguments) -> 0 or a Fault
//
// Blocks run one after another, and the threads of a block take turns: each runs until it meets a barrier (of its warp,
// in a shuffle, or of its block). The tests run everything in two orders. FORWARDS goes through the threads upwards and
// lets cp.async copy at once; BACKWARDS goes downwards and copies as late as the waiting allows. Where a barrier or a
// wait is missing, one of them finds values that are not there yet, or no longer. Shared memory starts as NaN.

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, gridDim;

#ifdef KRNET_FLOAT  // values as they are: what is left is what the kernels do wrong
typedef float Value;
inline float widen(Value value) { return value; }
inline Value narrow(float value) { return value; }
inline bool negative(Value value) { return signbit(value); }
#else
typedef uint16_t Value;  // bf16
inline float widen(Value value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
inline Value narrow(float value) {  // to nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline bool negative(Value value) { return value & 0x8000; }
#endif

inline float rsqrtf(float value) { return 1 / sqrtf(value); }

enum Fault { NONE, DIFFERENT_BARRIERS, PAST_SHARED_MEMORY, NOT_ALIGNED, TOO_LARGE };
enum Order { FORWARDS, BACKWARDS };
enum State { RUNNING, AT_WARP, AT_BLOCK, DONE };

constexpr int MOST_THREADS = 1024, STACK = 64 << 10, MOST_COPIES = 512, SHARED = 256 << 10, GUARD = 64;
alignas(16) static unsigned char shared_memory[SHARED + GUARD];
static Value* const tiles = reinterpret_cast<Value*>(shared_memory);

struct Thread {
  ucontext_t start;
  jmp_buf place;  // where it paused: ten times as quick to go back to as a context
  bool started;
  State state;
  char* stack;
  struct {
    const Value* source;
    Value* target;
    int batch;
  } copies[MOST_COPIES];
  int num_copies, batch, num_shuffles;
};
static Thread* threads[MOST_THREADS];
static jmp_buf scheduler;
static Order order;
static Fault fault;
static void (*work)();

inline Thread& current() { return *threads[threadIdx.x]; }

__attribute__((noinline)) static void pause_at(State state) {
  const Index own = threadIdx;
  current().state = state;
  if (!_setjmp(current().place)) _longjmp(scheduler, 1);
  threadIdx = own;
}

__attribute__((noinline)) static void resume(Thread& thread) {
  if (_setjmp(scheduler)) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.start);
}

inline void __syncthreads() { pause_at(AT_BLOCK); }

inline float __shfl_xor_sync(unsigned, float value, int offset) {
  // Two sets in turn: when a thread writes one again, all have read it.
  static float values[2][MOST_THREADS];
  const int turn = current().num_shuffles++ % 2;
  values[turn][threadIdx.x] = value;
  pause_at(AT_WARP);
  return values[turn][threadIdx.x ^ offset];
}

inline void copy_async(const Value* source, Value* target) {
  if (uintptr_t(source) % 16 || uintptr_t(target) % 16) fault = NOT_ALIGNED;
  Thread& thread = current();
  if (order == FORWARDS)
    memcpy(target, source, 16);
  else if (thread.num_copies == MOST_COPIES)
    fault = TOO_LARGE;
  else
    thread.copies[thread.num_copies++] = {source, target, thread.batch};
}

inline void end_batch() { ++current().batch; }

template <int PENDING>
inline void arrive() {
  Thread& thread = current();
  int left = 0;
  for (int i = 0; i < thread.num_copies; ++i) {
    if (thread.copies[i].batch < thread.batch - PENDING)
      memcpy(thread.copies[i].target, thread.copies[i].source, 16);
    else
      thread.copies[left++] = thread.copies[i];
  }
  thread.num_copies = left;
}

static void run_thread() {
  work();
  pause_at(DONE);
}

// A warp until all its threads are at a barrier of the block, or done.
static void run_warp(int first, int last) {
  for (;;) {
    int num_at[4] = {0, 0, 0, 0};
    for (int i = 0; i < last - first; ++i) {
      const int index = order == FORWARDS ? first + i : last - 1 - i;
      threadIdx = {unsigned(index), 0, 0};
      if (threads[index]->state == RUNNING) resume(*threads[index]);
      ++num_at[threads[index]->state];
    }
    if (num_at[AT_WARP] == 0) return;
    if (num_at[AT_WARP] != last - first) fault = DIFFERENT_BARRIERS;
    for (int index = first; index < last; ++index) threads[index]->state = fault ? DONE : RUNNING;
  }
}

static void run_block(int num_threads) {
  for (int index = 0; index < num_threads; ++index) {
    if (!threads[index]) {
      threads[index] = static_cast<Thread*>(calloc(1, sizeof(Thread)));
      threads[index]->stack = static_cast<char*>(malloc(STACK));
    }
    Thread& thread = *threads[index];
    thread.state = RUNNING;
    thread.started = false;
    thread.num_copies = thread.batch = thread.num_shuffles = 0;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack;
    thread.start.uc_stack.ss_size = STACK;
    makecontext(&thread.start, run_thread, 0);
  }
  for (;;) {
    const int num_warps = num_threads / 32;
    for (int i = 0; i < num_warps; ++i) {
      const int warp = order == FORWARDS ? i : num_warps - 1 - i;
      run_warp(32 * warp, 32 * warp + 32);
    }
    int num_done = 0;
    for (int index = 0; index < num_threads; ++index) {
      if (threads[index]->state == DONE)
        ++num_done;
      else
        threads[index]->state = RUNNING;
    }
    if (num_done == num_threads || fault) return;
    if (num_done) fault = DIFFERENT_BARRIERS;
  }
}

static Fault run_grid(Index grid, int num_threads, int shared_bytes, Order wanted) {
  if (num_threads > MOST_THREADS || num_threads % 32 || shared_bytes > SHARED) return TOO_LARGE;
  gridDim = grid, order = wanted, fault = NONE;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        memset(shared_memory, 0xff, sizeof shared_memory);
        run_block(num_threads);
        for (int i = 0; i < GUARD; ++i)
          if (shared_memory[shared_bytes + i] != 0xff) fault = PAST_SHARED_MEMORY;
        if (fault) return fault;
      }
  return NONE;
}

template <typename... Kinds, size_t... I>
void call(void (*kernel)(Kinds...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Kinds*>(arguments[I])...);
}

template <typename... Kinds>
void call(void (*kernel)(Kinds...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<Kinds...>());
}

// As cuLaunchKernel has it: pointers to the arguments.
#define ENTRY(KERNEL)                                                                                        \
  static void** arguments_of_run;                                                                            \
  static void work_of_run() { call(KERNEL, arguments_of_run); }                                              \
  extern "C" int run(unsigned x, unsigned y, unsigned z, int num_threads, int shared_bytes, int wanted,      \
                     void** arguments) {                                                                     \
    arguments_of_run = arguments;                                                                            \
    work = work_of_run;                                                                                      \
    return run_grid({x, y, z}, num_threads, shared_bytes, Order(wanted));                                    \
  }
