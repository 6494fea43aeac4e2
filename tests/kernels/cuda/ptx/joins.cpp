// Where the lanes that a branch has parted meet again: at its immediate post-dominator, the first instruction that all
// paths from there to the end of the kernel pass.
#include "program.h"

namespace ptx {
namespace {

// Runs of instructions without a branch between them. One more block stands for the end.
struct Graph {
  std::vector<int> first, block_of;  // first instruction of every block; block of every instruction
  std::vector<std::vector<int>> next, previous;
  int end = 0;

  explicit Graph(const std::vector<Instruction>& code) : block_of(code.size()) {
    const int count = static_cast<int>(code.size());
    std::vector<bool> begins(count + 1);
    begins[0] = true;
    for (int i = 0; i < count; ++i) {
      if (code[i].control == Control::kBranch) begins[code[i].target] = true;
      if (code[i].control == Control::kBranch || code[i].control == Control::kReturn) begins[i + 1] = true;
    }
    for (int i = 0; i < count; ++i) {
      if (begins[i]) first.push_back(i);
      block_of[i] = static_cast<int>(first.size()) - 1;
    }
    end = static_cast<int>(first.size());
    next.resize(end + 1);
    previous.resize(end + 1);
    for (int block = 0; block < end; ++block) {
      const Instruction& last = code[(block + 1 < end ? first[block + 1] : count) - 1];
      const bool is_always = last.guard < 0;
      if (last.control == Control::kBranch) connect(block, block_of[last.target]);
      if (last.control == Control::kReturn) connect(block, end);
      if (last.control == Control::kNone || last.control >= Control::kBlockBarrier || !is_always)
        connect(block, block + 1);
    }
  }

  void connect(int from, int to) {
    next[from].push_back(to);
    previous[to].push_back(from);
  }

  // Blocks from which the end is reached, each after all that it reaches first: the reverse of a depth-first postorder
  // from the end backwards.
  std::vector<int> order_from_end() const {
    std::vector<int> order;
    std::vector<bool> is_seen(end + 1);
    std::vector<std::pair<int, size_t>> stack{{end, 0}};
    is_seen[end] = true;
    while (!stack.empty()) {
      auto& [block, taken] = stack.back();
      if (taken == previous[block].size()) {
        order.push_back(block);
        stack.pop_back();
      } else if (const int before = previous[block][taken++]; !is_seen[before]) {
        is_seen[before] = true;
        stack.emplace_back(before, 0);
      }
    }
    return {order.rbegin(), order.rend()};
  }
};

// Immediate post-dominators of blocks, after Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm".
std::vector<int> post_dominators(const Graph& graph) {
  const std::vector<int> order = graph.order_from_end();
  std::vector<int> rank(graph.end + 1, -1), found(graph.end + 1, -1);
  for (size_t i = 0; i < order.size(); ++i) rank[order[i]] = static_cast<int>(i);
  found[graph.end] = graph.end;
  const auto meet = [&](int a, int b) {
    while (a != b) rank[a] > rank[b] ? a = found[a] : b = found[b];
    return a;
  };
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    for (const int block : order) {
      if (block == graph.end) continue;
      int common = -1;
      for (const int next : graph.next[block])
        if (found[next] >= 0) common = common < 0 ? next : meet(common, next);
      has_changed |= common != found[block];
      found[block] = common;
    }
  }
  return found;
}

}  // namespace

void find_joins(std::vector<Instruction>& code) {
  const Graph graph(code);
  const std::vector<int> joins = post_dominators(graph);
  for (size_t i = 0; i < code.size(); ++i) {
    if (code[i].control != Control::kBranch) continue;
    const int block = joins[graph.block_of[i]];
    code[i].join = block < 0 || block == graph.end ? -1 : graph.first[block];
  }
}

}  // namespace ptx
