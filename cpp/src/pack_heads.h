// Decoding with grouped heads: query heads that share a key head are computed as rows of one tile.
#pragma once

#include "common/params.h"

namespace flashsdk {

// With one query a sequence, heads of a group differ only in where q, out and lse lie: by their strides they are as
// well the rows of num_heads_kv heads. Kernels, which know nothing of it, then load K and V once a group, and a tile of
// theirs is filled by the group instead of by one row each. A problem without groups, or whose heads differ in more
// than that, comes back as it is.
ForwardParams pack_query_heads(ForwardParams p);
BackwardParams pack_query_heads(BackwardParams p);

}  // namespace flashsdk
