// How a finding is told: what happened, which thread did it, and where in the sources.
#pragma once

#include <dlfcn.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "emulation_machine.h"

namespace sanitizer {

// A place in the code, as its distance from a symbol of this library, so that two fit the record of a byte.
using Caller = int32_t;
inline constexpr char anchor = 0;

inline Caller caller_of(const void* address) {
  return static_cast<Caller>(static_cast<const char*>(address) - &anchor);
}

// Function, file and line of a caller, innermost first, if there is an addr2line.
inline std::string source_of(Caller caller) {
  Dl_info info{};
  const char* address = &anchor + caller - 1;  // of the call, and not of what follows it
  if (dladdr(&anchor, &info) == 0) return "?";
  const auto offset = static_cast<size_t>(address - static_cast<const char*>(info.dli_fbase));
  char command[4096], line[512];
  std::snprintf(command, sizeof(command), "addr2line -ipfsC -e '%s' %zx 2>/dev/null", info.dli_fname, offset);
  std::string found;
  if (FILE* pipe = popen(command, "r")) {
    for (int i = 0; i < 4 && std::fgets(line, sizeof(line), pipe) != nullptr; ++i) {
      std::string text(line);
      if (const size_t template_at = text.find('<'), at = text.rfind(" at "); template_at < at && at != text.npos)
        text.erase(template_at, at - template_at);
      found += "\n      " + text.substr(0, text.find('\n'));
    }
    pclose(pipe);
  }
  return found.empty() ? "?" : found;
}

// Says what the running thread has done, and ends the process.
[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(Caller caller, const char* format, ...) {
  emulation::observer = nullptr;
  const dim3 block = emulation::here.block;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  const std::string from = caller == 0 ? "" : "\n    from" + source_of(caller);
  std::fprintf(stderr, "emulated GPU: thread %u of block (%u, %u, %u): %s%s\n", emulation::here.thread.x, block.x,
               block.y, block.z, text, from.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace sanitizer
