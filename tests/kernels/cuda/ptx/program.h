// What PTX becomes: kernels of instructions whose operands are numbered, ready to be run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = ~0u;
// Where spaces begin. Shared memory as on sm_90, whose first kilobyte is not a kernel's.
constexpr uint64_t kSharedBase = 0x400, kParameterBase = 0x00A0000000000000, kGenericShared = 0x00F0000000000000;

struct Warp;
struct Instruction;
// Does an instruction in these lanes of a warp.
using Operation = void (*)(Warp& warp, const Instruction& instruction, uint32_t lanes);
using Operations = std::unordered_map<std::string_view, Operation>;

enum class Control : uint8_t { kNone, kBranch, kReturn, kBlockBarrier, kWarpBarrier };
enum class Space : uint8_t { kNone, kGlobal, kShared, kParameter };

// At most so many operands of a kind, as numbers of registers.
template <int kMost>
struct List {
  int items[kMost] = {}, size = 0;

  void add(int item) {
    if (size == kMost) throw std::runtime_error("an instruction with too many operands");
    items[size++] = item;
  }
  int operator[](int i) const { return items[i]; }
  const int* begin() const { return items; }
  const int* end() const { return items + size; }
};

struct Instruction {
  Operation operation = nullptr;
  Control control = Control::kNone;
  bool is_aligned = false;  // every lane of the warp must execute it, or, of a branch, all go the same way
  bool is_guard_negated = false;
  int guard = -1;  // a predicate
  List<4> to;
  List<10> from;
  List<2> from_predicates;
  int to_predicate = -1;
  int target = -1, join = -1;  // of a branch: where to, and where the lanes meet again, if before the end
  // of loads and stores
  Space space = Space::kNone;
  bool is_signed = false;
  bool is_volatile = false;
  int bytes = 0;        // of each number
  int64_t offset = 0;   // of the address
  uint32_t used = ~0u;  // which of the bytes matter
  size_t at = 0;        // in the text
};

// A PTX file.
struct Listing {
  std::string name, text;
};

struct Kernel {
  std::string name;
  const Listing* listing = nullptr;
  std::vector<Instruction> code;
  std::vector<int> widths;  // of registers, in bits
  int predicates = 0;
  std::vector<std::pair<int, uint64_t>> constants;   // registers and what they hold
  std::map<std::string, int, std::less<>> specials;  // registers of %tid.x and the like
  size_t parameter_bytes = 0;
  unsigned most_threads = 0;
};

// Where kernels begin in a text, by name.
std::map<std::string, size_t> find_kernels(const std::string& text);
Kernel parse(const Listing& listing, size_t entry);

// Sets `join` of every branch.
void find_joins(std::vector<Instruction>& code);

// The name of a kernel as its source has it.
std::string demangled(const std::string& name);

// Line and text of the instructions of a listing, and the lines of the source that they are of.
class Places {
 public:
  explicit Places(const Listing& listing);
  std::string of(size_t at) const;

 private:
  const Listing& listing_;
  std::vector<size_t> ends_;  // of lines
  std::map<int, std::string> files_;
};

// Every instruction but loads, stores, branches and barriers, by name.
const Operations& operations();
// What `operations` is of.
void add_integers(Operations& table);
void add_floats(Operations& table);
void add_halves(Operations& table);
void add_moves(Operations& table);
void add_collectives(Operations& table);
void add_copies(Operations& table);

void load(Warp& warp, const Instruction& instruction, uint32_t lanes);
void store(Warp& warp, const Instruction& instruction, uint32_t lanes);

}  // namespace ptx
