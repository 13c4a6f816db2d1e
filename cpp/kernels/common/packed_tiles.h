// The tiles of packed sequences in one row of places, which needs no sum over lengths: a sequence begins at place
// offset / rows + its number, which leaves room for the rounding of each before it. Some places stay empty: a tile
// there lies behind the end of its sequence.
#pragma once

#include "common/host_device.h"

namespace flashsdk {

FLASHSDK_HD int first_packed_tile(int offset, int tile_rows, int batch) { return offset / tile_rows + batch; }

}  // namespace flashsdk
