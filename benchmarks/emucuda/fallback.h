// Every operator that has no kernel of its own here: the host's kernel, over the same memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>

#include <string>
#include <unordered_set>

#include "aliases.h"
#include "random.h"
#include "waits.h"

namespace emucuda {

// Of FP16 and BF16 these are computed in FP32 and rounded once, as Tensor Cores do. The host's own
// kernels round sums on the way.
inline const std::unordered_set<std::string> kProducts = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_addmm_activation", "aten::addmv",
    "aten::mv", "aten::dot", "aten::vdot", "aten::addbmm", "aten::linear", "aten::linear_backward",
    "aten::convolution", "aten::convolution_backward", "aten::_convolution",
    "aten::convolution_overrideable",
};

// These need a number on the host before they can go on.
inline const std::unordered_set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave",
    "aten::bincount", "aten::_linalg_check_errors",
};

inline bool is_low(const Tensor& t) {
  return t.defined() && (t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16);
}

// One call of an operator on the host, in the given dtypes or, `widened`, with FP16 and BF16 in FP32.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, bool widened) : op_(op), widened_(widened) {}

  // The operands on the stack become the results.
  void run(c10::Stack& stack) {
    const auto& schema = op_.schema();
    const auto count = schema.arguments().size();
    for (size_t i = 0; i < count; ++i) {
      auto& value = stack[stack.size() - count + i];
      value = operand(value, schema.arguments()[i]);
    }
    op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    for (auto& [low, wide] : written_) {
      if (low.sizes() != wide.sizes()) at::native::resize_output(low, wide.sizes());
      low.copy_(wide);
    }
    aliases_.follow();
    if (!on_device_ && !aliases_.any()) return;
    const auto results = schema.returns().size();
    for (size_t i = 0; i < results; ++i) {
      auto& value = stack[stack.size() - results + i];
      value = result(value);
    }
  }

 private:
  c10::IValue operand(const c10::IValue& value, const c10::Argument& argument) {
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      return to_host(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& t : value.toTensorVector()) made.push_back(to_host(t, written));
      return made;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (std::optional<Tensor> t : value.toOptionalTensorList())
        made.push_back(t.has_value() ? std::optional<Tensor>(to_host(*t, written)) : std::nullopt);
      return made;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      on_device_ = true;
      return c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      return on_host(value.toGenerator());
    } else if (value.isNone() && argument.type()->str() == "Generator?") {
      return on_host(default_generator());
    }
    return value;
  }

  Tensor to_host(const Tensor& given, bool written) {
    if (!given.defined()) return given;
    Tensor host = aliases_.host(given);
    if (!widened_ || !is_low(host)) return host;
    low_ = host.scalar_type();
    for (auto& [low, wide] : written_)
      if (low.is_same(host)) return wide;
    Tensor wide = host.to(at::kFloat);
    if (written) written_.emplace_back(host, wide);
    return wide;
  }

  c10::IValue result(const c10::IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(to_device(t));
    return made;
  }

  Tensor to_device(const Tensor& host) {
    for (auto& [low, wide] : written_)
      if (wide.is_same(host)) return aliases_.device(low);
    const bool wide = widened_ && low_.has_value() && host.defined() && host.scalar_type() == at::kFloat;
    return aliases_.device(wide ? host.to(*low_) : host);
  }

  const c10::OperatorHandle& op_;
  const bool widened_;
  bool on_device_ = false;  // asked for by a device among the operands
  Aliases aliases_;
  std::optional<at::ScalarType> low_;
  std::vector<std::pair<Tensor, Tensor>> written_;  // in low precision, and in FP32: to be rounded back
};

// In FP32 the host would take operands of different dtypes, which cuBLAS and cuDNN refuse.
inline void check_one_dtype(const c10::OperatorHandle& op, const c10::Stack& operands) {
  std::optional<at::ScalarType> first;
  for (const auto& value : operands) {
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().is_floating_point()) continue;
    const auto dtype = value.toTensor().scalar_type();
    TORCH_CHECK(
        first.value_or(dtype) == dtype, op.schema().name(), ": expected operands of one dtype, but got ",
        *first, " and ", dtype);
    first = dtype;
  }
}

inline bool lacks_kernel(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.find("not implemented for") != std::string::npos ||
      text.find("not supported for") != std::string::npos;
}

// A result that is an operand's memory, not written: nothing is launched.
inline bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

inline void fallback(const c10::OperatorHandle& op, DispatchKeySet, c10::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch}));
  const auto& name = op.schema().name();
  ++g_now;
  if (!is_view(op.schema())) asked(kOperators);
  if (kWaiting.count(name)) wait_for_device(name);
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const c10::Stack operands(first, stack->end());
  stack->erase(first, stack->end());
  c10::Stack work(operands);
  if (kProducts.count(name)) {
    check_one_dtype(op, operands);
    HostCall(op, true).run(work);
  } else {
    try {
      HostCall(op, false).run(work);
    } catch (const c10::Error& error) {
      if (!lacks_kernel(error)) throw;
      work = operands;
      HostCall(op, true).run(work);
    }
  }
  for (auto& value : work) stack->push_back(std::move(value));
}

}  // namespace emucuda
