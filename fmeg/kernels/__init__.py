"""Vendor and Triton lowerings. Nothing else in the tree knows about devices.

attention       cuDNN's and torch's flash kernels
"""
