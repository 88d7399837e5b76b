"""Triton attention that computes many tiles in one launch, for small and ragged work.

`cells` lays out which rows each program works on (torch only), `tuning` says how large its blocks
are, `attention` holds the kernels and is the only file that imports triton.
"""
