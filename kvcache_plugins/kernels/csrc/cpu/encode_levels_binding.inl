// The CPU implementation of kvcache_plugins::encode_levels (schema: kvcache_plugins/kernels/ops.py).
#include <torch/library.h>

#include <memory>

#include "encode_levels.h"
#include "encode_run.h"

namespace kvcache {
namespace {

LevelKernels choose_level_kernels() {
  const std::string name = instruction_set();
#if defined(__x86_64__)
  if (name == "avx512") return level_kernels_avx512();
  if (name == "avx2") return level_kernels_avx2();
#endif
  return level_kernels_portable();
}

void check_floats(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.is_contiguous() &&
                        tensor.sizes() == sizes,
                    "Invalid ", name, ": expected contiguous float32 ", sizes, " on the CPU, got ", tensor.toString(),
                    " ", tensor.sizes(), ".");
}

// What keys are encoded by, for every channel of every head, with padded channels: see LevelBlock.
struct KeyTables {
  std::vector<float> scale, offset, meanings;  // [rows][...]
  int64_t rows = 0, channels = 0, codes = 0;

  KeyTables() = default;
  KeyTables(const at::Tensor& scales, const at::Tensor& offsets, const at::Tensor& levels, const Layout& layout)
      : rows(scales.size(0)), channels(scales.size(1) * layout.padded_dim()), codes(levels.size(0)) {
    scale.assign(size_t(rows * channels), 1.0f);
    offset.assign(size_t(rows * channels), 0.0f);
    meanings.assign(size_t(rows * codes * channels), 0.0f);
    const int64_t dim = layout.head_dim, padded = layout.padded_dim(), heads = scales.size(1);
    const float *from_scale = scales.const_data_ptr<float>(), *from_offset = offsets.const_data_ptr<float>();
    const float* level = levels.const_data_ptr<float>();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < heads * dim; ++i) {
        const int64_t channel = i / dim * padded + i % dim;
        const float width = from_scale[row * heads * dim + i], middle = from_offset[row * heads * dim + i];
        scale[size_t(row * channels + channel)] = width;
        offset[size_t(row * channels + channel)] = middle;
        for (int64_t code = 0; code < codes; ++code)
          meanings[size_t((row * codes + code) * channels + channel)] =
              multiply_add_separately(level[code], width, middle);
      }
    }
  }
};

// One call, checked.
struct LevelRun {
  Run run;
  LevelKernels kernels;
  KeyTables tables;
  LevelBlock shared;  // what all blocks have in common
  at::Tensor entries, starts;
  const float *cos = nullptr, *sin = nullptr;  // [rows of the tables][tokens][pairs]
  int64_t table_rows = 0, pairs = 0;
  const int64_t* first_plain = nullptr;  // [rows], slots

  void encode(int64_t row, int64_t block, float* numbers, uint32_t* scratch) const {
    const Layout& layout = run.layout;
    const int64_t dim = layout.head_dim, padded = layout.padded_dim(), heads = shared.heads;
    const int64_t first = block * kBlockTokens, slot = run.start + first, index = slot / kBlockTokens;
    for (int64_t head = 0; head < heads; ++head) {
      float* of_head = numbers + head * shared.head_stride;
      run.kernels.load(run.tokens.rows(row, head, first), kBlockTokens, dim, of_head);
      if (cos != nullptr) {
        const int64_t at = row % table_rows * run.count * pairs;
        const Rotation rotation{cos + at, sin + at, run.count, pairs};
        run.preparation.rotate_back(of_head, first, kBlockTokens, layout, rotation);
      }
      for (int64_t t = kBlockTokens - 1; dim < padded && t >= 0; --t) {  // from the last: they move apart
        std::memmove(of_head + t * padded, of_head + t * dim, sizeof(float) * dim);
        std::memset(of_head + t * padded + dim, 0, sizeof(float) * (padded - dim));
      }
    }
    LevelBlock made = shared;
    made.numbers = numbers;
    made.scratch = scratch;
    const at::Tensor& records = run.records;
    made.record = records.mutable_data_ptr<uint8_t>() + row * records.stride(0) + index * records.size(3);
    made.head_bytes = records.stride(1);
    if (first_plain != nullptr)
      made.first_plain = std::clamp<int64_t>(first_plain[row] - slot, 0, kBlockTokens);
    if (entries.defined()) {
      made.entries = reinterpret_cast<uint32_t*>(entries.mutable_data_ptr<int32_t>()) +
                     (row * entries.size(1) + index) * entries.size(2);
      made.starts = starts.mutable_data_ptr<int16_t>() + (row * starts.size(1) + index) * starts.size(2);
    }
    if (run.is_key) {
      const int64_t of_row = row % tables.rows * tables.channels;
      made.scale = tables.scale.data() + of_row;
      made.offset = tables.offset.data() + of_row;
      made.meanings = tables.meanings.data() + of_row * tables.codes;
    }
    (run.is_key ? kernels.encode_keys : kernels.encode_values)(made, layout);
  }
};

