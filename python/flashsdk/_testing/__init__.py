"""The test bench: the definition in float64, random problems, and how far a result may be off.

The library calls none of it. ``flashsdk verify`` and ``flashsdk demo`` do, and so do the tests.
"""
