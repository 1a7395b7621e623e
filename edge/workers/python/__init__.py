"""Python Workers: what is checked at deploy, how one becomes a process, and its way out of it.

What runs inside that process is in `inside/`.
"""
