// The device the bindings serve: the current stream of the tensors' GPU, or, with KVCACHE_EMULATION, the CPU that
// stands in for one in tests, under its own name. Includes no more of torch's CUDA headers than c10, which need only
// the CUDA runtime.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#define KVCACHE_CHECK(condition, what, name, expected, got) \
  TORCH_CHECK_VALUE(condition, "Invalid ", what, " of ", name, ": expected ", expected, ", got ", got)

#if defined(KVCACHE_EMULATION)

#include <c10/core/DeviceGuard.h>

#define KVCACHE_LIBRARY kvcache_emulated
#define KVCACHE_DISPATCH_KEY CPU

namespace kvcache {
namespace {

// Of simulated GPUs, whose memory is that of the CPU, the current one.
inline at::Device served_device() {
  const bool is_simulated = std::getenv("KVCACHE_EMULATED_SIMULATION") != nullptr;
  return c10::impl::VirtualGuardImpl(is_simulated ? at::kCUDA : at::kCPU).getDevice();
}

class Device {
 public:
  explicit Device(const at::Tensor& tensor) : guard_(tensor.device()), index_(std::max<int>(tensor.get_device(), 0)) {}
  void* stream() const { return nullptr; }
  int index() const { return index_; }
  int multiprocessors() const { return given("KVCACHE_EMULATED_MULTIPROCESSORS", 2); }
  int shared_bytes() const { return given("KVCACHE_EMULATED_SHARED_BYTES", 232448); }
  int64_t scratch_bytes() const { return 1 << 16; }  // so little that runs are divided
  bool is_capturing() const { return false; }
  int32_t* shared_words(size_t count) const { return static_cast<int32_t*>(std::calloc(count, sizeof(int32_t))); }
  void check(int status) const { TORCH_CHECK(status == 0, "emulation failed"); }

 private:
  static int given(const char* name, int otherwise) {
    const char* const number = std::getenv(name);
    return number != nullptr ? std::atoi(number) : otherwise;
  }

  c10::DeviceGuard guard_;
  int index_;
};

}  // namespace
}  // namespace kvcache

#else

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#define KVCACHE_LIBRARY kvcache_plugins
#define KVCACHE_DISPATCH_KEY CUDA

namespace kvcache {
namespace {

// The GPU that a `Device` has made the current one; tensors of others lie where its kernels must not reach.
inline at::Device served_device() { return {at::kCUDA, c10::cuda::current_device()}; }

// Makes the GPU of a tensor the current one for as long as it lives.
class Device {
 public:
  explicit Device(const at::Tensor& tensor) : guard_(tensor.device()), index_(tensor.get_device()) {}
  int index() const { return index_; }
  void* stream() const { return c10::cuda::getCurrentCUDAStream(index_).stream(); }
  int multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }
  int shared_bytes() const { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
  int64_t scratch_bytes() const { return 64 << 20; }  // that a launch may be given
  bool is_capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream()), &status));
    return status != cudaStreamCaptureStatusNone;
  }
  // Zeroed words that kernels write and the host reads, at one address for both; never given back.
  int32_t* shared_words(size_t count) const {
    void* words = nullptr;
    check(cudaHostAlloc(&words, count * sizeof(int32_t), cudaHostAllocPortable | cudaHostAllocMapped));
    std::memset(words, 0, count * sizeof(int32_t));
    return static_cast<int32_t*>(words);
  }
  void check(int status) const {
    const auto error = static_cast<cudaError_t>(status);
    TORCH_CHECK(error == cudaSuccess, "CUDA kernel of kvcache_plugins: ", cudaGetErrorString(error));
  }

 private:
  // Read from the runtime's tables; no call to the device.
  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, index_));
    return value;
  }

  c10::cuda::CUDAGuard guard_;
  c10::DeviceIndex index_;
};

}  // namespace
}  // namespace kvcache

#endif

namespace kvcache {
namespace {

inline bool is_served(const at::Tensor& tensor) { return tensor.device() == served_device(); }

inline void check_device(const at::Tensor& tensor, const std::string& name) {
  KVCACHE_CHECK(is_served(tensor), "device", name, served_device(), tensor.device());
}

}  // namespace
}  // namespace kvcache
