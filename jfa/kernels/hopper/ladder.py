"""The steps of the Hopper kernels as data, in the order of the course."""

FORWARD = []
BACKWARD = []
