"""Executor of warp roles: runs TileLang PrimFuncs on the CPU as their roles, ordered by nothing but barriers."""
