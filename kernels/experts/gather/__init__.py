"""`gather_gemm`: grouped GEMMs in Triton that read rank-major rows through an index and write the combine buffer.

    index_kernel   which rows chose which expert, and the tiles that follow      one pass over the ids
    gate_up_kernel gathers rows, GEMM1, SwiGLU, re-quantises                     persistent over (tile, columns, split)
    down_kernel    GEMM2, weights; rows with one selection here are done         persistent over (tile, columns)
    finish_kernel  adds what rows with several selections got, in their order    persistent over such rows

Nothing is decided on the host: how many tiles there are, and over how many programs a short sum is spread, is written
by the first kernel and read by the others, so a captured graph serves any routing.

permute_kernels and swiglu_kernel are what a library's grouped GEMMs need around them instead (`deepgemm.py`).
"""
