// Two GPUs that are not there: tensors of the CUDA device type in main memory, in a torch without CUDA, for the tests.
// What creates, views and copies tensors is implemented; any other operator runs on the CPU, over the same memory.
// Or they are Apple's, of the MPS device type, which have no fp64, no float8, and no operators but those named. Which
// is said when they are made: compiled for each type, torch's headers would take their ten seconds twice.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string>

namespace {

constexpr int kDevices = 2;
c10::DeviceType simulated;
c10::DispatchKeySet keys;
thread_local c10::DeviceIndex current_device = 0;
std::atomic<int64_t> allocated[kDevices], most_allocated[kDevices];
std::atomic<int> waits = 0;  // what happens when the host waits for a device: nothing, a warning, an error
std::set<std::string> operators;  // that the devices have, with their overloads; all if empty

void wait() {
  TORCH_CHECK(waits != 2, "called a synchronizing CUDA operation");
  if (waits == 1) TORCH_WARN("called a synchronizing CUDA operation");
}

void check_operator(const c10::OperatorName& name) {
  const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  TORCH_CHECK_NOT_IMPLEMENTED(operators.empty() || operators.count(full), "the simulated devices have no ", full);
}

void check_dtype(c10::ScalarType dtype) {
  if (simulated == c10::DeviceType::MPS)
    TORCH_CHECK_TYPE(dtype != c10::kDouble && dtype != c10::kComplexDouble && !c10::isFloat8Type(dtype),
                     "the simulated devices have no ", dtype);
}

struct Block {
  void* data;
  size_t size;
  c10::DeviceIndex device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated[block->device] -= block->size;
  std::free(block->data);
  delete block;
}

// Memory is given, and counted, in units of 512 bytes, as torch's allocator for GPUs does.
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    const size_t size = (wanted + 511) / 512 * 512;
    const c10::DeviceIndex index = current_device;
    auto* block = new Block{std::aligned_alloc(512, size + 512), size, index};
    const int64_t now = allocated[index] += size;
    most_allocated[index] = std::max<int64_t>(most_allocated[index], now);
    return {block->data, block, &release, c10::Device(simulated, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return simulated; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {simulated, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there are ", kDevices, " simulated devices, not ", device.index() + 1);
    current_device = std::max<c10::DeviceIndex>(device.index(), 0);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = std::max<c10::DeviceIndex>(device.index(), 0);
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

bool is_simulated(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == simulated; }

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_simulated(tensor)) return tensor;
  at::Tensor kept = tensor;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(tensor.storage().mutable_data(), new at::Tensor(kept),
                   [](void* owner) { delete static_cast<at::Tensor*>(owner); }, c10::kCPU),
      nullptr, false);
  return at::empty({0}, tensor.options().device(c10::kCPU))
      .set_(c10::Storage(storage), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

c10::Device placed(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(simulated, current_device);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  check_dtype(c10::dtype_or_default(dtype));
  const c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(size, &memory, keys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  check_dtype(c10::dtype_or_default(dtype));
  const c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(size, stride, &memory, keys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (is_simulated(to) != is_simulated(from) && !non_blocking && to.numel() > 0) wait();
  on_cpu(to).copy_(on_cpu(from), non_blocking);
  return to;
}

// A new tensor of the CPU as one of a device.
at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.device().type() == simulated) return tensor;
  at::Tensor result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  on_cpu(result).copy_(tensor);
  return result;
}

// One of `out`, which the operator may resize; what lies over memory of a device cannot be.
bool is_output(const c10::Argument& argument) {
  return argument.kwarg_only() && argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Whether an operator, on a GPU, asks the device for numbers: how much there is of what it returns, or what is equal;
// or is given indices that lie elsewhere.
bool needs_answers(const std::string& name, const std::vector<c10::IValue>& given) {
  static const std::set<std::string> always = {
      "aten::_unique", "aten::_unique2", "aten::bincount", "aten::equal", "aten::masked_select", "aten::nonzero",
      "aten::unique_consecutive", "aten::unique_dim", "aten::unique_dim_consecutive",
  };
  if (always.count(name)) return true;
  if (name == "aten::repeat_interleave") return given.back().isNone();  // without the size of its output
  if (name != "aten::index" && name != "aten::_index_put_impl_") return false;
  const bool is_filled = name != "aten::index" && given[2].toTensor().dim() == 0 && !is_simulated(given[2].toTensor());
  for (const std::optional<at::Tensor>& index : given[1].toOptionalTensorVector()) {
    if (!index || !index->defined()) continue;
    const bool is_mask = index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
    if (is_mask ? !is_filled : !is_simulated(*index)) return true;
  }
  return false;
}

// Runs an operator over the same memory on the CPU. What it returns is, where it is an argument that it changes, that
// argument, else a new tensor of the device.
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  check_operator(op.operator_name());
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  if (needs_answers(schema.name(), given)) wait();
  c10::Device device(simulated, current_device);
  bool is_placed = false;
  const auto move = [&](const at::Tensor& tensor) {
    if (is_simulated(tensor)) {
      TORCH_CHECK(!is_placed || device == tensor.device() || tensor.dim() == 0, op.schema().name(),
                  ": tensors of two devices, ", device, " and ", tensor.device());
      if (tensor.dim() > 0 || !is_placed) device = tensor.device();
      is_placed = is_placed || tensor.dim() > 0;
    } else if (tensor.defined()) {
      TORCH_CHECK(tensor.dim() == 0 || schema.name() == "aten::index" || schema.name() == "aten::_index_put_impl_",
                  schema.name(), ": a tensor of ", tensor.device(), " among those of a GPU");
    }
    return on_cpu(tensor);
  };
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      const at::Tensor moved = move(value.toTensor());
      value = is_output(schema.arguments()[i]) ? at::empty({0}, moved.options()) : moved;
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> moved;
      for (const at::Tensor& tensor : value.toTensorVector()) moved.push_back(move(tensor));
      value = moved;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> moved;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        moved.push_back(tensor ? std::optional<at::Tensor>(move(*tensor)) : std::nullopt);
      value = moved;
    } else if (value.isDevice()) {
      device = placed(value.toDevice());
      value = c10::Device(c10::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const size_t returned = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    c10::IValue& value = (*stack)[returned + i];
    const c10::AliasInfo* alias = schema.returns()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t k = 0; k < count; ++k) {
        const c10::AliasInfo* other = schema.arguments()[k].alias_info();
        if (other == nullptr || !other->isWrite() || other->beforeSets() != alias->beforeSets()) continue;
        if (is_output(schema.arguments()[k]))
          on_cpu(given[k].toTensor().resize_(value.toTensor().sizes())).copy_(value.toTensor());
        value = given[k];
        break;
      }
    } else if (value.isTensor()) {
      TORCH_CHECK(alias == nullptr, "the simulated devices have no view ", schema.name());
      value = on_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> moved;
      for (const at::Tensor& tensor : value.toTensorVector()) moved.push_back(on_device(tensor, device));
      value = moved;
    }
  }
}

c10::Scalar number(const at::Tensor& tensor) {
  wait();
  return on_cpu(tensor).item();
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (tensor.sizes() == size) return tensor;
  const c10::DeviceGuard guard(tensor.device());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (impl->storage().nbytes() < impl->numel() * impl->itemsize())
    impl->set_storage_keep_dtype(at::detail::empty_generic(size, &memory, keys,
                                                           tensor.scalar_type(), format)
                                     .storage());
  return tensor;
}

}  // namespace

