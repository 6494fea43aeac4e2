#include "launching.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

namespace ptx {
namespace {

struct Entry {
  const Listing* listing;
  size_t at;
  std::unique_ptr<Kernel> kernel;  // once launched
  std::vector<Count> counts;       // of its instructions, if it was launched while they were counted
  uint64_t warps = 0;              // launched meanwhile
};

std::list<Listing> listings;
std::map<std::string, Entry> entries;
std::mutex mutex;
std::string launched;  // names, a line each
bool is_counting = false;

// Memory that launches use again, because most of it stays as it is.
struct Memory {
  std::vector<uint64_t> values;
  std::vector<uint8_t> shared;
  std::vector<SharedByte> records;
  uint32_t phase = 0;
};
Memory memory;

Entry& find_kernel(const std::string& name) {
  const auto found = entries.find(name);
  if (found == entries.end()) throw std::runtime_error("there is no PTX of " + name);
  Entry& entry = found->second;
  if (entry.kernel == nullptr) entry.kernel = std::make_unique<Kernel>(parse(*entry.listing, entry.at));
  return entry;
}

void check_launch(const Kernel& kernel, dim3 grid, dim3 threads, size_t shared_bytes) {
  const bool is_grid = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x >> 31 == 0 && grid.y < 65536 && grid.z < 65536;
  const bool is_block = threads.x > 0 && threads.x <= kernel.most_threads && threads.x % kLanes == 0;
  if (!is_grid || !is_block || threads.y != 1 || threads.z != 1 || shared_bytes > 232448)
    throw std::runtime_error("a launch that no GPU takes, of " + kernel.name);
}

// A special register for a thread of a warp's first lane; %tid.x is one more for every lane.
unsigned special(std::string_view name, const Warp& warp, dim3 grid, dim3 threads) {
  const dim3 block = warp.block->index;
  const std::pair<std::string_view, unsigned> known[] = {
      {"%tid.x", warp.thread(0)}, {"%ntid.x", threads.x}, {"%ctaid.x", block.x},  {"%ctaid.y", block.y},
      {"%ctaid.z", block.z},      {"%nctaid.x", grid.x},  {"%nctaid.y", grid.y}, {"%nctaid.z", grid.z}};
  for (const auto& [which, value] : known)
    if (which == name) return value;
  throw std::runtime_error("an unknown register " + std::string(name));
}

// As at the beginning of a block: nothing is defined but constants and special registers.
void begin(Warp& warp, dim3 grid, dim3 threads) {
  const Kernel& kernel = *warp.kernel;
  warp.defined.assign(kernel.widths.size(), 0);
  warp.predicates.assign(kernel.predicates, 0);
  warp.defined_predicates.assign(kernel.predicates, 0);
  for (const auto& [number, bits] : kernel.constants) {
    warp.defined[number] = kAllLanes;
    std::fill_n(warp[number], kLanes, bits);
  }
  for (const auto& [name, number] : kernel.specials) {
    warp.defined[number] = kAllLanes;
    const unsigned value = special(name, warp, grid, threads);
    for (int lane = 0; lane < kLanes; ++lane) warp[number][lane] = value + (name == "%tid.x" ? lane : 0);
  }
  warp.paths.assign(1, {0, kAllLanes, -1});
  warp.state = Warp::State::kReady;
  for (auto& groups : warp.copies) groups.clear();
}

void check_copies(const Warp& warp) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto has_copies = [](const std::vector<Copy>& group) { return !group.empty(); };
    if (has_copies(warp.open[lane]) || std::ranges::any_of(warp.copies[lane], has_copies))
      fail(warp, warp.kernel->code.back(), "ends with copies that it has not waited for");
  }
}

