// Rows of outputs that belong to no sequence.
#pragma once

#include "common/params.h"

namespace flashsdk {

// Rows behind the last packed sequence, and behind the used ones of each, are written as those of queries that see no
// key and of keys that no query sees: zeros, and -inf in lse. CPU tensors; nothing to do where all rows are used.
void write_unused_rows(const ForwardParams& p);
void write_unused_rows(const BackwardParams& p);

}  // namespace flashsdk
