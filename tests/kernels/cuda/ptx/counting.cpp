#include "counting.h"

#include <algorithm>

#include "machine.h"

namespace ptx {
namespace {

constexpr int kBanks = 32, kWord = 4, kSector = 32;

// Multiples of `unit` that accesses of up to 16 bytes begin in or cover, each once.
class Units {
 public:
  Units(const uint64_t* addresses, int64_t offset, int size, uint32_t lanes, int unit) {
    for_lanes(lanes, [&](int lane) {
      const uint64_t first = addresses[lane] + offset;
      for (uint64_t at = first / unit; at <= (first + size - 1) / unit; ++at) items_[size_++] = at;
    });
    std::sort(items_, items_ + size_);
    size_ = static_cast<int>(std::unique(items_, items_ + size_) - items_);
  }
  const uint64_t* begin() const { return items_; }
  const uint64_t* end() const { return items_ + size_; }
  int size() const { return size_; }

 private:
  uint64_t items_[kLanes * 16 / kWord];
  int size_ = 0;
};

int most_in_a_bank(const Units& words) {
  int counts[kBanks] = {};
  for (const uint64_t word : words) ++counts[word % kBanks];
  return *std::max_element(counts, counts + kBanks);
}

bool are_neighbours_same(const uint64_t* addresses, uint32_t lanes, int distance) {
  bool are_same = true;
  for_lanes(lanes, [&](int lane) {
    const int other = lane ^ distance;
    are_same &= (lanes >> other & 1) == 0 || addresses[lane] == addresses[other];
  });
  return are_same;
}

}  // namespace

void count_shared(Count& count, const uint64_t* addresses, int64_t offset, int size, uint32_t lanes, bool is_load) {
  int part = kBanks * kWord / std::max(size, kWord);  // lanes
  if (is_load && part < kLanes &&
      (are_neighbours_same(addresses, lanes, 1) || are_neighbours_same(addresses, lanes, 2)))
    part *= 2;
  for (int first = 0; first < kLanes; first += part) {
    const uint32_t served = lanes & kAllLanes >> (kLanes - part) << first;
    if (served == 0) continue;
    ++count.least;
    count.wavefronts += most_in_a_bank(Units(addresses, offset, size, served, kWord));
  }
}

void count_global(Count& count, const uint64_t* addresses, int64_t offset, int size, uint32_t lanes) {
  count.sectors += Units(addresses, offset, size, lanes, kSector).size();
  count.bytes += Units(addresses, offset, size, lanes, size).size() * size;  // aligned to their size
}

}  // namespace ptx
