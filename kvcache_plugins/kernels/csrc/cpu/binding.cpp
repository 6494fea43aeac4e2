// The CPU implementations of all operators (schemas: kvcache_plugins/kernels/ops.py), in one translation unit: reading
// torch's headers takes several times as long as compiling any of them.
#include "append_binding.inl"
#include "attention_binding.inl"
#include "decode_tokens_binding.inl"
#include "encode_binding.inl"
#include "encode_levels_binding.inl"
#include "gather_tokens_binding.inl"
#include "measure_binding.inl"
#include "multiply_binding.inl"
