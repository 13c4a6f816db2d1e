// The whole public C++ API.
#pragma once

#include "flashsdk/attention.h"
#include "flashsdk/mask.h"
#include "flashsdk/registry.h"
#include "flashsdk/status.h"
#include "flashsdk/tensor.h"
#include "flashsdk/threads.h"
#include "flashsdk/version.h"
