// The tiles of packed sequences in one row of places, which needs no sum over lengths: a sequence begins at place
// offset / rows + its number, which leaves room for the rounding of each before it. Some places stay empty: a tile
// there lies behind the end of its sequence.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flashsdk {

FLASHSDK_HD int first_packed_tile(int offset, int tile_rows, int batch) { return offset / tile_rows + batch; }

// The sequence that a place belongs to. cu_seqlens: (batch + 1), ascending; batch at least 1.
FLASHSDK_HD int sequence_at(const std::int32_t* cu_seqlens, int batch, int tile_rows, int place) {
  int first = 0, last = batch - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (first_packed_tile(cu_seqlens[middle], tile_rows, middle) <= place)
      first = middle;
    else
      last = middle - 1;
  }
  return first;
}

}  // namespace flashsdk
