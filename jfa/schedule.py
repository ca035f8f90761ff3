"""Which tiles a batch has and in what order CTAs take them: made once a batch, used by every pass and layer.

The lists live in ``jfa.kernels.tiles``, because launches make them when the caller brought none; who takes
which item of a list is a role of each step (``jfa.kernels.parts``: round robin, boustrophedon, counter).
"""

from jfa.kernels.tiles import ORDERS, Schedule, capacities, make_schedule

__all__ = ["ORDERS", "Schedule", "capacities", "make_schedule"]
