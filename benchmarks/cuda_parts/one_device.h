// One CUDA device with one stream: what autograd's engine, the dispatcher and attention ask of a device
// type before they look at a tensor. Both libraries include this file, and register what stands here.
//
// Read in torch 2.13.
#pragma once

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace one_device {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device kDevice(c10::kCUDA, 0);
const Stream kStream(Stream::DEFAULT, kDevice);

// One device, one stream, and every event has happened.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  Stream getStream(Device) const noexcept override { return kStream; }
  Stream getDefaultStream(Device) const override { return kStream; }
  Stream getStreamFromGlobalPool(Device, bool) const override { return kStream; }
  Stream exchangeStream(Stream) const noexcept override { return kStream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

inline int major = 9;  // of the compute capability

// Which kernel scaled_dot_product_attention takes. Without an answer it is written out as matrix
// products. The rules of ATen/native/transformers/cuda/sdp_utils.cpp as far as shapes and dtypes go:
// FlashAttention, then the memory-efficient kernel; cuDNN's is asked for by name only.
inline int64_t attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double, bool, std::optional<double>,
                         bool shared_heads) {
  const auto& context = at::globalContext();
  const auto dtype = query.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto size = query.sym_size(-1);
  const bool ampere = major >= 8;
  if (query.dim() != 4) return static_cast<int64_t>(at::SDPBackend::math);
  if (context.userEnabledFlashSDP() && half && ampere && !mask.has_value() && size <= 256 &&
      value.sym_size(-1) == size)
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  const int64_t aligned = half ? 8 : ampere ? 4 : 1;
  const bool known = dtype == at::kFloat || dtype == at::kHalf || (dtype == at::kBFloat16 && ampere);
  if (context.userEnabledMemEfficientSDP() && known && !shared_heads && size % aligned == 0 &&
      value.sym_size(-1) % aligned == 0)
    return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  return static_cast<int64_t>(at::SDPBackend::math);
}

// To be derived from as at::CUDAHooks, the name by which torch looks for it.
struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  void deviceSynchronize(DeviceIndex) const override {}
};

}  // namespace one_device
