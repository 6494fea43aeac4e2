// What an error says of its place, found out when there is one.
#include <cxxabi.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "machine.h"

namespace ptx {
namespace {

// NAME of the line `.file number "PATH/NAME"`.
std::string file_name(const std::string& text, const std::string& number) {
  const size_t at = text.find("\t.file\t" + number + " \"");
  if (at == text.npos) return "?";
  const size_t end = text.find('"', text.find('"', at) + 1);
  const size_t begin = text.find_last_of("/\"", end - 1) + 1;
  return text.substr(begin, end - begin);
}

std::string demangled(const std::string& name) {
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr);
  const std::string found = text != nullptr ? text : name;
  std::free(text);
  return found;
}

}  // namespace

std::string place_of(const Listing& listing, size_t at) {
  const std::string& text = listing.text;
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
  const std::string statement = text.substr(at, text.find(';', at) - at);
  std::string place = listing.name + ":" + std::to_string(line) + " `" + statement + "`";
  std::replace(place.begin(), place.end(), '\t', ' ');
  // .loc FILE LINE COLUMN, before what it is of; line 0 is none
  int file = 0, row = 0;
  for (size_t location = text.rfind(".loc\t", at); location != text.npos; location = text.rfind(".loc\t", location - 1))
    if (std::sscanf(text.c_str() + location, ".loc %d %d", &file, &row) == 2 && row > 0)
      return place + " of " + file_name(text, std::to_string(file)) + ":" + std::to_string(row);
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
                           place_of(*warp.kernel->listing, instruction.at) + ", " + where + ": " + what);
}

}  // namespace ptx
