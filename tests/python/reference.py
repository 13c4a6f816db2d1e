"""The float64 oracle; it lives in the package, because ``flashsdk verify`` uses it as well."""

from flashsdk._reference import *  # noqa: F403