void check_lists(const LevelRun& made, const OptionalTensor& entries, const OptionalTensor& starts, int64_t batch) {
  TORCH_CHECK_VALUE(entries.has_value() == starts.has_value() && entries.has_value() == (made.shared.side > 0),
                    "Invalid outliers: entries and starts come together, where side is not 0.");
  if (!entries.has_value()) return;
  const int64_t blocks = (made.run.start + made.run.count) / kBlockTokens, heads = made.shared.heads;
  TORCH_CHECK_VALUE(entries->scalar_type() == at::kInt && entries->is_contiguous() && entries->device().is_cpu() &&
                        entries->dim() == 3 && entries->size(0) == batch && entries->size(1) >= blocks &&
                        entries->size(2) >= 2 * made.shared.side * kBlockTokens && entries->size(2) <= 32767,
                    "Invalid entries: expected contiguous int32 (", batch, ", at least ", blocks, ", at least ",
                    2 * made.shared.side * kBlockTokens, ") on the CPU, got ", entries->toString(), " ",
                    entries->sizes(), ".");
  TORCH_CHECK_VALUE(starts->scalar_type() == at::kShort && starts->is_contiguous() && starts->device().is_cpu() &&
                        starts->sizes() == at::IntArrayRef({batch, entries->size(1), heads + 1}),
                    "Invalid starts: expected contiguous int16 (", batch, ", ", entries->size(1), ", ", heads + 1,
                    ") on the CPU, got ", starts->toString(), " ", starts->sizes(), ".");
}

bool encode_levels(at::Tensor records, const OptionalTensor& entries, const OptionalTensor& starts,
                   const at::Tensor& states, bool is_key, at::IntArrayRef layout, const at::Tensor& boundaries,
                   const at::Tensor& levels, int64_t side, int64_t start, const OptionalTensor& scale,
                   const OptionalTensor& offset, const OptionalTensor& first_plain, const OptionalTensor& cos,
                   const OptionalTensor& sin) {
  TORCH_CHECK_VALUE(states.dim() == 4 && states.stride(3) == 1,
                    "Invalid states: expected (B, H, n, D) with contiguous channels, got ", states.sizes(), ".");
  const int64_t batch = states.size(0), heads = states.size(1), count = states.size(2), dim = states.size(3);
  LevelRun made{describe_run(records, Exact(states), {}, layout, is_key, batch, heads, dim, start, count)};
  const Layout& fields = made.run.layout;
  TORCH_CHECK_VALUE(start % kBlockTokens == 0 && count % kBlockTokens == 0 && fields.group_tokens == 1 &&
                        fields.width == 1 && fields.nbits >= 2 && fields.nbits <= 4 && side >= 0 && side <= kMaxSide,
                    "Invalid layout: expected whole blocks of 2 to 4 bits, scales of single tokens, and a side of up "
                    "to ", kMaxSide, "; got ", count, " tokens from slot ", start, ", a side of ", side, ", and ",
                    layout, ".");
  TORCH_CHECK_VALUE(is_key || (fields.scale_offset >= 0 && fields.minimum_offset >= 0),
                    "Invalid layout: values need a place for scales and one for offsets, got ", layout, ".");
  const int64_t codes = int64_t(1) << fields.nbits;
  check_floats("boundaries", boundaries, {codes - 1});
  check_floats("levels", levels, {codes});
  TORCH_CHECK_VALUE(scale.has_value() == is_key && offset.has_value() == is_key && cos.has_value() == sin.has_value(),
                    "Invalid ranges: keys have a scale and an offset, values none; cos and sin come together.");
  if (is_key) {
    const int64_t rows = scale->dim() == 4 && scale->size(0) == 1 ? 1 : batch;
    for (const at::Tensor& range : {*scale, *offset}) check_floats("range", range, {rows, heads, 1, dim});
  }
  if (first_plain.has_value()) {
    TORCH_CHECK_VALUE(first_plain->scalar_type() == at::kLong && first_plain->is_contiguous() &&
                          first_plain->device().is_cpu() && first_plain->sizes() == at::IntArrayRef({batch}),
                      "Invalid first_plain: expected contiguous int64 (", batch, ") on the CPU, got ",
                      first_plain->toString(), " ", first_plain->sizes(), ".");
    made.first_plain = first_plain->const_data_ptr<int64_t>();
  }
  if (cos.has_value()) {
    TORCH_CHECK_VALUE(cos->dim() == 3 && 2 * cos->size(2) <= dim,
                      "Invalid rotation: expected (1 or B, n, up to ", dim / 2, "), got ", cos->sizes(), ".");
    made.table_rows = cos->size(0) == 1 ? 1 : batch;
    made.pairs = cos->size(2);
    for (const at::Tensor& table : {*cos, *sin}) check_floats("rotation", table, {made.table_rows, count, made.pairs});
    made.cos = cos->const_data_ptr<float>();
    made.sin = sin->const_data_ptr<float>();
    made.run.preparation.rotate_back = find_rotate_back();
    if (made.run.preparation.rotate_back == nullptr) return false;
  }
  made.shared = {};
  made.shared.heads = heads;
  // A token is read in all heads at once: at a distance of whole pages these would meet in few places of a cache.
  made.shared.head_stride = kBlockTokens * fields.padded_dim() + 16;
  made.shared.side = side;
  made.shared.boundaries = boundaries.const_data_ptr<float>();
  made.shared.levels = levels.const_data_ptr<float>();
  check_lists(made, entries, starts, batch);
  if (entries.has_value()) {
    made.entries = *entries;
    made.starts = *starts;
    made.shared.width = entries->size(2);
  }
  if (count == 0) return true;
  if (!are_below_half(made.run)) return false;
  if (is_key) made.tables = KeyTables(*scale, *offset, levels, fields);
  made.kernels = choose_level_kernels();
  const int64_t blocks = count / kBlockTokens, places = 2 * heads * kBlockTokens * fields.padded_dim();
  const auto encode = [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> of_block(new float[size_t(heads * made.shared.head_stride)]);
    const std::unique_ptr<uint32_t[]> scratch(new uint32_t[size_t(places)]);
    for (int64_t task = begin; task < end; ++task)
      made.encode(task / blocks, task % blocks, of_block.get(), scratch.get());
  };
  at::parallel_for(0, batch * blocks, 1, encode);
  return true;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) { library.impl("encode_levels", TORCH_FN(kvcache::encode_levels)); }
