// PTX text into kernels. It takes what nvcc makes of our sources, and refuses everything else by name.
#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "program.h"

namespace ptx {
namespace {

constexpr std::string_view kBlank = " \t\r\n";

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(kBlank);
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

// Parts between commas, braces kept together.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}') --depth;
    if (text[i] != ',' || depth != 0) continue;
    parts.push_back(trim(text.substr(begin, i - begin)));
    begin = i + 1;
  }
  if (const auto last = trim(text.substr(begin)); !last.empty()) parts.push_back(last);
  return parts;
}

// The parts of {a, b}, or all of what has no braces.
std::vector<std::string_view> members(std::string_view text) {
  return text.front() == '{' ? split(text.substr(1, text.size() - 2)) : std::vector{text};
}

std::string_view take_word(std::string_view& text) {
  const size_t end = std::min(text.find_first_of(kBlank), text.size());
  const std::string_view word = text.substr(0, end);
  text = trim(text.substr(end));
  return word;
}

int64_t integer(std::string_view text) { return std::strtoll(std::string(text).c_str(), nullptr, 0); }

bool is_predicate(std::string_view name) {
  return name.size() > 2 && name.starts_with("%p") && std::isdigit(static_cast<unsigned char>(name[2]));
}

class Parser {
 public:
  Parser(const Listing& listing, size_t entry) : listing_(listing), text_(listing.text), at_(entry) {
    kernel_.listing = &listing;
  }

