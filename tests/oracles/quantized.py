"""Weights of 8 and 4 bits as what they stand for, one input at a time, float64."""

import numpy as np


def dequantize(
    numbers, scales, *, inputs_per_scale, outputs_per_scale=1, zeros=None, leasts=None, order=None
):
    """[D F] of numbers [F D] and their scales, zeros and leasts, a row for each group of inputs.

    order: the column of x that each input goes with.
    """
    numbers = np.asarray(numbers, np.float64)
    scales = np.asarray(scales, np.float64)
    F, D = numbers.shape
    columns = [f // outputs_per_scale for f in range(F)]
    out = np.zeros((D, F))
    for d in range(D):
        row = d // inputs_per_scale
        zero = 0 if zeros is None else np.asarray(zeros, np.float64)[row]
        least = 0 if leasts is None else np.asarray(leasts, np.float64)[row]
        values = (numbers[:, d] - zero) * scales[row, columns] + least
        out[d if order is None else order[d]] = values
    return out