// All warps to a barrier, then to the next, in turning order.
void run_block(std::vector<Warp>& warps, Block& block) {
  size_t done = 0;
  for (bool is_turned = false; done == 0; is_turned = !is_turned) {
    for (size_t i = 0; i < warps.size(); ++i) run(warps[is_turned ? warps.size() - 1 - i : i]);
    for (Warp& warp : warps) done += warp.state == Warp::State::kDone;
    for (Warp& warp : warps) {
      if (done != 0 && warp.state != Warp::State::kDone)
        fail(warp, warp.kernel->code[warp.paths.back().at - 1], "waits at a barrier for warps that have ended");
      warp.state = Warp::State::kReady;
    }
    memory.phase = ++block.phase;
  }
  for (const Warp& warp : warps) check_copies(warp);
}

}  // namespace

void read_listing(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("no file " + path);
  const std::lock_guard lock(mutex);
  const std::string name = path.substr(path.rfind('/') + 1);
  listings.push_back({name, {std::istreambuf_iterator<char>(file), {}}});
  for (const auto& [kernel, at] : find_kernels(listings.back().text)) entries[kernel] = {&listings.back(), at};
}

void launch(const std::string& name, dim3 grid, dim3 threads, size_t shared_bytes, const void* parameters,
            bool is_early) {
  const std::lock_guard lock(mutex);
  Entry& entry = find_kernel(name);
  const Kernel& kernel = *entry.kernel;
  launched += kernel.name + "\n";
  check_launch(kernel, grid, threads, shared_bytes);
  Block block;
  const size_t count = threads.x / kLanes, numbers = kernel.widths.size() * kLanes;
  memory.values.resize(std::max(memory.values.size(), numbers * count));
  memory.records.resize(std::max(memory.records.size(), shared_bytes));
  block.parameters = static_cast<const uint8_t*>(parameters);
  block.shared_bytes = shared_bytes;
  block.records = memory.records.data();
  if (is_counting) {
    entry.counts.resize(kernel.code.size());
    entry.warps += count * grid.x * grid.y * grid.z;
  }
  std::vector<Warp> warps(count);
  for (size_t i = 0; i < count; ++i) {
    warps[i].block = &block;
    warps[i].kernel = &kernel;
    warps[i].index = static_cast<int>(i);
    warps[i].values = memory.values.data() + i * numbers;
    if (is_counting) warps[i].counts = entry.counts.data();
  }
  for (block.index.z = 0; block.index.z < grid.z; ++block.index.z)
    for (block.index.y = 0; block.index.y < grid.y; ++block.index.y)
      for (block.index.x = 0; block.index.x < grid.x; ++block.index.x) {
        memory.shared.assign(shared_bytes, kGarbage);
        block.shared = memory.shared.data();
        block.first_phase = block.phase = ++memory.phase;
        for (Warp& warp : warps) begin(warp, grid, threads);
        for (Warp& warp : warps) warp.is_alone = !is_early;
        run_block(warps, block);
        for (const Warp& warp : warps)
          if (!warp.is_alone) fail(warp, kernel.code.back(), "ends, and may do so before the kernel before this one");
      }
}

void count_accesses(bool are_counted) {
  const std::lock_guard lock(mutex);
  is_counting = are_counted;
  if (!are_counted) return;
  for (auto& [name, entry] : entries) {
    entry.counts.clear();
    entry.warps = 0;
  }
}

std::string counts() {
  const std::lock_guard lock(mutex);
  std::ostringstream lines;
  for (const auto& [name, entry] : entries) {
    if (entry.counts.empty()) continue;
    const Places places(*entry.listing);
    lines << demangled(name) << '\t' << entry.warps << '\n';
    for (size_t i = 0; i < entry.counts.size(); ++i) {
      const Count& count = entry.counts[i];
      if (count.times == 0) continue;
      lines << places.of(entry.kernel->code[i].at);
      for (const uint64_t number : {count.times, count.wavefronts, count.least, count.sectors, count.bytes})
        lines << '\t' << number;
      lines << '\n';
    }
  }
  return lines.str();
}

std::string names_of_launches() {
  const std::lock_guard lock(mutex);
  return std::exchange(launched, {});
}

std::string names_of_kernels(bool is_launched) {
  const std::lock_guard lock(mutex);
  std::string names;
  for (const auto& [name, entry] : entries)
    if ((entry.kernel != nullptr) == is_launched) names += name + "\n";
  return names;
}

}  // namespace ptx
