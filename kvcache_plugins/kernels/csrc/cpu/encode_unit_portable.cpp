// Encoding for any 64-bit machine: the shared implementation, compiled for the base instruction set.
#include "encode_unit.inl"

namespace kvcache {

UnitKernels unit_kernels_portable() { return kUnitKernels; }

}  // namespace kvcache
