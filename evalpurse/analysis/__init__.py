"""Statistics over finished runs: pure functions that can neither start nor pay for anything.

The unit of inference is the case. scipy loads on the first quantile, so importing any module here is cheap.
"""
