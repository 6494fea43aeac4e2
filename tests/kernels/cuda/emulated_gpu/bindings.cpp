// All bindings of the kernels in one unit: each alone takes seven seconds to compile, most of them for torch's headers,
// and so do all together.
#include "append_tokens_binding.cpp"
#include "decode_attention_binding.cpp"
#include "decode_tokens_binding.cpp"
#include "encode_levels_binding.cpp"
#include "encode_tokens_binding.cpp"
#include "gather_tokens_binding.cpp"
