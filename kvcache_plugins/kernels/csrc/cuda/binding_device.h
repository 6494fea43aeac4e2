// The device the bindings serve: the current stream of the tensors' GPU, or, with KVCACHE_EMULATION, the CPU that
// stands in for one in tests. Includes no more of torch's CUDA headers than c10, which need only the CUDA runtime.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>

#define KVCACHE_CHECK(condition, what, name, expected, got) \
  TORCH_CHECK_VALUE(condition, "Invalid ", what, " of ", name, ": expected ", expected, ", got ", got)

#if defined(KVCACHE_EMULATION)

#define KVCACHE_LIBRARY kvcache_emulated
#define KVCACHE_DISPATCH_KEY CPU

namespace kvcache {
namespace {

constexpr const char* kDeviceName = "cpu";
inline bool is_served(const at::Tensor& tensor) { return tensor.device().is_cpu(); }

class Device {
 public:
  explicit Device(const at::Tensor&) {}
  void* stream() const { return nullptr; }
  int multiprocessors() const { return 2; }
  int shared_bytes() const { return 232448; }
  bool is_capturing() const { return false; }
  void check(int status) const { TORCH_CHECK(status == 0, "emulation failed"); }
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

constexpr const char* kDeviceName = "cuda";
inline bool is_served(const at::Tensor& tensor) { return tensor.device().is_cuda(); }

// Makes the GPU of a tensor the current one for as long as it lives.
class Device {
 public:
  explicit Device(const at::Tensor& tensor) : guard_(tensor.device()), index_(tensor.get_device()) {}
  void* stream() const { return c10::cuda::getCurrentCUDAStream(index_).stream(); }
  int multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }
  int shared_bytes() const { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
  bool is_capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream()), &status));
    return status != cudaStreamCaptureStatusNone;
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
