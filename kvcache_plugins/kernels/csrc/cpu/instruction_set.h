// The instruction set by which kernels are chosen: the best of this processor, or what KVCACHE_CPU_ISA names.
#pragma once

#include <c10/util/Exception.h>

#include <string>

extern "C" const char* kvcache_cpu_instruction_set();  // attention_binding.inl

namespace kvcache {
namespace {

// Its name; raises if the variable names none, or one that this processor lacks.
inline std::string instruction_set() {
  const std::string name = kvcache_cpu_instruction_set();
  const std::string error = "error: ";
  TORCH_CHECK_VALUE(name.compare(0, error.size(), error) != 0, name.substr(error.size()));
  return name;
}

}  // namespace
}  // namespace kvcache
