// The operators that are about memory: what makes tensors, copies them and gives them other storage.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/Stream.h>

#include "aliases.h"
#include "waits.h"

namespace emucuda {

inline Tensor fresh(size_t bytes, std::optional<at::ScalarType> dtype) {
  const auto type = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype));
  return at::detail::make_tensor<c10::TensorImpl>(
      storage_over(bytes, g_memory.allocate(bytes), &g_memory), DispatchKeySet(DispatchKey::CUDA), type);
}

inline size_t item_size(std::optional<at::ScalarType> dtype) {
  return c10::elementSize(c10::dtype_or_default(dtype));
}

inline Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  Tensor made = fresh(c10::multiply_integers(sizes) * item_size(dtype), dtype);
  if (sizes.size() != 1 || sizes[0] != 0) made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Contiguous)
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

inline Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  Tensor made = fresh(at::detail::computeStorageNbytes(sizes, strides, item_size(dtype)), dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

// Between host and device the host waits, unless it said that it need not.
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() != source.is_cuda() && !non_blocking && self.numel()) wait_for_device("copy_");
  c10::impl::ExcludeDispatchKeyGuard below(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot}));
  ++g_now;
  asked(self.is_cuda() != source.is_cuda() ? kCopies : kOperators);
  Aliases aliases;
  const Tensor to = aliases.host(self), from = aliases.host(source);
  const bool to_host = !self.is_cuda() && source.is_cuda() && self.numel();
  if (non_blocking && to_host && self.is_contiguous() && is_pinned(self.data_ptr()))
    copy_late(to, from.to(to.scalar_type()).expand_as(to));
  else
    to.copy_(from);
  return self;
}

inline Tensor& set_part(Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() || sizes.empty()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

inline Tensor& set_whole(Tensor& self, Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_part(self, std::move(source), 0, {count}, {});
}

inline Tensor& set_as(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

inline Tensor& set_empty(Tensor& self) {
  return set_part(self, storage_over(0, g_memory.allocate(0), &g_memory), 0, {0}, {});
}

// There is one stream: nobody else uses the memory.
inline void record_stream(Tensor&, c10::Stream) {}

// For kernels in Python: the same memory on the other side, without a copy.
inline Tensor to_host(const Tensor& t) {
  return t.is_cuda() ? over(host_alias(t.storage()), t, DispatchKey::CPU) : t;
}
inline Tensor to_device(const Tensor& t) {
  return t.is_cuda() ? t : over(device_alias(t.storage()), t, DispatchKey::CUDA);
}

}  // namespace emucuda
