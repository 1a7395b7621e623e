"""Native code for the CPU (`*.cpp`): its compilation (`build`) and its callers (`native`).

Compiled once at set-up, where there is a compiler; everything works without it, more slowly.
"""
