"""Regions of global memory: strided windows and lists of addresses, and the shadow pages they fall on.

Most accesses of a kernel are boxes (a tile of a row-major tensor, possibly clipped by a mask). They are kept
as four numbers an axis, which is small to remember and quick to look up again; anything else is a list of
byte addresses.
"""

import numpy as np

PAGE = 4096  # granules a page
EMPTY = ("list", np.zeros(0, np.int64))


class Shadow:
    """Shadow state of one host allocation: granule size, access records by page, released clocks.

    logged: reads that came before the first write, {(region or id, group, slot, epoch): (region, site)}.
    released: element address (or None: the whole tensor) -> clocks released there.
    """

    def __init__(self, name, grain):
        self.name = name
        self.grain = grain
        self.pages = {}
        self.logged = {}
        self.written = False
        self.released = {}
        self.masks = {}

    def page_masks(self, region):
        """[(page, bit mask of granules)] of a region."""
        if region[0] == "pages":
            return region[1]
        if region[0] == "list":
            return split(region[1], self.grain)
        masks = self.masks.get(region)
        if masks is None:
            if len(self.masks) > 4096:
                self.masks.clear()
            masks = self.masks[region] = split(window_addresses(*region[1:]), self.grain)
        return masks

    def refine(self, grain):
        """A second, narrower element type: smaller granules (reads logged as pages are forgotten)."""
        self.grain = grain
        self.masks.clear()
        self.logged = {key: site for key, site in self.logged.items() if key[0][0] == "window"}

    def log_read(self, region, group, slot, epoch, site):
        """Remembers a read of a tensor that nobody has written yet."""
        if region[0] == "list":
            region = ("pages", tuple(split(region[1], self.grain)))
        self.logged[region, group, slot, epoch] = site


def split(addresses, grain):
    """[(page, bit mask)] of byte addresses."""
    if addresses.size == 0:
        return []
    granule = addresses // grain
    first = int(granule.min()) // PAGE
    last = int(granule.max()) // PAGE
    bits = np.zeros((last - first + 1) * PAGE, np.uint8)
    bits[granule - first * PAGE] = 1
    packed = np.packbits(bits.reshape(-1, PAGE), axis=1, bitorder="little")
    pages = np.flatnonzero(packed.any(axis=1)).tolist()
    return [(first + p, int.from_bytes(packed[p].tobytes(), "little")) for p in pages]


def window_addresses(start, shape, strides):
    """Byte addresses of a strided window."""
    address = np.array([start], np.int64)
    for n, stride in zip(shape, strides):
        address = (address[:, None] + np.arange(n, dtype=np.int64) * stride).ravel()
    return address


def window(start, shape, strides, itemsize, base):
    """The region of a window given in elements; elements wider than a granule take two."""
    strides = tuple(int(s) * itemsize for s in strides)
    shape = tuple(int(n) for n in shape)
    if itemsize > 4:
        shape += (2,)
        strides += (4,)
    return ("window", int(start) * itemsize + base, shape, strides)


def of_pointers(offsets, mask, itemsize, base):
    """The region of the elements buf.flat[offsets[mask]]: a window when they form one."""
    offsets = np.asarray(offsets, np.int64)
    if mask is not None:
        mask = np.broadcast_to(mask, offsets.shape)
        box = bounding_box(mask)
        if box is None:
            return EMPTY
        clipped = offsets[box]
        if clipped.size == np.count_nonzero(mask):
            offsets = clipped
        else:
            offsets = offsets[mask]
    strides = box_strides(offsets)
    if strides is not None:
        return window(offsets.flat[0], offsets.shape, strides, itemsize, base)
    addresses = offsets.ravel() * itemsize + base
    if itemsize > 4:
        addresses = np.concatenate([addresses, addresses + 4])
    return ("list", addresses)


def bounding_box(mask):
    """Slices of the smallest box that holds all true elements, or None when there are none."""
    if mask.ndim == 0:
        return () if mask else None
    box = []
    for axis in range(mask.ndim):
        others = tuple(a for a in range(mask.ndim) if a != axis)
        hit = np.flatnonzero(mask.any(axis=others))
        if hit.size == 0:
            return None
        box.append(slice(int(hit[0]), int(hit[-1]) + 1))
    return tuple(box)


def box_strides(offsets):
    """Element strides of a tile of offsets that is affine in its indices, or None."""
    start = offsets.flat[0]
    strides = []
    expected = start
    for axis, n in enumerate(offsets.shape):
        second = [0] * offsets.ndim
        second[axis] = 1
        stride = int(offsets[tuple(second)] - start) if n > 1 else 0
        strides.append(stride)
        steps = np.arange(n, dtype=np.int64) * stride
        expected = expected + steps.reshape((n,) + (1,) * (offsets.ndim - 1 - axis))
    return strides if np.array_equal(offsets, expected) else None
