// One CUDA block on a CPU: a thread of ours for each of its threads, and the builtins that
// SGLang's swap-in kernel uses.  Each collective is a barrier over the block or the warp, so a
// kernel that reaches one in some threads only hangs here as it may there.
#pragma once

#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__ static
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3_ {
  int x, y, z;
};

namespace block {

constexpr int kWarp = 32;
constexpr int kShared = 1 << 20;

struct Warp {
  Warp() : barrier(kWarp) {}
  std::barrier<> barrier;
  long long lanes[kWarp];
};

inline std::unique_ptr<std::barrier<>> all;
inline std::vector<std::unique_ptr<Warp>> warps;
inline thread_local int lane, warp;

// What every lane of the warp gives, for all of them to read.
template <typename T, typename F>
T exchange(T value, F pick) {
  Warp& mine = *warps[warp];
  mine.lanes[lane] = static_cast<long long>(value);
  mine.barrier.arrive_and_wait();
  const T picked = static_cast<T>(pick(mine.lanes));
  mine.barrier.arrive_and_wait();
  return picked;
}

}  // namespace block

inline thread_local dim3_ threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { block::all->arrive_and_wait(); }

inline unsigned __ballot_sync(unsigned, int predicate) {
  return block::exchange<unsigned>(predicate != 0, [](const long long* lanes) {
    unsigned mask = 0;
    for (int i = 0; i < block::kWarp; ++i) mask |= static_cast<unsigned>(lanes[i]) << i;
    return mask;
  });
}

inline int __shfl_sync(unsigned, int value, int source) {
  return block::exchange(value, [=](const long long* lanes) { return lanes[source]; });
}

inline int __shfl_up_sync(unsigned, int value, int delta) {
  const int source = block::lane < delta ? block::lane : block::lane - delta;
  return block::exchange(value, [=](const long long* lanes) { return lanes[source]; });
}

inline int __popc(unsigned mask) { return __builtin_popcount(mask); }

inline int32_t atomicCAS(int32_t* address, int32_t expected, int32_t wanted) {
  std::atomic_ref<int32_t>(*address).compare_exchange_strong(expected, wanted);
  return expected;
}

template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}

// Copies of rows are left to who reads the miss plan.
template <bool, bool, typename... Arguments>
void copy_miss_item(Arguments...);

namespace block {

// Run `kernel` on `blocks` blocks of `threads` threads, one block after the other.
template <typename Kernel>
void launch(int blocks, int threads, Kernel kernel) {
  for (int b = 0; b < blocks; ++b) {
    all = std::make_unique<std::barrier<>>(threads);
    warps.clear();
    for (int w = 0; w < threads / kWarp; ++w) warps.push_back(std::make_unique<Warp>());
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t)
      running.emplace_back([=] {
        threadIdx = {t, 0, 0}, blockIdx = {b, 0, 0};
        blockDim = {threads, 1, 1}, gridDim = {1, 1, 1};
        lane = t % kWarp, warp = t / kWarp;
        kernel();
      });
    for (auto& thread : running) thread.join();
  }
}

}  // namespace block
