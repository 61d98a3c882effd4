// The same memory as a tensor of the device and as one of the host, without a copy.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <utility>
#include <vector>

#include "memory.h"

namespace emucuda {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

inline void* address_of(const Storage& storage) {
  return storage.unsafeGetStorageImpl()->mutable_data_ptr().get();
}

inline Storage storage_over(size_t bytes, c10::DataPtr data, c10::Allocator* allocator) {
  return Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), allocator, true));
}

// The host's view of the device's memory, which it keeps alive.
inline Storage host_alias(const Storage& device) {
  auto drop = [](void* kept) { delete static_cast<Storage*>(kept); };
  c10::DataPtr data(address_of(device), new Storage(device), drop, c10::Device(c10::kCPU));
  return storage_over(device.nbytes(), std::move(data), c10::GetCPUAllocator());
}

// The device's view of memory that a kernel of the host has made. It counts as the device's.
inline c10::DataPtr adopt(const Storage& host) {
  auto drop = [](void* kept) {
    auto* storage = static_cast<Storage*>(kept);
    account(-static_cast<int64_t>(storage->nbytes()));
    delete storage;
  };
  account(host.nbytes());
  return c10::DataPtr(address_of(host), new Storage(host), drop, kDevice);
}
inline Storage device_alias(const Storage& host) {
  return storage_over(host.nbytes(), adopt(host), &g_memory);
}

// A tensor of the sizes and strides of another, over a storage.
inline Tensor over(const Storage& storage, const Tensor& like, DispatchKey key) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

// The tensors of one call of a kernel. Those that share memory on the device share it on the host, and
// the same tensor is the same one: results that are operands, or views of them, are found again.
class Aliases {
 public:
  // Whether any tensor lies on the device.
  bool any() const { return !storages_.empty(); }

  Tensor host(const Tensor& given) {
    if (!given.defined() || !given.is_cuda()) return given;
    for (auto& [device, host] : tensors_)
      if (device.is_same(given)) return host;
    Tensor made = over(host_storage(given.storage()), given, DispatchKey::CPU);
    tensors_.emplace_back(given, made);
    return made;
  }

  Tensor device(const Tensor& given) {
    if (!given.defined() || !given.device().is_cpu() || !given.has_storage()) return given;
    for (auto& [device, host] : tensors_)
      if (host.is_same(given)) return device;
    for (auto& pair : storages_)
      if (same(pair.host, given.storage())) return over(pair.device, given, DispatchKey::CUDA);
    Storage made = device_alias(given.storage());
    storages_.push_back({made, given.storage(), address_of(given.storage())});
    return over(made, given, DispatchKey::CUDA);
  }

  // Do to the operands on the device what the kernel did to the sizes or the memory of the host's.
  void follow() {
    for (auto& pair : storages_) {
      if (address_of(pair.host) == pair.address && pair.host.nbytes() == pair.device.nbytes()) continue;
      auto* storage = pair.device.unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(adopt(pair.host));
      storage->set_nbytes(pair.host.nbytes());
    }
    for (auto& [device, host] : tensors_) {
      follow_storage(device, host);
      const bool moved = device.storage_offset() != host.storage_offset();
      if (moved || device.sizes() != host.sizes() || device.strides() != host.strides())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

 private:
  struct Pair {
    Storage device, host;
    void* address;  // of the host's, before the kernel
  };

  static bool same(const Storage& a, const Storage& b) {
    return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
  }

  Storage host_storage(const Storage& device) {
    for (auto& pair : storages_)
      if (same(pair.device, device)) return pair.host;
    Storage made = host_alias(device);
    storages_.push_back({device, made, address_of(made)});
    return made;
  }

  // A kernel may give an operand another storage, as set_ does.
  void follow_storage(const Tensor& device, const Tensor& host) {
    for (auto& pair : storages_) {
      if (!same(pair.host, host.storage())) continue;
      if (!same(pair.device, device.storage())) device.unsafeGetTensorImpl()->set_storage_keep_dtype(pair.device);
      return;
    }
    device.unsafeGetTensorImpl()->set_storage_keep_dtype(device_alias(host.storage()));
  }

  std::vector<Pair> storages_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;  // device, host
};

}  // namespace emucuda
