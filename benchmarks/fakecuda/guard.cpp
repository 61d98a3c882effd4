// A CUDA device that exists by name only: what autograd's engine and the dispatcher ask of a device
// type before they look at a tensor. Nothing here holds memory or runs a kernel.
#include "one_device.h"

namespace {
using one_device::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace

extern "C" void fakecuda_capability(int value) { one_device::major = value; }

namespace at::native {

const RegisterCUDADispatch<std::remove_reference_t<decltype(_fused_sdp_choice_stub)>> chosen(
    _fused_sdp_choice_stub, one_device::attention);

}  // namespace at::native

namespace at {

struct CUDAHooks final : one_device::Hooks {
  explicit CUDAHooks(CUDAHooksArgs) {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
