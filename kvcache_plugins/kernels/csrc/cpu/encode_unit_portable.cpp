// Encoding for any 64-bit machine: the shared implementation, compiled for the base instruction set.
#include "encode_levels.inl"
#include "encode_unit.inl"

namespace kvcache {

UnitKernels unit_kernels_portable() { return kUnitKernels; }

LevelKernels level_kernels_portable() { return kLevelKernels; }

}  // namespace kvcache
