// When the host waits for the device, and what it sees if it does not.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <climits>
#include <mutex>
#include <vector>

#include "calls.h"

namespace emucuda {

inline std::atomic<int> g_sync_mode{0};  // as torch.cuda.set_sync_debug_mode: 0 default, 1 warn, 2 error
inline std::atomic<int64_t> g_now{0};    // kernels so far: the device's clock

// A copy to pinned memory that has been asked for and has not happened yet.
struct LateCopy {
  int64_t asked;
  at::Tensor to, from;
};
inline std::mutex g_late_lock;
inline std::vector<LateCopy> g_late;

// Let the copies arrive that were asked for up to a moment.
inline void arrive(int64_t until) {
  std::vector<LateCopy> due, rest;
  {
    std::lock_guard<std::mutex> hold(g_late_lock);
    for (auto& copy : g_late) (copy.asked <= until ? due : rest).push_back(copy);
    g_late.swap(rest);
  }
  for (auto& copy : due) copy.to.copy_(copy.from);
}

inline void wait_for_device(const std::string& who) {
  arrive(INT64_MAX);
  asked(kWaits);
  TORCH_CHECK(g_sync_mode != 2, "called a synchronizing CUDA operation (emulated: ", who, ")");
  if (g_sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (emulated: ", who, ")");
}

// Until the copy arrives there is rubbish: NaN in every floating dtype. `to` is contiguous.
inline void copy_late(const at::Tensor& to, const at::Tensor& from) {
  at::Tensor kept = from.clone();
  std::memset(to.data_ptr(), 0xFF, to.nbytes());
  std::lock_guard<std::mutex> hold(g_late_lock);
  g_late.push_back({g_now, to, kept});
}

}  // namespace emucuda