extern "C" {
// Makes the devices, once in a process: Apple's, or others.
__attribute__((visibility("default"))) void kvcache_simulate(bool is_apple) {
  simulated = is_apple ? c10::DeviceType::MPS : c10::DeviceType::CUDA;
  const c10::DispatchKey key = is_apple ? c10::DispatchKey::MPS : c10::DispatchKey::CUDA;
  keys = c10::DispatchKeySet(key);
  c10::impl::DeviceGuardImplRegistrar(simulated, new Guard);
  static torch::Library others(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  others.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  static torch::Library m(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &number);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Let the devices have the operators named, one in a line.
__attribute__((visibility("default"))) void kvcache_simulate_only(const char* names) {
  std::istringstream lines(names);
  operators.clear();
  for (std::string name; std::getline(lines, name);) operators.insert(name);
}
__attribute__((visibility("default"))) int kvcache_simulated_device() { return current_device; }
__attribute__((visibility("default"))) int kvcache_set_simulated_device(int device) {
  const int before = current_device;
  current_device = static_cast<c10::DeviceIndex>(device);
  return before;
}
__attribute__((visibility("default"))) int kvcache_simulated_waits() { return waits; }
__attribute__((visibility("default"))) void kvcache_set_simulated_waits(int mode) { waits = mode; }
__attribute__((visibility("default"))) int64_t kvcache_simulated_bytes(int device) { return allocated[device]; }
__attribute__((visibility("default"))) int64_t kvcache_most_simulated_bytes(int device, bool reset) {
  const int64_t most = most_allocated[device];
  if (reset) most_allocated[device] = allocated[device].load();
  return most;
}
}
