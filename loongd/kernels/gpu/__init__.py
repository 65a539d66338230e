"""Triton kernels. Importing any module here but `plan` imports triton: only code that has chosen
CUDA does.

Each public function here has a twin of the same name and signature in `kernels.reference`.
"""
