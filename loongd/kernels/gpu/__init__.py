"""Triton kernels. Importing this package imports triton: only code that has chosen CUDA does.

Each public function here has a twin of the same name and signature in `kernels.reference`.
"""
