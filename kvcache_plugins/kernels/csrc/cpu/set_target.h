// What a source file compiled for one instruction set reads before it sets that target.
//
// An inline function of a header that other files read, too, is one symbol in the library, and the library
// has to run on every machine: those of the standard library and of the interfaces are therefore defined
// before the target is set. Where they are not, GCC 13 and 14 also refuse containers: the implicit members of
// their classes are compiled for any machine, and cannot have functions for another target inlined, as some
// have to be.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "attend_latents.h"
#include "decode_attention.h"
#include "decode_tokens.h"
#include "encode_levels.h"
#include "encode_unit.h"
#include "receive_weights.h"

#define KVCACHE_PRAGMA(text) _Pragma(#text)

// Sets the target of the functions from here to KVCACHE_END_TARGET.
#if defined(__clang__)
#define KVCACHE_TARGET(names) \
  KVCACHE_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define KVCACHE_END_TARGET KVCACHE_PRAGMA(clang attribute pop)
#else
#define KVCACHE_TARGET(names) KVCACHE_PRAGMA(GCC push_options) KVCACHE_PRAGMA(GCC target(names))
#define KVCACHE_END_TARGET KVCACHE_PRAGMA(GCC pop_options)
#endif
