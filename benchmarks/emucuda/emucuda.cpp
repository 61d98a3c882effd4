// A CUDA device that computes: its memory is the host's, its kernels are the host's. Loaded before a CPU
// build of torch, which then takes it for a GPU.
//
// One file for the compiler: reading ATen's headers takes most of its time. Read in torch 2.13.
#include <ATen/ATen.h>
#include <ATen/native/RNN.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "aliases.h"
#include "calls.h"
#include "fallback.h"
#include "kernels.h"
#include "memory.h"
#include "one_device.h"
#include "random.h"
#include "waits.h"

namespace {

using one_device::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
// By their pointers, since both names are macros' arguments.
auto* device_memory = &emucuda::g_memory;
REGISTER_ALLOCATOR(c10::kCUDA, device_memory);

// The host's attention has no dropout. Written out as products there is one, of another operator.
int64_t attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, double dropout, bool causal,
                  std::optional<double> scale, bool shared_heads) {
  if (dropout > 0) return static_cast<int64_t>(at::SDPBackend::math);
  return one_device::attention(query, key, value, mask, dropout, causal, scale, shared_heads);
}

// cuDNN's LSTM and GRU: the operator that autograd knows. Its kernel is in recurrent.py.
constexpr int64_t kLSTM = 2, kGRU = 3;  // cudnnRNNMode_t

auto cudnn_rnn(const at::Tensor& input, at::TensorList params, const at::Tensor& hx,
               const std::optional<at::Tensor>& cx, int64_t mode, int64_t projection, bool has_biases,
               int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  return at::_cudnn_rnn(input, params, has_biases ? 4 : 2, {}, hx, cx, mode, cx ? cx->size(2) : hx.size(2),
                        projection, layers, batch_first, dropout, train, bidirectional, {}, {});
}

void cudnn_lstm(at::Tensor& output, at::Tensor& hy, at::Tensor& cy, const at::Tensor& input, at::TensorList hx,
          at::TensorList params, bool has_biases, int64_t layers, double dropout, bool train,
          bool bidirectional, bool batch_first) {
  const int64_t projection = hx[0].size(2) == hx[1].size(2) ? 0 : hx[0].size(2);
  auto got = cudnn_rnn(input, params, hx[0], hx[1], kLSTM, projection, has_biases, layers, dropout, train,
                       bidirectional, batch_first);
  output = std::get<0>(got);
  hy = std::get<1>(got);
  cy = std::get<2>(got);
}

void cudnn_gru(at::Tensor& output, at::Tensor& hy, const at::Tensor& input, const at::Tensor& hx,
         at::TensorList params, bool has_biases, int64_t layers, double dropout, bool train,
         bool bidirectional, bool batch_first) {
  auto got = cudnn_rnn(input, params, hx, {}, kGRU, 0, has_biases, layers, dropout, train, bidirectional,
                       batch_first);
  output = std::get<0>(got);
  hy = std::get<1>(got);
}

}  // namespace

namespace at::native {

const RegisterCUDADispatch<std::remove_reference_t<decltype(lstm_cudnn_stub)>> lstm_here(lstm_cudnn_stub, cudnn_lstm);
const RegisterCUDADispatch<std::remove_reference_t<decltype(gru_cudnn_stub)>> gru_here(gru_cudnn_stub, cudnn_gru);
const RegisterCUDADispatch<std::remove_reference_t<decltype(_fused_sdp_choice_stub)>> chosen(
    _fused_sdp_choice_stub, attention);

}  // namespace at::native

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&emucuda::fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &emucuda::empty);
  m.impl("empty_strided", &emucuda::empty_strided);
  m.impl("copy_", &emucuda::copy_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &emucuda::set_part);
  m.impl("set_.source_Storage", &emucuda::set_whole);
  m.impl("set_.source_Tensor", &emucuda::set_as);
  m.impl("set_", &emucuda::set_empty);
  m.impl("record_stream", &emucuda::record_stream);
  // Composite: without a kernel here they would look for cuDNN's own.
  for (const char* name : {"convolution", "convolution_backward", "_convolution"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&emucuda::fallback>());
  // Likewise these: without one, they would be an operator for each tensor of the list.
  for (const char* name : {"_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_copy_", "_foreach_div_.Scalar",
                           "_foreach_mul_.Scalar", "_foreach_mul_.Tensor", "_foreach_norm.Scalar",
                           "_foreach_sub_.List"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&emucuda::fallback>());
}

TORCH_LIBRARY(emucuda, m) {
  m.def("to_host(Tensor(a) x) -> Tensor(a)");
  m.def("to_device(Tensor(a) x) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(emucuda, CompositeExplicitAutograd, m) {
  m.impl("to_host", &emucuda::to_host);
  m.impl("to_device", &emucuda::to_device);
}

// What library.py declares for Python.
extern "C" {
void emucuda_capability(int major) { one_device::major = major; }
void emucuda_sync_mode(int mode) { emucuda::g_sync_mode = mode; }
int64_t emucuda_now() { return emucuda::g_now; }
void emucuda_tick() { ++emucuda::g_now; }
void emucuda_arrive(int64_t until) { emucuda::arrive(until); }
int64_t emucuda_calls(int kind) { return emucuda::g_calls[kind]; }
int64_t emucuda_allocated() { return emucuda::g_allocated; }
int64_t emucuda_peak() { return emucuda::g_peak; }
void emucuda_reset_peak() { emucuda::g_peak = emucuda::g_allocated.load(); }
}

namespace at {

struct CUDAHooks final : one_device::Hooks {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  void deviceSynchronize(DeviceIndex) const override { emucuda::arrive(INT64_MAX); }
  bool isPinnedPtr(const void* place) const override { return emucuda::is_pinned(place); }
  Allocator* getPinnedMemoryAllocator() const override { return &emucuda::g_pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &emucuda::g_memory; }
  Device getDeviceFromPtr(void*) const override { return emucuda::kDevice; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return emucuda::default_generator(); }
  Generator getNewGenerator(DeviceIndex) const override { return emucuda::new_generator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
