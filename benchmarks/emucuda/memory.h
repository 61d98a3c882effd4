// The memory of the device, which is the host's, and pinned memory.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>

#include "calls.h"
#include "one_device.h"

namespace emucuda {

using one_device::kDevice;

inline std::atomic<int64_t> g_allocated{0}, g_peak{0};  // bytes

inline void account(int64_t bytes) {
  const int64_t now = g_allocated += bytes;
  int64_t peak = g_peak;
  while (now > peak && !g_peak.compare_exchange_weak(peak, now)) {
  }
}

inline size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// A caching allocator as torch's (c10/cuda/CUDACachingAllocator.cpp): multiples of 512 bytes, the best
// fit at the lowest address, split and joined within segments. So addresses repeat in a loop as they
// do on a GPU: what CUDA graphs are recorded with stays, and what is used after it was freed is
// written over by somebody else.
class Blocks {
 public:
  void* take(size_t wanted) {
    const size_t bytes = round_up(wanted, kUnit);
    const bool small = bytes <= kSmall;
    std::lock_guard<std::mutex> hold(lock_);
    auto& pool = free_[small];
    const Block key{nullptr, bytes, true, small};
    auto found = pool.lower_bound(const_cast<Block*>(&key));
    // A large block that is far too large is kept for a request that needs it.
    const bool fits = found != pool.end() &&
        (small || (*found)->bytes < bytes + kLargeSegment || bytes < kLarge);
    Block* block = fits ? *found : new_segment(bytes, small);
    if (fits) pool.erase(found);
    if (block->bytes - bytes >= (small ? kUnit : kSmall + 1)) split(block, bytes);
    block->free = false;
    used_[block->address] = block;
    account(block->bytes);
    return block->address;
  }

  void release(void* address) {
    std::lock_guard<std::mutex> hold(lock_);
    auto found = used_.find(address);
    if (found == used_.end()) return;
    Block* block = found->second;
    used_.erase(found);
    account(-static_cast<int64_t>(block->bytes));
    block->free = true;
    if (block->before && block->before->free) {
      free_[block->small].erase(block->before);
      block = join(block->before);
    }
    if (block->after && block->after->free) {
      free_[block->small].erase(block->after);
      join(block);
    }
    free_[block->small].insert(block);
  }

 private:
  static constexpr size_t kUnit = 512, kSmall = 1 << 20, kSmallSegment = 2 << 20, kLarge = 10 << 20,
                          kLargeSegment = 20 << 20;

  struct Block {
    char* address;
    size_t bytes;
    bool free, small;
    Block *before = nullptr, *after = nullptr;  // of the same segment
  };
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return a->bytes != b->bytes ? a->bytes < b->bytes : a->address < b->address;
    }
  };

  Block* new_segment(size_t bytes, bool small) {
    const size_t size = small ? kSmallSegment : bytes < kLarge ? kLargeSegment : round_up(bytes, kSmallSegment);
    void* address = nullptr;
    TORCH_CHECK(!posix_memalign(&address, 4096, size), "CUDA out of memory (emulated)");
    return new Block{static_cast<char*>(address), size, true, small};
  }

  void split(Block* block, size_t bytes) {
    auto* rest = new Block{
        block->address + bytes, block->bytes - bytes, true, block->small, block, block->after};
    if (block->after) block->after->before = rest;
    block->after = rest;
    block->bytes = bytes;
    free_[block->small].insert(rest);
  }

  // A block and the one behind it, neither of which is in a pool.
  Block* join(Block* block) {
    Block* gone = block->after;
    block->bytes += gone->bytes;
    block->after = gone->after;
    if (block->after) block->after->before = block;
    delete gone;
    return block;
  }

  std::mutex lock_;
  std::set<Block*, BySize> free_[2];
  std::unordered_map<void*, Block*> used_;
};

inline Blocks& blocks() {
  static auto* made = new Blocks();  // never destroyed: tensors outlive statics
  return *made;
}

inline void release(void* address) {
  if (address) blocks().release(address);
}

// New memory holds NaN in every floating dtype, so that what is read before it is written shows.
struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, kDevice};
    asked(kAllocations);
    void* address = blocks().take(bytes);
    std::memset(address, 0xFF, bytes);
    return {address, address, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
inline DeviceMemory g_memory;

// Which memory of the host is pinned: copies to it need not wait.
inline std::mutex g_pinned_lock;
inline std::unordered_map<void*, size_t> g_pinned;

inline bool is_pinned(const void* place) {
  std::lock_guard<std::mutex> hold(g_pinned_lock);
  for (auto& [address, bytes] : g_pinned)
    if (place >= address && place < static_cast<char*>(address) + bytes) return true;
  return false;
}

inline void unpin(void* address) {
  if (!address) return;
  {
    std::lock_guard<std::mutex> hold(g_pinned_lock);
    g_pinned.erase(address);
  }
  std::free(address);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &unpin, c10::Device(c10::kCPU)};
    asked(kPinned);
    void* address = nullptr;
    TORCH_CHECK(!posix_memalign(&address, 512, round_up(bytes, 512)), "no memory to pin");
    std::lock_guard<std::mutex> hold(g_pinned_lock);
    g_pinned[address] = bytes;
    return {address, address, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
inline PinnedMemory g_pinned_memory;

}  // namespace emucuda
