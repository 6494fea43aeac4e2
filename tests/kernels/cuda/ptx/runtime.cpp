// The part of the CUDA runtime that launches of nvcc's host code need, so that this code runs as it is: kernels are
// registered when the library is loaded, and their PTX is interpreted. And what Python asks.
#include <string>

#include "launching.h"

namespace {

using ptx::dim3;

// Values of the CUDA headers.
constexpr int kSuccess = 0, kInvalidValue = 1;
constexpr int kMostSharedBytes = 97;       // cudaDevAttrMaxSharedMemoryPerBlockOptin
constexpr int kSharedBytesOfFunction = 8;  // cudaFuncAttributeMaxDynamicSharedMemorySize
constexpr int kStreamSerialization = 6;    // cudaLaunchAttributeProgrammaticStreamSerialization

struct Function {
  std::string name;
  size_t most_shared_bytes = 48 * 1024;  // until it asks for more
  bool has_asked = false;
};

// By the address of the host's function of that name.
std::map<const void*, Function>& functions() {
  static std::map<const void*, Function> all;
  return all;
}

struct Configuration {
  dim3 grid, threads;
  size_t shared_bytes;
  void* stream;
};
thread_local Configuration configuration;

// What a function throws, or null.
template <class Body>
const char* problem_of(Body body) {
  static thread_local std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& problem) {
    message = problem.what();
    return message.c_str();
  }
}

}  // namespace

#pragma GCC visibility push(hidden)
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  functions()[function] = {name};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 threads, size_t shared_bytes, void* stream) {
  configuration = {grid, threads, shared_bytes, stream};
  return 0;
}
int __cudaPopCallConfiguration(dim3* grid, dim3* threads, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid;
  *threads = configuration.threads;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<void**>(stream) = configuration.stream;
  return kSuccess;
}

// A function's handle is its address here, which is what runtimes before 13.0 launch by.
int __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return kSuccess;
}
int launch_function(const void* function, dim3 grid, dim3 threads, void** arguments, size_t shared_bytes,
                    bool is_early) {
  const Function& found = functions().at(function);
  if (shared_bytes > found.most_shared_bytes) return kInvalidValue;
  ptx::launch(found.name, grid, threads, shared_bytes, arguments[0], is_early);
  return kSuccess;
}
int cudaLaunchKernel(const void* function, dim3 grid, dim3 threads, void** arguments, size_t shared_bytes, void*) {
  return launch_function(function, grid, threads, arguments, shared_bytes, false);
}
int __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 threads, void** arguments, size_t shared_bytes,
                       void* stream) {
  return cudaLaunchKernel(kernel, grid, threads, arguments, shared_bytes, stream);
}

int cudaGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}
// cudaLaunchAttribute and cudaLaunchConfig_t
struct LaunchAttribute {
  int id;
  alignas(8) int value;
  char further[60];
};
static_assert(sizeof(LaunchAttribute) == 72);
struct LaunchConfiguration {
  dim3 grid, threads;
  size_t shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned count;
};
int cudaLaunchKernelExC(const LaunchConfiguration* given, const void* function, void** arguments) {
  bool is_early = false;
  for (unsigned i = 0; i < given->count; ++i)
    is_early |= given->attributes[i].id == kStreamSerialization && given->attributes[i].value != 0;
  return launch_function(function, given->grid, given->threads, arguments, given->shared_bytes, is_early);
}

// As cudaFuncAttributes begins.
struct FunctionAttributes {
  size_t bytes[3];
  int most_threads, registers, ptx_version;
};
int cudaFuncGetAttributes(FunctionAttributes* attributes, const void*) {
  attributes->ptx_version = 90;
  return kSuccess;
}
int cudaDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

int cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = 232448;
  return attribute == kMostSharedBytes ? kSuccess : kInvalidValue;
}
int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  if (attribute != kSharedBytesOfFunction) return kSuccess;
  auto& asking = functions().at(function);
  if (asking.has_asked) return kInvalidValue;  // a GPU would grant it, and might wait for copies first
  asking.has_asked = true;
  asking.most_shared_bytes = value;
  return kSuccess;
}
int cudaGetLastError() { return kSuccess; }

}  // extern "C"
#pragma GCC visibility pop

extern "C" {

// Returns what is wrong with a PTX file, or null.
const char* kvcache_read_ptx(const char* path) {
  return problem_of([&] { ptx::read_listing(path); });
}

// One warp of a kernel, by its name in the PTX; returns what is wrong, or null.
const char* kvcache_launch_ptx(const char* name, size_t shared_bytes, const void* parameters) {
  return problem_of([&] { ptx::launch(name, {}, {ptx::kLanes}, shared_bytes, parameters, false); });
}

void kvcache_count_accesses(bool are_counted) { ptx::count_accesses(are_counted); }

// See `ptx::counts`.
const char* kvcache_ptx_counts() {
  static thread_local std::string lines;
  lines = ptx::counts();
  return lines.c_str();
}

// Kernels that have been launched, or have not.
const char* kvcache_ptx_kernels(bool is_launched) {
  static thread_local std::string names;
  names = ptx::names_of_kernels(is_launched);
  return names.c_str();
}

long kvcache_emulated_products() { return ptx::products; }

const char* kvcache_emulated_kernels() {
  static thread_local std::string names;
  names = ptx::names_of_launches();
  return names.c_str();
}

}  // extern "C"
