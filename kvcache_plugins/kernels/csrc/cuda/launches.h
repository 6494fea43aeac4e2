// The launches of the kernels: what the bindings, which know torch, may call. `stream` is a cudaStream_t, the result a
// cudaError_t. A .cu file defines one instance each, so that they compile side by side.
#pragma once

#include "arguments.h"

namespace kvcache {

int attend_8_rows(const AttentionArguments& a, int batch, void* stream);  // values of up to 128 channels
// The same of formats that are known (known_formats.h).
int attend_int8(const AttentionArguments& a, int batch, void* stream);
int attend_float8(const AttentionArguments& a, int batch, void* stream);
int attend_int4(const AttentionArguments& a, int batch, void* stream);
int attend_kivi_4(const AttentionArguments& a, int batch, void* stream);
int attend_kivi_4_wide(const AttentionArguments& a, int batch, void* stream);
int attend_kivi_2(const AttentionArguments& a, int batch, void* stream);
int attend_kivi_4_rotated(const AttentionArguments& a, int batch, void* stream);
int attend_kivi_4_wide_rotated(const AttentionArguments& a, int batch, void* stream);
int attend_kivi_2_rotated(const AttentionArguments& a, int batch, void* stream);
int attend_kvquant_2(const AttentionArguments& a, int batch, void* stream);
int attend_kvquant_3(const AttentionArguments& a, int batch, void* stream);
int attend_kvquant_4(const AttentionArguments& a, int batch, void* stream);
int attend_16_rows(const AttentionArguments& a, int batch, void* stream);
int attend_8_rows_wide(const AttentionArguments& a, int batch, void* stream);  // of up to 256
int attend_levels(const AttentionArguments& a, int batch, void* stream);       // any KVQuant, of up to 128 channels
int attend_levels_wide(const AttentionArguments& a, int batch, void* stream);
int attend_general_rows(const AttentionArguments& a, int batch, void* stream);  // what these leave, or all
int merge_rows(const AttentionArguments& a, int batch, void* stream);

// The compute capability, times ten, for which the kernels of decode attention on the current device were compiled, or
// 0 if that is not known.
int attention_compiled_for();

// Dynamic shared memory of a thread block of the fast path for up to `8 columns` query rows.
int attention_shared_bytes(const AttentionArguments& a, int columns);

int decode_slots(const DecodeArguments& a, int batch, void* stream);
int gather_slots(const GatherArguments& a, int batch, void* stream);
int encode_slots(const EncodeArguments& a, int batch, int heads, void* stream);
int encode_blocks(const LevelArguments& a, int batch, void* stream);
int append_slots(const AppendArguments& a, int batch, int heads, void* stream);

// Sets *flag to 1 if a number of the states is not finite or, in magnitude, at least `limit`.
int find_large_numbers(const EncodeArguments& a, int batch, int heads, float limit, int32_t* flag, void* stream);

}  // namespace kvcache
