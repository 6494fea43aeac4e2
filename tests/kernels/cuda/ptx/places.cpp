// What errors and counts say of their places, found out when there is one to be told.
#include <cxxabi.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "machine.h"

namespace ptx {

std::string demangled(const std::string& name) {
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr);
  const std::string found = text != nullptr ? text : name;
  std::free(text);
  return found;
}

Places::Places(const Listing& listing) : listing_(listing) {
  const std::string& text = listing.text;
  constexpr std::string_view kFile = "\t.file\t";
  for (size_t at = text.find('\n'); at != text.npos; at = text.find('\n', at + 1)) {
    ends_.push_back(at);
    if (text.compare(at + 1, kFile.size(), kFile) != 0) continue;
    // .file NUMBER "PATH/NAME"
    const size_t end = text.find('"', text.find('"', at) + 1), begin = text.find_last_of("/\"", end - 1) + 1;
    files_[std::atoi(text.c_str() + at + 1 + kFile.size())] = text.substr(begin, end - begin);
  }
}

std::string Places::of(size_t at) const {
  const std::string& text = listing_.text;
  const auto line = 1 + std::distance(ends_.begin(), std::lower_bound(ends_.begin(), ends_.end(), at));
  const std::string statement = text.substr(at, text.find(';', at) - at);
  std::string place = listing_.name + ":" + std::to_string(line) + " `" + statement + "`";
  std::replace(place.begin(), place.end(), '\t', ' ');
  // .loc FILE LINE COLUMN, before what it is of; line 0 is none
  constexpr std::string_view kLocation = ".loc\t";
  for (size_t from = text.rfind(kLocation, at); from != text.npos; from = text.rfind(kLocation, from - 1)) {
    char* end = nullptr;
    const long file = std::strtol(text.c_str() + from + kLocation.size(), &end, 10), row = std::strtol(end, &end, 10);
    if (row > 0) return place + " of " + files_.at(static_cast<int>(file)) + ":" + std::to_string(row);
  }
  return place;
}

void fail(const Warp& warp, const Instruction& instruction, const char* format, ...) {
  char what[256], where[128];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof(what), format, arguments);
  va_end(arguments);
  const dim3 block = warp.block->index;
  std::snprintf(where, sizeof(where), "warp %d of block (%u, %u, %u), lanes %08x", warp.index, block.x, block.y,
                block.z, warp.active);
  throw std::runtime_error("PTX of " + demangled(warp.kernel->name) + ", " +
                           Places(*warp.kernel->listing).of(instruction.at) + ", " + where + ": " + what);
}

}  // namespace ptx
