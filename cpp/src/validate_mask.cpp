#include "validate_mask.h"

#include <algorithm>
#include <vector>

#include "validate.h"

namespace flashsdk {
namespace {

std::int64_t limit_of(std::optional<std::int64_t> limit) {
  return std::clamp(limit.value_or(BandParam::kUnlimited), -BandParam::kUnlimited, BandParam::kUnlimited);
}

BandParam band_param(const Band& band) {
  return {limit_of(band.left), limit_of(band.right), band.alignment == Alignment::kTopLeft};
}

// Whether every query of a batched problem sees every key.
bool sees_all(const BandParam& band, const ForwardParams& p) {
  if (band.left == BandParam::kUnlimited && band.right == BandParam::kUnlimited) return true;
  if (p.packed()) return false;
  const std::int64_t shift = band.top_left ? 0 : std::int64_t{p.seqlen_k} - p.seqlen_q;
  return p.seqlen_q - 1 + shift - band.left <= 0 && shift + band.right >= p.seqlen_k - 1;
}

// One kind of block, in rows or columns, as messages name it.
struct ListName {
  const char *offsets, *indices;
};
constexpr ListName kRowPartial{"mask.row_partial.offsets", "mask.row_partial.indices"};
constexpr ListName kRowFull{"mask.row_full.offsets", "mask.row_full.indices"};
constexpr ListName kColPartial{"mask.col_partial.offsets", "mask.col_partial.indices"};
constexpr ListName kColFull{"mask.col_full.offsets", "mask.col_full.indices"};

BlockListParam check_lists(const ListName& name, const BlockLists& lists, int lines, const ForwardParams& p,
                           MemoryMap& memory) {
  check_given(name.offsets, lists.offsets);
  check_given(name.indices, lists.indices);
  for (auto [argument, view] : {std::pair{name.offsets, &lists.offsets}, std::pair{name.indices, &lists.indices}}) {
    check_dtype(argument, *view, DType::kInt32, "");
    check_device(argument, *view, p.device, ", where q is");
  }
  check_shape(name.offsets, lists.offsets,
              {{"batch", p.batch, true}, {"num_heads", p.num_heads, true}, {"blocks + 1", lines + 1}});
  check_shape(name.indices, lists.indices, {{"blocks"}});
  check_extent(name.indices, "blocks", lists.indices.shape[0], 0, INT32_MAX);
  check_row_major(name.offsets, lists.offsets);
  check_row_major(name.indices, lists.indices);
  memory.add(name.offsets, lists.offsets, MemoryMap::Access::kRead);
  memory.add(name.indices, lists.indices, MemoryMap::Access::kRead);
  return {static_cast<const std::int32_t*>(lists.offsets.data), static_cast<const std::int32_t*>(lists.indices.data),
          stride_of(lists.offsets, 0), stride_of(lists.offsets, 1)};
}

struct Line {
  const std::int32_t *begin, *end;
};

Line line_of(const ListName& name, const BlockListParam& param, const BlockLists& lists, int batch, int head,
             int line) {
  const std::int32_t* offset = param.offsets + batch * param.batch + head * param.head + line;
  if (offset[0] < 0 || offset[0] > offset[1] || offset[1] > lists.indices.shape[0])
    fail(name.offsets,
         std::to_string(offset[0]) + ", " + std::to_string(offset[1]) + " around line " + std::to_string(line),
         "ascending from 0 to the " + std::to_string(lists.indices.shape[0]) + " indices");
  return {param.indices + offset[0], param.indices + offset[1]};
}

void check_line(const char* name, Line line, int blocks) {
  std::int64_t last = -1;
  for (const std::int32_t* i = line.begin; i != line.end; ++i) {
    if (*i < 0 || *i >= blocks) fail(name, std::to_string(*i), "0 to " + std::to_string(blocks - 1));
    if (*i <= last)
      fail(name, std::to_string(last) + " before " + std::to_string(*i), "ascending in each line, each block once");
    last = *i;
  }
}

// Both lines are ascending.
void check_disjoint(const char* name, Line partial, Line full, const char* full_name) {
  while (partial.begin != partial.end && full.begin != full.end) {
    if (*partial.begin == *full.begin)
      fail(name, "block " + std::to_string(*full.begin) + " is in " + full_name + " too", "each block once");
    *partial.begin < *full.begin ? ++partial.begin : ++full.begin;
  }
}

// Reads every offset and index once.
void check_contents(const ListName& partial_name, const BlockLists& partial, const BlockListParam& partial_param,
                    const ListName& full_name, const BlockLists& full, const BlockListParam& full_param, int lines,
                    int blocks) {
  const auto batches = static_cast<int>(std::max(partial.offsets.shape[0], full.offsets.shape[0]));
  const auto heads = static_cast<int>(std::max(partial.offsets.shape[1], full.offsets.shape[1]));
  for (int b = 0; b < batches; ++b)
    for (int h = 0; h < heads; ++h)
      for (int n = 0; n < lines; ++n) {
        const Line p = line_of(partial_name, partial_param, partial, b, h, n);
        const Line f = line_of(full_name, full_param, full, b, h, n);
        check_line(partial_name.indices, p, blocks);
        check_line(full_name.indices, f, blocks);
        check_disjoint(partial_name.indices, p, f, full_name.indices);
      }
}

// Whether the lines of `columns`, read from their beginnings, are those of `rows` transposed. Both have been checked.
void check_transposed(const ListName& row_name, const BlockLists& rows, const BlockListParam& row_param,
                      const ListName& col_name, const BlockLists& columns, const BlockListParam& col_param,
                      int num_rows, int num_cols) {
  const auto batches = static_cast<int>(std::max(rows.offsets.shape[0], columns.offsets.shape[0]));
  const auto heads = static_cast<int>(std::max(rows.offsets.shape[1], columns.offsets.shape[1]));
  std::vector<Line> rest(static_cast<std::size_t>(num_cols));
  for (int b = 0; b < batches; ++b)
    for (int h = 0; h < heads; ++h) {
      for (int c = 0; c < num_cols; ++c)
        rest[static_cast<std::size_t>(c)] = line_of(col_name, col_param, columns, b, h, c);
      for (int r = 0; r < num_rows; ++r) {
        const Line row = line_of(row_name, row_param, rows, b, h, r);
        for (const std::int32_t* c = row.begin; c != row.end; ++c) {
          Line& column = rest[static_cast<std::size_t>(*c)];
          if (column.begin == column.end || *column.begin != r)
            fail(col_name.indices, "no block " + std::to_string(r) + " in column " + std::to_string(*c),
                 std::string("the transpose of ") + row_name.indices);
          ++column.begin;
        }
      }
      for (int c = 0; c < num_cols; ++c)
        if (const Line& column = rest[static_cast<std::size_t>(c)]; column.begin != column.end)
          fail(col_name.indices, "block " + std::to_string(*column.begin) + " in column " + std::to_string(c),
               std::string("the transpose of ") + row_name.indices);
    }
}

void check_length(const char* name, std::int64_t made_for, const char* what, int seqlen) {
  if (made_for != 0 && made_for != seqlen)
    fail(name, std::to_string(made_for), std::string(what) + ", which is " + std::to_string(seqlen));
}

// A layout per batch, and no batch: there are no offsets to read.
bool empty(const BlockLists& a, const BlockLists& b) { return a.offsets.shape[0] == 0 || b.offsets.shape[0] == 0; }

// A layout for other problems is told as a whole, by the first of its lists, before one of them is. That each has the
// right shape is for check_lists() to see.
void check_shared(const TensorView& offsets, const ForwardParams& p) {
  if (offsets.rank != 3) return;
  for (auto [what, extent, expected] :
       {std::tuple{"batch ", offsets.shape[0], p.batch}, std::tuple{"num_heads ", offsets.shape[1], p.num_heads}})
    if (extent != 1 && extent != expected)
      fail("mask", std::string("a layout of ") + what + std::to_string(extent),
           std::string(what) + (expected == 1 ? "1" : "1 or " + std::to_string(expected)));
}

// How many lines lists of the right shape have.
std::int64_t lines_of(const BlockLists& lists) { return lists.offsets.shape[2] - 1; }

// Whether somebody has read the lists before.
enum class Contents : std::uint8_t { kUnknown, kChecked };

void validate_layout(const BlockMask& mask, Contents contents, bool columns, ForwardParams& p, MemoryMap& memory) {
  MaskParam& m = p.mask;
  m.kind = MaskKind::kBlockSparse;
  m.block_q = check_block("mask.block_q", mask.block_q);
  m.block_k = check_block("mask.block_k", mask.block_k);
  if (mask.band) m.band = band_param(*mask.band);
  const bool packed = p.packed();
  check_length("mask.seqlen_q", mask.seqlen_q, packed ? "max_seqlen_q" : "seqlen_q", p.seqlen_q);
  check_length("mask.seqlen_k", mask.seqlen_k, packed ? "max_seqlen_k" : "seqlen_k", p.seqlen_k);
  const int rows = ceil_div(p.seqlen_q, m.block_q), cols = ceil_div(p.seqlen_k, m.block_k);
  // Lists that are right for as many blocks are right for any call.
  const bool known =
      contents == Contents::kChecked && rows == lines_of(mask.row_full) && cols == lines_of(mask.col_full);
  const bool unread = p.device.type == DeviceType::kCPU && !known;

  check_shared(mask.row_partial.offsets, p);
  m.row_partial = check_lists(kRowPartial, mask.row_partial, rows, p, memory);
  m.row_full = check_lists(kRowFull, mask.row_full, rows, p, memory);
  if (unread && !empty(mask.row_partial, mask.row_full))
    check_contents(kRowPartial, mask.row_partial, m.row_partial, kRowFull, mask.row_full, m.row_full, rows, cols);
  if (!columns) return;

  m.col_partial = check_lists(kColPartial, mask.col_partial, cols, p, memory);
  m.col_full = check_lists(kColFull, mask.col_full, cols, p, memory);
  if (unread && !empty(mask.col_partial, mask.col_full))
    check_contents(kColPartial, mask.col_partial, m.col_partial, kColFull, mask.col_full, m.col_full, cols, rows);
  for (auto [name, row, col] : {std::tuple{kColPartial.indices, &mask.row_partial, &mask.col_partial},
                                std::tuple{kColFull.indices, &mask.row_full, &mask.col_full}})
    if (row->indices.shape[0] != col->indices.shape[0])
      fail(name, shape_of(col->indices), "the " + std::to_string(row->indices.shape[0]) + " blocks of the rows");
  if (unread && !empty(mask.row_partial, mask.row_full) && !empty(mask.col_partial, mask.col_full)) {
    check_transposed(kRowPartial, mask.row_partial, m.row_partial, kColPartial, mask.col_partial, m.col_partial, rows,
                     cols);
    check_transposed(kRowFull, mask.row_full, m.row_full, kColFull, mask.col_full, m.col_full, rows, cols);
  }
}

// The length of a call that the layout is for.
int length_of(const char* name, std::int64_t made_for, const char* offsets_name, const TensorView& offsets, int block) {
  if (made_for == 0) {
    check_given(offsets_name, offsets);
    check_shape(offsets_name, offsets, {{"batch"}, {"num_heads"}, {"blocks + 1"}});
    check_extent(offsets_name, "blocks + 1", offsets.shape[2], 1, kMaxRows / block);
    made_for = (offsets.shape[2] - 1) * block;
  }
  check_extent(name, "", made_for, 0, kMaxRows);
  return static_cast<int>(made_for);
}

// Its batch or num_heads: all lists have as many layouts, or one.
int layouts_of(const BlockMask& mask, int dim, const char* what) {
  std::int64_t layouts = 1;
  for (const BlockLists* lists : {&mask.row_partial, &mask.row_full, &mask.col_partial, &mask.col_full})
    if (lists->offsets.rank == 3 && lists->offsets.shape[dim] != 1) layouts = lists->offsets.shape[dim];
  check_extent("mask", what, layouts, 0, kMaxRows);
  return static_cast<int>(layouts);
}

}  // namespace

CheckedBlockMask::CheckedBlockMask(const BlockMask& mask) : mask_(mask) {
  ForwardParams p;
  MemoryMap memory;
  for (auto [name, lists] : {std::pair{kRowPartial, &mask.row_partial}, std::pair{kRowFull, &mask.row_full},
                             std::pair{kColPartial, &mask.col_partial}, std::pair{kColFull, &mask.col_full}}) {
    check_device(name.offsets, lists->offsets, p.device, "");
    check_device(name.indices, lists->indices, p.device, "");
  }
  p.seqlen_q = length_of("mask.seqlen_q", mask.seqlen_q, kRowFull.offsets, mask.row_full.offsets,
                         check_block("mask.block_q", mask.block_q));
  p.seqlen_k = length_of("mask.seqlen_k", mask.seqlen_k, kColFull.offsets, mask.col_full.offsets,
                         check_block("mask.block_k", mask.block_k));
  p.batch = layouts_of(mask, 0, "batch");
  p.num_heads = layouts_of(mask, 1, "num_heads");
  validate_layout(mask, Contents::kUnknown, /*columns=*/true, p, memory);
}

void validate_mask(const Mask& mask, bool columns, ForwardParams& p, MemoryMap& memory) {
  if (const auto* band = std::get_if<Band>(&mask)) {
    const BandParam param = band_param(*band);
    if (sees_all(param, p)) return;  // a dense kernel is the fastest
    p.mask.kind = MaskKind::kBand;
    p.mask.band = param;
  } else if (const auto* layout = std::get_if<BlockMask>(&mask)) {
    validate_layout(*layout, Contents::kUnknown, columns, p, memory);
  } else if (const auto* checked = std::get_if<CheckedBlockMask>(&mask)) {
    validate_layout(checked->mask(), Contents::kChecked, columns, p, memory);
  }
}

}  // namespace flashsdk
