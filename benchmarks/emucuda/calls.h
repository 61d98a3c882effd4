// What the host asks of the device, counted since the process began.
#pragma once

#include <atomic>
#include <cstdint>

namespace emucuda {

enum Call { kOperators, kAllocations, kPinned, kCopies, kWaits, kKinds };
inline std::atomic<int64_t> g_calls[kKinds];

inline void asked(Call kind) { ++g_calls[kind]; }

}  // namespace emucuda
