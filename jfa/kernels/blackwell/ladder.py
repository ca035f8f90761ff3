"""The steps of the Blackwell kernels as data, in the order of the course."""

FORWARD = []
BACKWARD = []