  Kernel parse() {
    parse_head();
    while (parse_statement()) continue;
    for (const auto& [from, label] : jumps_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) fail("an unknown label " + std::string(label));
      kernel_.code[from].target = found->second;
    }
    poison_halves();
    find_joins(kernel_.code);
    return std::move(kernel_);
  }

 private:
  [[noreturn]] void fail(const std::string& message) const {
    throw std::runtime_error("PTX, " + Places(listing_).of(at_) + ": " + message);
  }

  // .entry NAME( .param .align 8 .b8 NAME_param_0[bytes] ) .maxntid x, y, z {
  void parse_head() {
    const size_t open = text_.find('(', at_), close = text_.find(')', open), body = text_.find('{', close);
    kernel_.name = trim(text_.substr(at_, open - at_));
    const std::string_view parameter = text_.substr(open + 1, close - open - 1);
    const size_t bracket = parameter.find('[');
    if (bracket == parameter.npos || parameter.find(',') != parameter.npos) fail("parameters are not one struct");
    const size_t name = parameter.find_last_of(kBlank, bracket) + 1;
    parameter_ = parameter.substr(name, bracket - name);
    kernel_.parameter_bytes = integer(parameter.substr(bracket + 1, parameter.find(']') - bracket - 1));
    const std::string_view head = text_.substr(close, body - close);
    const size_t most = head.find(".maxntid ");
    if (most == head.npos) fail("no bound of threads");
    kernel_.most_threads = integer(split(head.substr(most + 9)).front());
    // .extern .shared .align 128 .b8 NAME[];
    if (const size_t shared = text_.find(".extern .shared"); shared != text_.npos) {
      const size_t end = text_.find("[]", shared), begin = text_.find_last_of(kBlank, end) + 1;
      shared_ = text_.substr(begin, end - begin);
    }
    at_ = body + 1;
    scopes_.emplace_back();
  }

  // Returns whether there are more.
  bool parse_statement() {
    at_ = text_.find_first_not_of(kBlank, at_);
    if (at_ == text_.npos) fail("a kernel does not end");
    const std::string_view rest = text_.substr(at_);
    if (rest.starts_with("//") || rest.starts_with(".loc")) {
      at_ = text_.find('\n', at_);
    } else if (rest.front() == '{') {
      scopes_.emplace_back();
      ++at_;
    } else if (rest.front() == '}') {
      scopes_.pop_back();
      ++at_;
    } else {
      const size_t end = rest.find_first_of(";:");
      const std::string_view statement = trim(rest.substr(0, end));
      if (rest[end] == ':') labels_[statement] = static_cast<int>(kernel_.code.size());
      else if (statement.starts_with(".reg")) declare(statement);
      else if (statement.starts_with(".pragma")) heed(statement);
      else if (statement.starts_with(".")) fail("an unknown directive");
      else parse_instruction(statement);
      at_ += end + 1;
    }
    return !scopes_.empty();
  }

  // .reg .b32 %r<100> or .reg .b16 low, high
  void declare(std::string_view statement) {
    take_word(statement);
    const std::string_view type = take_word(statement);
    const int width = type == ".pred" ? 0 : static_cast<int>(integer(type.substr(2)));
    if (const size_t count = statement.find('<'); count != statement.npos) {
      widths_[statement.substr(0, count)] = width;
      return;
    }
    if (width == 0) fail("a predicate with a name");
    for (const std::string_view name : split(statement)) scopes_.back()[name] = new_register(width);
  }

  // Of a vector that is loaded, some bytes may not matter.
  void heed(std::string_view pragma) {
    constexpr std::string_view kMask = "used_bytes_mask ";
    if (const size_t at = pragma.find(kMask); at != pragma.npos) {
      const std::string_view mask = pragma.substr(at + kMask.size());
      used_ = static_cast<uint32_t>(integer(mask.substr(0, mask.find('"'))));
    }
  }

  void parse_instruction(std::string_view text) {
    Instruction i;
    i.at = at_;
    if (text.front() == '@') {
      std::string_view guard = take_word(text).substr(1);
      i.is_guard_negated = guard.front() == '!';
      i.guard = predicate(guard.substr(i.is_guard_negated));
    }
    const std::string_view name = take_word(text);
    const std::vector<std::string_view> operands = split(text);
    if (name == "bra" || name == "bra.uni") {
      i.control = Control::kBranch;
      i.is_aligned = name == "bra.uni";
      jumps_.emplace_back(kernel_.code.size(), operands.at(0));
    } else if (name == "ret") {
      i.control = Control::kReturn;
    } else if (name == "bar.sync" && text == "0") {
      i.control = Control::kBlockBarrier;
    } else if (name == "bar.warp.sync" && integer(text) == -1) {
      i.control = Control::kWarpBarrier;
    } else if (name.starts_with("ld.") || name.starts_with("st.")) {
      parse_access(i, name, operands);
    } else {
      parse_operation(i, std::string(name), operands);
    }
    kernel_.code.push_back(i);
  }

  void parse_access(Instruction& i, std::string_view name, const std::vector<std::string_view>& operands) {
    const bool is_load = name.starts_with("ld.");
    int count = 1;
    std::string_view type;
    for (std::string_view rest = name.substr(3); !rest.empty();) {
      const size_t end = std::min(rest.find('.'), rest.size());
      const std::string_view word = rest.substr(0, end);
      rest = rest.substr(std::min(end + 1, rest.size()));
      if (word == "global") i.space = Space::kGlobal;
      else if (word == "shared") i.space = Space::kShared;
      else if (word == "param" && is_load) i.space = Space::kParameter;
      else if (word == "v2" || word == "v4") count = word[1] - '0';
      else if (word == "volatile") i.is_volatile = true;
      else if (word == "nc") continue;
      else if (rest.empty()) type = word;
      else fail("an unknown instruction " + std::string(name));
    }
    i.is_signed = type.starts_with("s");
    if (type.size() > 1) i.bytes = static_cast<int>(integer(type.substr(1)) / 8);
    if (i.space == Space::kNone || i.bytes == 0) fail("an unknown instruction " + std::string(name));
    i.operation = is_load ? load : store;
    i.offset = add_address(i, operands.at(is_load ? 1 : 0));
    i.used = std::exchange(used_, ~0u);
    for (const std::string_view item : members(operands.at(is_load ? 0 : 1)))
      is_load ? add_result(i, item) : add_source(i, item);
    if ((is_load ? i.to.size : i.from.size - 1) != count) fail("a vector of another size");
  }

  // [base+offset]: adds the base to the operands, and returns the offset.
  int64_t add_address(Instruction& i, std::string_view text) {
    text = trim(text.substr(1, text.size() - 2));
    const size_t plus = std::min(text.find('+'), text.size());
    i.from.add(value(trim(text.substr(0, plus))));
    return plus == text.size() ? 0 : integer(text.substr(plus + 1));
  }

  void parse_operation(Instruction& i, std::string name, const std::vector<std::string_view>& operands) {
    // The only ones of which there are several by what their operands are.
    if (name.starts_with("mov.b") && operands.at(0).front() == '{') name += ".unpack";
    else if (name.starts_with("mov.b") && operands.at(1).front() == '{') name += ".pack";
    const auto found = operations().find(name);
    if (found == operations().end()) fail("an unknown instruction " + name);
    i.operation = found->second;
    i.is_aligned = name.find(".aligned") != name.npos;
    if (name.starts_with("cp.async") || name.starts_with("prefetch")) {  // have no result
      for (const std::string_view operand : operands) {
        if (operand.front() != '[') i.from.add(value(operand));
        else if (add_address(i, operand) != 0) fail("a copy or a prefetch with an offset");
      }
      return;
    }
    for (size_t k = 0; k < operands.size(); ++k)
      for (const std::string_view item : members(operands[k])) k == 0 ? add_result(i, item) : add_source(i, item);
  }

  // Of a pair whose upper half nobody looks at, nvcc makes a register that nothing sets. Such a half is poison here,
  // which makes wrong numbers and addresses of what it gets into.
  void poison_halves() {
    constexpr uint64_t kPoison = 0xBAD0BAD1;
    std::vector<bool> is_set(kernel_.widths.size());
    for (const Instruction& i : kernel_.code)
      for (const int number : i.to) is_set[number] = true;
    for (const auto& [number, _] : kernel_.constants) is_set[number] = true;
    for (const auto& [_, number] : kernel_.specials) is_set[number] = true;
    for (Instruction& i : kernel_.code) {
      if (i.operation != operations().at("mov.b64.pack") || is_set[i.from[1]]) continue;
      i.from.items[1] = constant(kPoison);
      is_set.resize(kernel_.widths.size(), true);
    }
  }

  // A register, a predicate, or both: %r|%p.
  void add_result(Instruction& i, std::string_view item) {
    if (const size_t bar = item.find('|'); bar != item.npos) {
      i.to_predicate = predicate(item.substr(bar + 1));
      item = item.substr(0, bar);
    }
    if (is_predicate(item)) i.to_predicate = predicate(item);
    else i.to.add(value(item));
  }

  void add_source(Instruction& i, std::string_view item) {
    if (is_predicate(item)) i.from_predicates.add(predicate(item));
    else i.from.add(value(item));
  }

  int new_register(int width) {
    kernel_.widths.push_back(width);
    return static_cast<int>(kernel_.widths.size()) - 1;
  }

  int predicate(std::string_view name) {
    return predicates_.try_emplace(name, kernel_.predicates).second ? kernel_.predicates++ : predicates_[name];
  }

  // The register of an operand; constants and addresses have one, too.
  int value(std::string_view name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const auto found = scope->find(name); found != scope->end()) return found->second;
    if (name.starts_with("%")) {
      if (name.find('.') != name.npos) {
        const auto [found, is_new] = kernel_.specials.try_emplace(std::string(name), -1);
        return is_new ? found->second = new_register(32) : found->second;
      }
      const auto width = widths_.find(name.substr(0, name.find_first_of("0123456789")));
      if (width == widths_.end() || width->second == 0) fail("an unknown register " + std::string(name));
      return scopes_.front()[name] = new_register(width->second);
    }
    if (name == parameter_) return constant(kParameterBase);
    if (name == shared_) return constant(kSharedBase);
    if (name.starts_with("0f") || name.starts_with("0d"))
      return constant(std::strtoull(std::string(name.substr(2)).c_str(), nullptr, 16));
    if (name.front() == '-') return constant(static_cast<uint64_t>(integer(name)));
    if (std::isdigit(static_cast<unsigned char>(name.front())))
      return constant(std::strtoull(std::string(name).c_str(), nullptr, 0));
    fail("an unknown operand " + std::string(name));
  }

  int constant(uint64_t bits) {
    const auto [found, is_new] = constants_.try_emplace(bits, -1);
    if (is_new) {
      found->second = new_register(64);
      kernel_.constants.emplace_back(found->second, bits);
    }
    return found->second;
  }

  const Listing& listing_;
  std::string_view text_, parameter_, shared_;
  size_t at_;
  Kernel kernel_;
  uint32_t used_ = ~0u;
  std::vector<std::unordered_map<std::string_view, int>> scopes_;  // of registers
  std::unordered_map<std::string_view, int> widths_, predicates_, labels_;
  std::unordered_map<uint64_t, int> constants_;
  std::vector<std::pair<size_t, std::string_view>> jumps_;
};

}  // namespace

std::map<std::string, size_t> find_kernels(const std::string& text) {
  constexpr std::string_view kEntry = ".entry ";
  std::map<std::string, size_t> kernels;
  for (size_t at = text.find(kEntry); at != text.npos; at = text.find(kEntry, at)) {
    at += kEntry.size();
    kernels[std::string(trim(std::string_view(text).substr(at, text.find('(', at) - at)))] = at;
  }
  return kernels;
}

Kernel parse(const Listing& listing, size_t entry) { return Parser(listing, entry).parse(); }

}  // namespace ptx
