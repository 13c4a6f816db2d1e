// Rows of packed outputs that belong to no sequence.
#pragma once

#include "common/params.h"

namespace flashsdk {

// Rows from the end of the last sequence on are written as those of queries that see no key: zeros, and -inf in lse.
// CPU tensors; nothing to do for a batched problem.
void write_packed_tail(const ForwardParams& p);
void write_packed_tail(const BackwardParams& p);

}  // namespace flashsdk
