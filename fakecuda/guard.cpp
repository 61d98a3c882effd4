// A CUDA device that exists by name only: what autograd's engine and the dispatcher ask of a device
// type before they look at a tensor. Nothing here holds memory or runs a kernel.
//
// Read in torch 2.13; the two interfaces are the same in 2.11.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device kDevice(c10::kCUDA, 0);
const Stream kStream(Stream::DEFAULT, kDevice);

// One device, one stream, and every event has happened.
struct ByName final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  Stream getStream(Device) const noexcept override { return kStream; }
  Stream getDefaultStream(Device) const override { return kStream; }
  Stream getStreamFromGlobalPool(Device, bool) const override { return kStream; }
  Stream exchangeStream(Stream) const noexcept override { return kStream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, ByName)

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
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
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
