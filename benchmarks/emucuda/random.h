// The generator of the device: the host's, under another device's name.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "one_device.h"

namespace emucuda {

struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator()
      : c10::GeneratorImpl(one_device::kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(at::make_generator<at::CPUGeneratorImpl>()) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
    offset = 0;
  }
  void set_offset(uint64_t value) override { offset = value; }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { impl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl()->get_state(); }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    set_state(*state->get_state());
  }
  static c10::DeviceType device_type() { return c10::kCUDA; }
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator();
    made->impl()->set_state(*get_state());
    made->offset = offset;
    return made;
  }

  at::Generator host;

 private:
  c10::GeneratorImpl* impl() const { return host.unsafeGetGeneratorImpl(); }
  uint64_t offset = 0;
};

inline const at::Generator& default_generator() {
  static at::Generator made = at::make_generator<DeviceGenerator>();
  return made;
}

inline at::Generator on_host(const at::Generator& given) {
  if (!given.defined() || !given.device().is_cuda()) return given;
  return static_cast<DeviceGenerator*>(given.unsafeGetGeneratorImpl())->host;
}

// The first that is made is the default one: torch.cuda.default_generators[0].
inline at::Generator new_generator() {
  static std::atomic<bool> first{true};
  return first.exchange(false) ? default_generator() : at::make_generator<DeviceGenerator>();
}

}  // namespace emucuda
