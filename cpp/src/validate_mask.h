// The mask of a problem whose sizes are known.
#pragma once

#include "check.h"
#include "common/params.h"
#include "flashsdk/mask.h"

namespace flashsdk {

// Sets p.mask and adds the lists of a layout to the map. `columns`: the transposed lists are needed too.
void validate_mask(const Mask& mask, bool columns, ForwardParams& p, MemoryMap& memory);

}  // namespace flashsdk
